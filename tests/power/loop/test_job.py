"""The loop's looks, one by one: what is tried again, what is not, and what rank 0 is told meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nvml.mock import MockNvml
from tests.power.loop.rig import SLOTS, START_W, Looks
from tests.power.standing import wait_until


@pytest.fixture
def looks(nvml: MockNvml, directory: Path, tmp_path: Path) -> Iterator[Callable[..., Looks]]:
    """``looks(ceiling=300.0)`` gives a job, closed at the end of the test."""
    made: list[Looks] = []

    def make(**settings: Any) -> Looks:
        made.append(Looks(nvml, tmp_path / "job", **settings))
        return made[-1]

    yield make
    nvml.release()
    for each in made:
        each.job.close()


def test_a_loss_is_made_up_for_and_a_return_puts_back(looks: Callable[..., Looks]) -> None:
    job = looks()
    job.look(3, {0: 0.1, 1: 0.1})
    job.lose(3)
    job.look(6, {0: 0.1, 1: 0.2})
    assert job.limits[2] > 230 and job.job.lends(3)
    job.alive.add(3)
    job.look()
    assert job.limits == [START_W] * 4 and not job.job.lends(3)


@pytest.mark.parametrize("on_denied", ["warn", "rebalance"])
def test_limits_that_may_not_be_written_are_tried_again(
    looks: Callable[..., Looks], nvml: MockNvml, on_denied: str
) -> None:
    job = looks(on_denied=on_denied)
    nvml.permission(False)
    job.look(3, {0: 0.1, 1: 0.1})
    job.lose(3)
    for _ in range(2):
        job.look(8, {0: 0.1, 1: 0.2})
        assert bool(job.relative_times()) == (on_denied == "rebalance"), "samples move if that was wanted"
        job.job._denied_until = 0.0  # time goes by
    assert job.limits == [START_W] * 4
    assert len([line for line in job.told() if "cannot be written" in line]) == 1
    nvml.permission(True)
    job.job._denied_until = 0.0
    job.look(8, {0: 0.1, 1: 0.2})
    assert job.limits[2] > 230, job.told()


def test_the_next_fit_has_power_though_the_driver_was_slow_to_put_back(
    looks: Callable[..., Looks], nvml: MockNvml
) -> None:
    job = looks()
    job.look(3, {0: 0.1, 1: 0.1})
    job.lose(3)
    job.look(4, {0: 0.1, 1: 0.2})
    assert job.limits[2] > 230
    with nvml.block("nvmlDeviceSetPowerManagementLimit"):
        job.idle()
        job.look()
        job.work()
        job.look()
    nvml.release()
    job.look(8, {0: 0.1, 1: 0.2})
    assert job.limits[2] > 230, job.told()


@pytest.mark.parametrize("known", [True, False])
def test_a_gpu_that_is_off_the_bus_keeps_nobody_from_power(
    looks: Callable[..., Looks], nvml: MockNvml, known: bool
) -> None:
    """The next fit begins without it, or another helper does."""
    job = looks(on_denied="error")
    if known:
        job.look(3, {0: 0.1, 1: 0.1})
    job.lose(3)
    nvml.set(3, lost=1)
    job.unread.add(3)
    job.idle()
    job.look()
    job.work()
    job.look(8, {0: 0.1, 1: 0.2})
    assert not job.job.fatal, job.job.fatal


def test_a_full_disk_takes_no_power_away(
    looks: Callable[..., Looks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    job = looks(ceiling=250.0)
    job.look(3, {0: 0.1, 1: 0.1})
    job.lose(3)
    monkeypatch.setattr("lightning_ntp.launch.jobs.write_whole", full)
    job.look(8, {0: 0.1, 1: 0.2})
    assert job.limits[2] == 250
    monkeypatch.undo()
    job.look(2, {0: 0.1, 1: 0.2})
    assert job.relative_times()


def test_samples_that_move_are_no_change_of_pace(looks: Callable[..., Looks]) -> None:
    """An interval in which they have moved is of neither number."""
    job = looks(ceiling="found")
    job.look(3, {0: 0.1, 1: 0.1})
    job.lose(3)
    job.look(8, {0: 0.1, 1: 0.2})
    before = job.relative_times()["1"]
    job.compute({0: 0.1, 1: 0.2}, micro_batches=30)
    job.work(samples={0: 11, 1: 5})
    job.compute({0: 11 / 80, 1: 0.125})
    job.look()
    job.look(2, {0: 11 / 80, 1: 0.125})
    assert job.relative_times()["1"] == pytest.approx(before, rel=0.01)


def chaos(*values: Any) -> list[Any]:
    """Parameters that only `make chaos` runs."""
    return [pytest.param(value, marks=pytest.mark.chaos) for value in values]


@pytest.mark.parametrize(
    "settings",
    [
        {"lend": "node"},
        *chaos(
            {"budget": 600.0},
            {"budget": 600.0, "ceiling": "found", "lend": "node"},
            {"budget": 900.0, "ceiling": 300.0},
            {"ceiling": 150.0},
            {"lost_draw": 40.0, "lend": "node"},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 6))])
def test_the_budget_holds_after_every_write_whatever_befalls(
    looks: Callable[..., Looks], nvml: MockNvml, settings: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)
    job = looks(**settings)
    now, seen, started = [START_W] * 4, 0, set(SLOTS)
    budget = settings.get("budget", 4 * START_W)
    within = budget >= sum(now)

    def draw(slot: int) -> float:
        drawn = settings.get("lost_draw", START_W) if slot in job.unread else job.draws_w[slot]
        return min(drawn, now[slot], min(START_W, budget / 4))

    for _ in range(60):
        event, idle = chance.random(), False
        slot = chance.choice(SLOTS)
        if event < 0.15 and slot in job.alive and len(job.alive) > 1:
            started.discard(slot)
            job.lose(slot, chance.choice([60.0, 80.0, 170.0]))
            job.unread |= {slot} if chance.random() < 0.3 else set()
        elif event < 0.35 and slot not in job.alive:
            job.unread.discard(slot)
            job.alive.add(slot)
        elif event < 0.4:
            job.idle()
            idle = True
        elif event < 0.45:
            nvml.fail("nvmlDeviceSetPowerManagementLimit", 999, chance.choice(SLOTS), times=chance.randint(1, 3))
        ready = {s for s in job.alive - started if not job.job.lends(s)}
        started |= ready
        job.draws_w |= dict.fromkeys(ready, 180.0)
        job.look(1, {r: chance.uniform(0.08, 0.25) for r in (0, 1)})
        for write in nvml.history()[seen:]:
            seen += 1
            now[write.gpu] = write.arguments[0] / 1000
            held = sum(draw(slot) for slot in SLOTS if slot not in started)
            total = sum(now[s] for s in started) + held
            within = not idle and (within or total <= budget)  # nobody trains: the limits are the operator's again
            assert not within or total <= budget + 0.01, (write, now, started, held)
        job.work()
    nvml.release()
    job.idle()
    job.look(2)
    assert job.limits == [START_W] * 4


def test_who_is_lost_before_the_first_look_draws_power_and_comes_back_at_once(looks: Callable[..., Looks]) -> None:
    job = looks(budget=600.0, lend="node")
    job.lose(0, draws_w=80.0)
    job.look(6, {0: 0.2, 1: 0.1})
    assert 190 < job.limits[1] and sum(job.limits[1:]) <= 600 - 80
    job.alive.add(0)
    job.look(2)
    assert not job.job.lends(0) and sum(job.limits) <= 600


def test_a_helper_that_is_lost_again_and_again_is_started_ever_more_rarely(looks: Callable[..., Looks]) -> None:
    job = looks()
    pauses = []
    for _ in range(3):
        job.job._not_before = 0.0
        job.look()
        writer = job.job._levers and job.job._levers.writer
        assert writer is not None and writer._helper is not None and writer._helper.pid is not None
        os.kill(writer._helper.pid, signal.SIGKILL)
        wait_until(lambda found=writer: found.lost)  # type: ignore[misc]
        job.look()
        pauses.append(job.job._not_before - time.monotonic())
    assert pauses == pytest.approx([5, 10, 20], abs=1)
