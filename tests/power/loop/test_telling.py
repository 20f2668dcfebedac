"""What an interval has shown: the state for loggers, and what a boost costs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.launch import jobs
from lightning_ntp.power.control import Decision, Domain, GpuBounds, GpuReading, Measurement
from lightning_ntp.power.loop.domain import Levers
from lightning_ntp.power.loop.energy_meter import LEAST
from lightning_ntp.power.loop.job import PowerJob
from lightning_ntp.power.loop.places import Places, Work
from lightning_ntp.power.loop.report import Report
from lightning_ntp.power.loop.settings import Denied, PowerSettings
from lightning_ntp.power.loop.telling import Interval, Telling

PAGE = Path(__file__).parents[3] / "docs/power.md"
GPUS = {0: ["a", "b"], 1: ["c", "d"]}
DOMAIN = Domain(tuple(GpuBounds(g, r, "node", 300, 200, 700, 700) for r, gpus in GPUS.items() for g in gpus), 2000)


def interval(
    watts: dict[int, float | None], compute_s: dict[int, float], limit_w: float = 300.0, alive: int = 2, **more: Any
) -> Interval:
    """One second and two steps; ``limit_w`` is that of replica 1's ``alive`` GPUs, which draw it."""
    gpus = {0: GPUS[0], 1: GPUS[1][:alive]}
    readings = {g: GpuReading(power_w=watts[r]) for r, each in gpus.items() for g in each}
    measurement = Measurement(0.0, readings, {}, compute_s, {0: 10, 1: 10}, {}, {0: 1.0, 1: 2.0 / alive})
    limits = {g: limit_w if r else 300.0 for r, each in gpus.items() for g in each}
    decision = Decision(limits, {}, (), 0.0, {0: 1.0, 1: 1.1}, {1: 10.0}, more.pop("notes", ()))
    return Interval(measurement, decision, Levers(DOMAIN, {}, None, True), gpus, 1.0, 2.0, more.pop("tokens", 100))


@pytest.fixture
def telling(tmp_path: Path) -> Telling:
    return Telling(tmp_path, Report(tmp_path))


def state(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(jobs.power_state(directory).read_text())
    return found


def prices(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in jobs.power_log(directory).read_text().splitlines()]
    return [line for line in lines if line["kind"] == "price"]


def test_the_state_has_what_loggers_want(telling: Telling, tmp_path: Path) -> None:
    for _ in range(2):
        telling.tell(interval({0: 250.0, 1: 350.0}, {0: 0.5, 1: 0.6}, 400.0))
    now = state(tmp_path)
    assert (now["joules_per_step"], now["joules_per_token"]) == (600.0, 6.0)  # 1,200 W, two steps a second
    assert now["replicas"]["1"] == {
        "gpus": ["c", "d"],
        "watts": 700.0,
        "limit_w": 800.0,
        "start_w": 600.0,
        "compute_s": 0.6,
        "samples": 10,
        "relative_time": 1.1,
        "missing_percent": 10.0,
    }


def test_a_gpu_that_cannot_be_read_is_no_zero(telling: Telling, tmp_path: Path) -> None:
    for _ in range(2):
        telling.tell(interval({0: 250.0, 1: None}, {0: 0.5}))
    now = state(tmp_path)
    assert now["joules_per_step"] is None is now["replicas"]["1"]["watts"]
    assert now["replicas"]["0"]["watts"] == 500.0 and now["replicas"]["1"]["compute_s"] is None


def test_the_price_of_a_boost_is_against_the_same_gpus_without_it(telling: Telling, tmp_path: Path) -> None:
    """Also if the replica was larger then: the time of its degree is that of the plan."""
    for _ in range(LEAST):
        telling.tell(interval({0: 300.0, 1: 300.0}, {0: 0.40, 1: 0.40}))
    for _ in range(2 * LEAST):
        telling.tell(interval({0: 300.0, 1: 600.0}, {0: 0.40, 1: 0.64}, 600.0, alive=1))
    (price,) = prices(tmp_path)
    assert price["values"] == {"power_ratio": 2.0, "speed_ratio": 1.25, "efficiency_ratio": 0.625}
    numbers = re.compile(r"\d+(\.\d+)?")
    shown = {numbers.sub("#", line.removeprefix("power: ")) for line in PAGE.read_text().splitlines()}
    assert numbers.sub("#", price["text"]) in shown


def test_noise_of_the_power_is_one_price(telling: Telling, tmp_path: Path) -> None:
    for _ in range(LEAST):
        telling.tell(interval({0: 300.0, 1: 300.0}, {0: 0.40, 1: 0.40}))
    for number in range(6 * LEAST):
        telling.tell(interval({0: 300.0, 1: 595.0 + number % 3 * 8}, {0: 0.40, 1: 0.32}, 600.0))
    assert len(prices(tmp_path)) == 1


def test_where_nothing_may_be_raised_nobody_is_told_of_headroom(telling: Telling, tmp_path: Path) -> None:
    notes = ("replica 1: headroom 0 W: the ceiling is 300 W", "replica 1: at equal samples its step takes 10 % longer")
    for _ in range(3):
        telling.tell(interval({0: 300.0, 1: 300.0}, {0: 0.40, 1: 0.44}, notes=notes))
    told = [json.loads(line)["text"] for line in jobs.power_log(tmp_path).read_text().splitlines()]
    assert told == [notes[1]]


@pytest.mark.parametrize(("on_denied", "told"), [("rebalance", True), ("warn", False)])
def test_where_limits_may_not_be_written_samples_move_only_if_they_shall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_denied: Denied, told: bool
) -> None:
    monkeypatch.setattr("lightning_ntp.power.loop.job._DENIED_SECONDS", 0.0)  # as after a long while
    settings = PowerSettings(on_denied=on_denied)
    job = PowerJob(settings, tmp_path, Places(tmp_path, 4, ()), set, dict)
    each = interval({0: 300.0, 1: 300.0}, {0: 0.40, 1: 0.44})
    of_slot = dict(enumerate("abcd"))
    job._levers = Levers(DOMAIN, of_slot, None, True)
    job._deny("the driver says no")
    job._tell(each.measurement, each.decision, Work(True), {0: (0, 1), 1: (2, 3)}, 1e9)
    assert jobs.paces_note(tmp_path).exists() == told
