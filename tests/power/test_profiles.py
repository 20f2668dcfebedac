"""Workload power profiles: requested only when asked, within what the device has, and put back like a limit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from lightning_ntp.commands import restore_power
from lightning_ntp.nvml import Profile
from lightning_ntp.power.client import PowerHelper, power_limit, workload_profiles
from lightning_ntp.power.entries import PROFILE
from lightning_ntp.power.putting_back import Status
from tests.nvml.mock import MockNvml
from tests.power.dead import leave, left
from tests.power.standing import wait_until

Make = Callable[..., PowerHelper]
UPDATE = "nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1"
TRAINING, MAX_Q, BALANCED = Profile.LLM_TRAINING, Profile.MAX_Q, Profile.BALANCED


def requested(nvml: MockNvml, gpu: int = 0) -> set[int]:
    words = nvml.get("profiles_requested", gpu)
    return {number for number in range(255) if words[number // 32] >> number % 32 & 1}


def request(nvml: MockNvml, *numbers: int, gpu: int = 0) -> None:
    nvml.set(gpu, profiles_requested=[sum(1 << number for number in numbers)])


@pytest.mark.parametrize("driver", ["new", "old"])
def test_profiles_are_requested_and_put_back(
    nvml: MockNvml, helper: Make, uuids: list[str], directory: Path, driver: str
) -> None:
    if driver == "old":
        nvml.missing(UPDATE)
    request(nvml, MAX_Q, BALANCED)
    one = helper()
    one.open(uuids[:2])
    assert nvml.calls("nvmlDeviceWorkloadPowerProfileGetProfilesInfo") == 0, "nobody has asked for them"
    first, second = one.set(
        workload_profiles(uuids[0], [TRAINING, BALANCED]), workload_profiles(uuids[1], [Profile.MAX_P])
    )
    assert first.done and first.values == {"profiles": [BALANCED, TRAINING]} and second.done
    assert requested(nvml) == {TRAINING, BALANCED} and requested(nvml, 1) == {Profile.MAX_P}
    assert one.state()[uuids[0]]["profiles"] == [BALANCED, TRAINING]
    lines = [json.loads(line) for line in next(directory.glob("*.jsonl")).read_text().splitlines()]
    (entry,) = [line for line in lines if line["lever"] == PROFILE and line["gpu"] == uuids[0]]
    assert (entry["first"], entry["after"]) == ([MAX_Q, BALANCED], [BALANCED, TRAINING])
    assert one.set(workload_profiles(uuids[0], []))[0].done and requested(nvml) == set()
    assert one.release(uuids[0])[uuids[0]].done and requested(nvml) == {MAX_Q, BALANCED}
    assert one.set(workload_profiles(uuids[0], [TRAINING]))[0].done
    one.close()
    assert requested(nvml) == {MAX_Q, BALANCED} and requested(nvml, 1) == set()
    assert list(directory.glob("*.jsonl")) == []


def test_only_profiles_that_the_gpu_has_and_that_go_together(nvml: MockNvml, helper: Make, uuids: list[str]) -> None:
    nvml.set(0, profiles_supported=[1 << MAX_Q | 1 << TRAINING | 1 << BALANCED])
    nvml.set(0, profile_conflicts={TRAINING * 8: 1 << MAX_Q})  # said of one of them only
    one = helper()
    one.open(uuids[:1])
    (answer,) = one.set(workload_profiles(uuids[0], [TRAINING, Profile.HPC, 99]))
    assert answer.status is Status.REFUSED
    assert answer.why == "HPC, profile 99 is not among its profiles: Max-Q, balanced, LLM training"
    (answer,) = one.set(workload_profiles(uuids[0], [MAX_Q, TRAINING]))
    assert answer.status is Status.REFUSED
    assert answer.why == "LLM training conflicts with Max-Q: choose one of them"
    (answer,) = one.set(workload_profiles(uuids[0], [255]))
    assert answer.status is Status.REFUSED and "whole numbers from 0 to 254" in answer.why
    assert nvml.history() == []
    request(nvml, MAX_Q)
    assert one.set(workload_profiles(uuids[0], [TRAINING]))[0].done, "what was requested before makes room"


def test_a_gpu_without_profiles_keeps_its_other_levers(nvml: MockNvml, helper: Make, uuids: list[str]) -> None:
    nvml.unsupported(0, "nvmlDeviceWorkloadPowerProfileGetProfilesInfo")
    nvml.fail("nvmlDeviceWorkloadPowerProfileGetProfilesInfo", pynvml.NVML_ERROR_UNKNOWN, gpu=1)
    one = helper()
    assert all(answer.done for answer in one.open(uuids[:2]).values())
    answers = [one.set(workload_profiles(gpu, [TRAINING]))[0] for gpu in uuids[:2]]
    assert [answer.status for answer in answers] == [Status.UNSUPPORTED, Status.FAILED]
    assert all(answer.done for answer in one.set(*(power_limit(gpu, 500) for gpu in uuids[:2])))
    nvml.permission(False)
    nvml.release()
    assert one.set(workload_profiles(uuids[0], [TRAINING]))[0].status is Status.DENIED


def test_a_profile_is_requested_after_what_lowers_the_power_or_not_at_all(
    nvml: MockNvml, helper: Make, uuids: list[str]
) -> None:
    one = helper()
    one.open(uuids[:2])
    wanted = (workload_profiles(uuids[0], [Profile.MAX_P]), power_limit(uuids[1], 400))
    with nvml.fail("nvmlDeviceSetPowerManagementLimit", pynvml.NVML_ERROR_UNKNOWN):
        assert [answer.status for answer in one.set(*wanted)] == [Status.REFUSED, Status.FAILED]
    assert requested(nvml) == set()
    assert all(answer.done for answer in one.set(*wanted))
    assert [setting.call for setting in nvml.history()] == ["nvmlDeviceSetPowerManagementLimit", UPDATE]


def test_what_somebody_else_has_requested_is_left_alone(nvml: MockNvml, helper: Make, uuids: list[str]) -> None:
    one = helper()
    one.open(uuids[:2])
    one.set(*(workload_profiles(gpu, [TRAINING]) for gpu in uuids[:2]))
    request(nvml, BALANCED)
    (answer,) = one.set(workload_profiles(uuids[0], [MAX_Q]))
    assert answer.status is Status.REFUSED and "requested now: profile balanced, not profile LLM training" in answer.why
    request(nvml, TRAINING, BALANCED, gpu=1)
    assert one.release(uuids[1])[uuids[1]].status is Status.LEFT
    one.close()
    assert requested(nvml) == {BALANCED} and requested(nvml, 1) == {TRAINING, BALANCED}


def test_the_next_helper_puts_back_what_a_killed_one_has_requested(
    nvml: MockNvml, helper: Make, uuids: list[str]
) -> None:
    request(nvml, MAX_Q)
    one = helper()
    one.open(uuids[:1])
    assert one.set(workload_profiles(uuids[0], [TRAINING]))[0].done and one.pid is not None
    os.kill(one.pid, signal.SIGKILL)
    wait_until(lambda: one.lost)
    assert requested(nvml) == {TRAINING}
    assert helper("next").open(uuids[:1])[uuids[0]].done
    assert requested(nvml) == {MAX_Q}


@pytest.mark.parametrize("now", [{MAX_Q, BALANCED}, {BALANCED}, {TRAINING, BALANCED}], ids=["before", "half", "after"])
def test_restore_power_knows_how_far_a_killed_owner_has_come(
    nvml: MockNvml, uuids: list[str], directory: Path, capsys: pytest.CaptureFixture[str], now: set[int]
) -> None:
    entry = left(uuids[0], frozenset(), frozenset({TRAINING, BALANCED}), PROFILE)
    leave(directory, replace(entry, before=frozenset({MAX_Q, BALANCED})))
    request(nvml, *now)
    restore_power.main(["--dry-run"])
    what = "no profile (job 'gone' had set profiles balanced, LLM training)"
    assert f"{uuids[0]} profile: would be put back: {what}" in capsys.readouterr().out and requested(nvml) == now
    restore_power.main([])
    assert f"profile: put back: {what}" in capsys.readouterr().out and requested(nvml) == set()
    assert list(directory.glob("*.jsonl")) == []
