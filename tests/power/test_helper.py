"""The helper as a child: what it writes, what it refuses, and that everything is back when it is over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from lightning_ntp.power.client import PowerHelper, locked_clocks, power_limit
from lightning_ntp.power.putting_back import Status
from tests.nvml.mock import MockNvml
from tests.power.standing import wait_until

Make = Callable[..., PowerHelper]
WRITES = ("nvmlDeviceSetPowerManagementLimit", "nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks")


def writes(nvml: MockNvml) -> list[tuple[str, int, tuple[int, int]]]:
    """What was written by whom ever: the call, the GPU, the arguments."""
    return [(each.call, each.gpu, each.arguments) for each in nvml.history() if each.call in WRITES]


def limits(nvml: MockNvml, count: int = 4) -> list[float]:
    return [nvml.get("power_limit", gpu) / 1000 for gpu in range(count)]


def locks(nvml: MockNvml, gpu: int) -> tuple[int, int]:
    return nvml.get("locked_clock_min", gpu), nvml.get("locked_clock_max", gpu)


def test_limits_and_clocks_are_written_and_put_back(
    nvml: MockNvml, helper: Make, uuids: list[str], directory: Path
) -> None:
    one = helper()
    taken = one.open(uuids[:2])
    assert [each.done for each in taken.values()] == [True, True]
    assert taken[uuids[0]].values == {
        "limit_w": 700.0,
        "minimum_w": 200.0,
        "ceiling_w": 700.0,
        "maximum_w": 700.0,
        "clocks_mhz": [210, 1980],
    }
    answers = one.set(power_limit(uuids[0], 450.5), locked_clocks(uuids[1], (900, 1200)))
    assert [each.done for each in answers] == [True, True]
    assert answers[0].values == {"limit_w": 450.5} and answers[1].values == {"clocks_mhz": [900, 1200]}
    assert limits(nvml) == [450.5, 700, 700, 700] and locks(nvml, 1) == (900, 1200)
    assert one.state()[uuids[0]] == {
        "job": "job",
        "limit_w": 450.5,
        "clocks_mhz": None,
        "profiles": None,
        "leaving": False,
    }
    assert len(list(directory.glob("*.jsonl"))) == 1
    assert one.release(uuids[0])[uuids[0]].done and limits(nvml)[0] == 700 and locks(nvml, 1) == (900, 1200)
    assert one.set(power_limit(uuids[0], 300))[0].done, "what was released is still taken"
    one.close()
    assert limits(nvml) == [700] * 4 and locks(nvml, 1) == (0, 0)
    assert list(directory.glob("*.jsonl")) == []


def test_lower_ones_are_written_first_and_nothing_is_raised_without_them(
    nvml: MockNvml, helper: Make, uuids: list[str]
) -> None:
    one = helper()
    one.open(uuids)
    one.set(*(power_limit(gpu, 500) for gpu in uuids))
    before = len(writes(nvml))
    wanted = [power_limit(uuids[0], 600), power_limit(uuids[1], 400), power_limit(uuids[2], 650)]
    assert all(each.done for each in one.set(*wanted))
    assert {gpu for _, gpu, _ in writes(nvml)[before:]} == {0, 1, 2} and writes(nvml)[before][1] == 1
    with nvml.fail("nvmlDeviceSetPowerManagementLimit", pynvml.NVML_ERROR_UNKNOWN, gpu=1):
        answers = one.set(power_limit(uuids[0], 700), power_limit(uuids[1], 300))
    assert [each.status for each in answers] == [Status.REFUSED, Status.FAILED]
    assert "not raised" in answers[0].why and limits(nvml) == [600, 400, 650, 500]


@pytest.mark.parametrize(
    ("watts", "said"),
    [(199.9, "between 200 and 600 W"), (600.1, "between 200 and 600 W"), (99999, "ceiling")],
)
def test_nothing_is_written_outside_of_minimum_and_ceiling(
    nvml: MockNvml, helper: Make, uuids: list[str], watts: float, said: str
) -> None:
    nvml.set(0, power_limit=600_000)
    one = helper()
    assert one.open(uuids[:1])[uuids[0]].values["ceiling_w"] == 600
    (answer,) = one.set(power_limit(uuids[0], watts))
    assert answer.status is Status.REFUSED and said in answer.why
    (answer,) = one.set(locked_clocks(uuids[0], (200, 900)))
    assert answer.status is Status.REFUSED and "no range between 210 and 1980 MHz" in answer.why
    (answer,) = one.set(power_limit(uuids[1], 500))
    assert answer.status is Status.REFUSED and answer.why == "it was not taken"
    assert writes(nvml) == []


def test_the_hardware_maximum_is_opt_in(nvml: MockNvml, helper: Make, uuids: list[str]) -> None:
    nvml.set(0, power_limit=600_000)
    one = helper(maximum=True)
    assert one.open(uuids[:1])[uuids[0]].values["ceiling_w"] == 700
    assert one.set(power_limit(uuids[0], 690))[0].done
    one.close()
    assert limits(nvml)[0] == 600


def test_no_permission_is_an_answer(nvml: MockNvml, helper: Make, uuids: list[str], directory: Path) -> None:
    nvml.permission(False)
    one = helper()
    assert one.open(uuids[:1])[uuids[0]].done, "reading is free"
    answers = one.set(power_limit(uuids[0], 500), locked_clocks(uuids[0], (900, 1200)))
    assert [each.status for each in answers] == [Status.DENIED] * 2
    assert '"lever":"power_limit"' not in next(directory.glob("*.jsonl")).read_text(), "it is not in the journal"
    one.close()
    assert writes(nvml) == []


def test_permission_that_is_taken_away_and_given_back(nvml: MockNvml, helper: Make, uuids: list[str]) -> None:
    one = helper()
    one.open(uuids[:1])
    assert all(each.done for each in one.set(power_limit(uuids[0], 500), locked_clocks(uuids[0], (900, 1200))))
    nvml.permission(False)
    assert one.set(power_limit(uuids[0], 400))[0].status is Status.DENIED
    assert one.set(locked_clocks(uuids[0], (900, 1000)))[0].status is Status.DENIED
    assert one.release(uuids[0])[uuids[0]].status is Status.DENIED and limits(nvml)[0] == 500
    nvml.permission(True)
    assert one.release(uuids[0])[uuids[0]].done
    assert limits(nvml)[0] == 700 and locks(nvml, 0) == (0, 0)


def test_what_somebody_else_has_set_is_left_alone(nvml: MockNvml, helper: Make, uuids: list[str]) -> None:
    one = helper()
    one.open(uuids[:2])
    one.set(power_limit(uuids[0], 500), power_limit(uuids[1], 500))
    nvml.set(0, power_limit=450_000)
    (answer,) = one.set(power_limit(uuids[0], 550))
    assert answer.status is Status.REFUSED and "somebody else has changed it" in answer.why
    assert one.set(power_limit(uuids[0], 500))[0].status is Status.REFUSED, "from then on"
    nvml.set(1, power_limit=620_000)
    released = one.release()
    assert released[uuids[1]].status is Status.LEFT and "the limit is 620 W, not the 500 W" in released[uuids[1]].why
    assert limits(nvml)[:2] == [450, 620]
    taken = one.open(uuids[:2])
    assert [taken[gpu].values["ceiling_w"] for gpu in uuids[:2]] == [450, 620], "what is there now is the operator's"
    one.close()
    assert limits(nvml)[:2] == [450, 620]


def test_a_limit_that_the_driver_rounds_is_put_back(nvml: MockNvml, helper: Make, uuids: list[str]) -> None:
    one = helper()
    one.open(uuids[:1])
    assert one.set(power_limit(uuids[0], 500.4))[0].done
    nvml.set(0, power_limit=500_000)  # what such a driver would have made of it
    assert one.release(uuids[0])[uuids[0]].done and limits(nvml)[0] == 700


@pytest.mark.parametrize("how", ["parent hangs up", "SIGTERM", "a socket of the parent's that others hold"])
def test_however_it_ends_everything_is_put_back(nvml: MockNvml, helper: Make, uuids: list[str], how: str) -> None:
    lost: list[str] = []
    one = helper(on_lost=lost.append)
    one.open(uuids)
    one.set(*(power_limit(gpu, 300) for gpu in uuids), *(locked_clocks(gpu, (600, 900)) for gpu in uuids))
    assert one.pid is not None
    if how == "parent hangs up":
        one.close()
    elif how == "SIGTERM":
        os.kill(one.pid, signal.SIGTERM)
        wait_until(lambda: lost)
        assert one.set(power_limit(uuids[0], 400))[0].status is Status.LOST
    else:
        assert one._socket is not None
        other = os.dup(one._socket.fileno())
        one.close()
        os.close(other)
    wait_until(lambda: limits(nvml) == [700] * 4 and all(locks(nvml, gpu) == (0, 0) for gpu in range(4)))
    assert len(lost) == (how == "SIGTERM")


def test_a_helper_that_is_killed_is_noticed_and_the_next_one_puts_back(
    nvml: MockNvml, helper: Make, uuids: list[str], directory: Path
) -> None:
    noticed = threading.Event()
    one = helper(on_lost=lambda why: noticed.set())
    one.open(uuids)
    one.set(*(power_limit(gpu, 300) for gpu in uuids), locked_clocks(uuids[3], (600, 900)))
    assert one.pid is not None
    os.kill(one.pid, signal.SIGKILL)
    assert noticed.wait(10) and one.lost
    assert one.set(power_limit(uuids[0], 400))[0].status is Status.LOST and one.release() == {}
    assert limits(nvml) == [300] * 4 and locks(nvml, 3) == (600, 900)
    two = helper("next")
    taken = two.open(uuids[:1])
    assert taken[uuids[0]].values["ceiling_w"] == 700, "the first one's limit is no operator's"
    wait_until(lambda: limits(nvml) == [700] * 4 and locks(nvml, 3) == (0, 0))
    wait_until(lambda: len(list(directory.glob("*.jsonl"))) == 1)


def test_a_helper_that_cannot_be_reached_is_an_answer(nvml: MockNvml, uuids: list[str], tmp_path: Path) -> None:
    one = PowerHelper("job", tmp_path / "nothing")
    assert one.set(power_limit(uuids[0], 300))[0].status is Status.LOST
    (answer,) = one.open(uuids[:1]).values()
    assert answer.status is Status.LOST and "cannot be started or reached" in answer.why
    one.close()


@pytest.mark.parametrize("code", [9, 12, 18])
def test_without_a_driver_there_is_an_answer(nvml: MockNvml, helper: Make, uuids: list[str], code: int) -> None:
    nvml.set(init_error=code)
    one = helper()
    (answer,) = one.open(uuids[:1]).values()
    assert answer.status is Status.FAILED and f"NVML error {code}" in answer.why
    nvml.set(init_error=0)
    wait_until(lambda: one.open(uuids[:1])[uuids[0]].done)


def test_what_is_no_whole_gpu_is_refused(nvml: MockNvml, helper: Make, uuids: list[str]) -> None:
    one = helper()
    (answer,) = one.open(["MIG-00000000-0000"]).values()
    assert answer.status is Status.REFUSED and "MIG" in answer.why
    (answer,) = one.open(["GPU-77777777-0000"]).values()
    assert answer.status is Status.FAILED and "Not Found" in answer.why
    nvml.unsupported(None, "nvmlDeviceGetPowerManagementLimitConstraints")
    assert one.open(uuids[:1])[uuids[0]].status is Status.UNSUPPORTED


def test_clocks_that_an_operator_has_locked_are_locked_so_again(
    helper: Callable[..., PowerHelper], nvml: MockNvml, uuids: list[str]
) -> None:
    """No call says that they are locked: whoever knows it has to."""
    nvml.set(0, locked_clock_min=210, locked_clock_max=1200)
    mine = helper()
    assert mine.open([uuids[0]], (210, 1200))[uuids[0]].done
    assert mine.set(locked_clocks(uuids[0], (210, 1500)))[0].done
    assert nvml.get("locked_clock_max", 0) == 1500
    assert mine.release()[uuids[0]].done and nvml.get("locked_clock_max", 0) == 1200
    assert mine.set(locked_clocks(uuids[0], (210, 1400)))[0].done
    mine.close()
    assert (nvml.get("locked_clock_min", 0), nvml.get("locked_clock_max", 0)) == (210, 1200)


def test_clocks_that_cannot_have_been_locked_so_are_refused(
    helper: Callable[..., PowerHelper], nvml: MockNvml, uuids: list[str]
) -> None:
    answer = helper().open([uuids[0]], (210, 9000))[uuids[0]]
    assert answer.status is Status.REFUSED and "(210, 9000), says the job, which is not between" in answer.why
