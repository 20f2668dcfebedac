"""Joules per step and prices of boosts, from intervals that do not end where steps do."""

from __future__ import annotations

import pytest

from lightning_ntp.power.loop.energy_meter import LEAST, WINDOW, EnergyMeter


def test_steps_that_do_not_fill_intervals_evenly_cost_what_they_cost() -> None:
    meter = EnergyMeter()
    # 2.5 steps a second at 1,000 W: 400 J each, though every interval has 2 or 3
    told = [meter.take(1.0, {0: 600.0, 1: 400.0}, 2 + number % 2, 0).joules_per_step for number in range(60)]
    assert told[-20:] == pytest.approx([400.0] * 20, rel=0.05)  # one step of the window's 20


def test_steps_that_are_longer_than_intervals_are_told_when_they_end() -> None:
    meter = EnergyMeter()
    told = [meter.take(1.0, {0: 700.0}, 1.0 if number % 4 == 3 else 0.0, 10) for number in range(12)]
    begun = [None] * 4  # how long the first one has taken, nobody has seen
    assert [each.joules_per_step for each in told] == begun + [None, None, None, 2800.0] * 2
    assert [each.joules_per_token for each in told] == begun + [None, None, None, 280.0] * 2


def test_more_power_shows_after_a_window() -> None:
    meter = EnergyMeter()
    for watts in (100.0, 200.0):
        for _ in range(WINDOW + 1):
            last = meter.take(1.0, {0: watts}, 1.0, 0)
    assert last.joules_per_step == pytest.approx(200.0)


def test_a_gpu_that_cannot_be_read_leaves_no_joules_of_a_part() -> None:
    meter = EnergyMeter()
    for _ in range(3):
        meter.take(1.0, {0: 100.0, 1: 100.0}, 1.0, 0)
    spent = meter.take(1.0, {0: 100.0, 1: None}, 1.0, 0)
    assert (spent.watts, spent.joules_per_step) == ({0: 100.0}, None)
    told = [meter.take(1.0, {0: 100.0, 1: 150.0}, 1.0, 0).joules_per_step for _ in range(2)]
    assert told == [None, 250.0], "nothing of before is left"


def test_a_price_is_that_of_the_power_against_none() -> None:
    meter = EnergyMeter()
    for _ in range(LEAST):
        assert meter.boosted(1, 1.0, 300.0, 0.40, 300.0) == 0
    numbers = {meter.boosted(1, 1.0, 360.0, 0.36, 300.0) for _ in range(LEAST)}
    assert numbers == {4}, "1.2 x the power is the fourth point of 5 % each"
    price = meter.price(1, 4)
    assert price is not None
    assert price.point.watts / 300 == pytest.approx(1.2) and price.speed == pytest.approx(0.40 / 0.36)
    assert price.efficiency == pytest.approx(0.40 / 0.36 / 1.2)


def test_what_was_measured_too_seldom_has_no_price() -> None:
    meter = EnergyMeter()
    for number in range(LEAST):
        assert meter.price(1, 4) is None
        meter.boosted(1, 1.0, 300.0, 0.4, 300.0)
        if number:
            meter.boosted(1, 1.0, 360.0, 0.36, 300.0)
    assert meter.price(1, 4) is None is meter.price(0, 4), "one interval is missing"
    meter.boosted(1, 1.0, 360.0, 0.36, 300.0)
    assert meter.price(1, 4) is not None and meter.price(1, 0) is None
