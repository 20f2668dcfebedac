"""Every error of NVML at every call: an answer, never an exception, and what was written is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_ntp.nvml.errors import _KINDS
from lightning_ntp.power.entries import CLOCKS, POWER_LIMIT, PROFILE, Value
from lightning_ntp.power.hand import Hand, Open
from lightning_ntp.power.journal import Journal, Leftovers
from lightning_ntp.power.levers import Levers, Nvml
from lightning_ntp.power.putting_back import Result, Status
from tests.nvml.mock import MockNvml
from tests.power.dead import leave, left

CODES = sorted(code for codes in _KINDS.values() for code in codes)
CALLS = [
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceSetPowerManagementLimit",
    "nvmlDeviceSetGpuLockedClocks",
    "nvmlDeviceResetGpuLockedClocks",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetSupportedMemoryClocks",
    "nvmlDeviceGetSupportedGraphicsClocks",
]
PROFILE_CALLS = [
    f"nvmlDeviceWorkloadPowerProfile{name}"
    for name in (
        "GetProfilesInfo",
        "GetCurrentProfiles",
        "UpdateProfiles_v1",
        "ClearRequestedProfiles",
        "SetRequestedProfiles",
    )
]
A, B, C = (frozenset({number}) for number in (7, 1, 5))


class Bench:
    """A hand on the first GPU, in this process."""

    def __init__(self, uuid: str, directory: Path) -> None:
        self.said: list[str] = []
        self.directory = directory
        self.journal = Journal(directory, self.said.append)
        self.leftovers = Leftovers(self.journal)
        self.hand = Hand(Levers(uuid, Nvml()), self.journal, self.leftovers, "", self.said.append)

    def close(self) -> None:
        self.leftovers.close()
        self.journal.close()


@pytest.fixture
def bench(nvml: MockNvml, uuids: list[str], directory: Path) -> Iterator[Bench]:
    made = Bench(uuids[0], directory)
    yield made
    made.close()


def is_at_first(nvml: MockNvml) -> bool:
    profiles = nvml.get("profiles_requested", 0)
    return nvml.get("power_limit", 0) == 700_000 and nvml.get("locked_clock_max", 0) == 0 and profiles == [0] * 8


@pytest.mark.parametrize("call", [*CALLS[:2], *(pytest.param(call, marks=pytest.mark.chaos) for call in CALLS[2:])])
def test_an_error_while_levers_are_moved(nvml: MockNvml, bench: Bench, call: str) -> None:
    for code in CODES:
        for skip in (0, 1):
            assert isinstance(bench.hand.open("job"), Open)
            assert bench.hand.move(POWER_LIMIT, 500_000).status is Status.DONE
            if skip:
                assert bench.hand.move(CLOCKS, (600, 900)).status is Status.DONE
            with nvml.fail(call, code, gpu=0, skip=skip):
                for lever, value in ((POWER_LIMIT, 400_000), (CLOCKS, (700, 800)), (CLOCKS, None)):
                    assert isinstance(bench.hand.move(lever, value), Result)
                bench.hand.put_back()
            assert bench.hand.close().over, f"{call} {code} {skip}: {bench.said[-1:]}"
            assert is_at_first(nvml), f"{call} {code} {skip}"
            assert bench.journal.moved() == [] and list(bench.directory.glob("*.jsonl")) == []


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, marks=pytest.mark.chaos if call != PROFILE_CALLS[2] else ()) for call in PROFILE_CALLS],
)
def test_an_error_while_profiles_are_moved(nvml: MockNvml, bench: Bench, call: str) -> None:
    first = frozenset({7, 3})
    if call in PROFILE_CALLS[3:]:  # of older drivers
        nvml.missing(PROFILE_CALLS[2])
    for code in CODES:
        for skip in (0, 1, 2):
            nvml.set(0, profiles_requested=[1 << 7 | 1 << 3])
            assert isinstance(bench.hand.open("job"), Open)
            assert bench.hand.move(PROFILE, A).status is Status.DONE
            with nvml.fail(call, code, gpu=0, skip=skip):
                wanted: list[Value] = [B, B | C, frozenset(), A]
                for value in wanted:
                    assert isinstance(bench.hand.move(PROFILE, value), Result)
                assert bench.hand.move(POWER_LIMIT, 500_000).status is Status.DONE, "of another lever"
                bench.hand.put_back()
            assert bench.hand.close().over, f"{call} {code} {skip}: {bench.said[-1:]}"
            assert nvml.get("profiles_requested", 0)[0] == sum(1 << number for number in first), f"{call} {code} {skip}"
            assert bench.journal.moved() == [] and list(bench.directory.glob("*.jsonl")) == []


@pytest.mark.parametrize("call", CALLS)
def test_an_error_while_a_gpu_is_taken(nvml: MockNvml, bench: Bench, call: str) -> None:
    for code in CODES:
        with nvml.fail(call, code, gpu=0):
            answer = bench.hand.open("job")
        if isinstance(answer, Result):
            assert answer.status in (Status.FAILED, Status.DENIED, Status.UNSUPPORTED), f"{code}: {answer}"
            assert list(bench.directory.glob("*.jsonl")) == [], "it is free for others"
        assert isinstance(bench.hand.open("job"), Open), f"{code}"
        assert bench.hand.close().over
    assert nvml.history() == []


@pytest.mark.parametrize("call", [*CALLS, *PROFILE_CALLS[1:3]])
def test_an_error_while_what_a_dead_owner_has_left_is_put_back(
    nvml: MockNvml, bench: Bench, uuids: list[str], call: str
) -> None:
    for code in CODES:
        nvml.set(0, power_limit=600_000, locked_clock_min=600, locked_clock_max=900)
        nvml.set(0, profiles_requested=[1 << 7])
        clocks, profiles = left(uuids[0], None, (600, 900), CLOCKS), left(uuids[0], frozenset(), A, PROFILE)
        leave(bench.directory, left(uuids[0], 700_000, 600_000), clocks, profiles)
        with nvml.fail(call, code, gpu=0):
            answer = bench.hand.open("job")
            assert isinstance(answer, Result) or is_at_first(nvml), f"{call} {code}: taken though it is not put back"
        opened = bench.hand.open("job")
        assert isinstance(opened, Open) and opened.ceiling_mw == 700_000 and is_at_first(nvml)
        assert bench.hand.close().over and list(bench.directory.glob("*.jsonl")) == []


@pytest.mark.parametrize("kind", ["lost", "reset_required", "absent"])
def test_a_gpu_that_disappears_while_it_is_boosted_and_comes_back(nvml: MockNvml, bench: Bench, kind: str) -> None:
    assert isinstance(bench.hand.open("job"), Open)
    assert bench.hand.move(POWER_LIMIT, 500_000).status is Status.DONE
    assert bench.hand.move(CLOCKS, (600, 900)).status is Status.DONE
    assert bench.hand.move(PROFILE, A).status is Status.DONE
    nvml.set(0, **{kind: 1})
    assert bench.hand.move(POWER_LIMIT, 400_000).status is not Status.DONE
    assert not bench.hand.put_back().over
    assert len(bench.journal.moved()) == 3, "it is not forgotten"
    nvml.set(0, **{kind: 0})
    assert bench.hand.put_back().over and is_at_first(nvml)
    assert bench.hand.move(POWER_LIMIT, 450_000).status is Status.DONE


def test_a_gpu_that_comes_back_at_its_defaults_needs_nothing(nvml: MockNvml, bench: Bench) -> None:
    nvml.set(0, power_limit=600_000)
    assert isinstance(bench.hand.open("job"), Open)
    assert bench.hand.move(POWER_LIMIT, 500_000).status is Status.DONE
    nvml.set(0, power_limit=700_000)
    result = bench.hand.move(POWER_LIMIT, 550_000)
    assert result.status is Status.REFUSED and "or the GPU was reset" in result.why
    assert bench.hand.close().over and nvml.get("power_limit", 0) == 700_000


def test_a_write_that_was_made_though_it_is_said_to_have_failed_is_put_back(nvml: MockNvml, bench: Bench) -> None:
    assert isinstance(bench.hand.open("job"), Open)
    with nvml.fail("nvmlDeviceGetPowerManagementLimit", 999, gpu=0, skip=1):
        assert bench.hand.move(POWER_LIMIT, 500_000).status is Status.FAILED
    assert nvml.get("power_limit", 0) == 500_000
    assert bench.hand.close().over and is_at_first(nvml)


def test_nothing_is_written_if_the_journal_cannot_be(
    nvml: MockNvml, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_ntp.power import files

    assert isinstance(bench.hand.open("job"), Open)

    def fsync(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", fsync)
    values: list[tuple[str, Value]] = [(POWER_LIMIT, 400_000), (CLOCKS, (700, 800)), (PROFILE, A)]
    for lever, value in values:
        result = bench.hand.move(lever, value)
        assert result.status is Status.FAILED and "the journal cannot be written" in result.why
    assert nvml.history() == []


def test_two_dead_owners_of_one_gpu_are_put_back_in_turn(nvml: MockNvml, bench: Bench, uuids: list[str]) -> None:
    leave(bench.directory, left(uuids[0], 700_000, 600_000, at=1.0), name="a")
    leave(bench.directory, left(uuids[0], 600_000, 500_000, at=2.0), name="b")
    nvml.set(0, power_limit=500_000)
    assert isinstance(bench.hand.open("job"), Open) and is_at_first(nvml)
