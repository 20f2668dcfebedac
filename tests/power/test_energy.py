import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.power.control import Energy, OperatingPoint, PowerSample, boost_prices, energy, energy_per_work


def line(times: list[float], start: float = 100.0, slope: float = 10.0) -> list[PowerSample]:
    return [PowerSample(t, start + slope * t) for t in times]


def test_a_slope_is_integrated_exactly() -> None:
    got = energy(line([0, 1, 4, 10]), 0, 10, 10)
    assert got == Energy(pytest.approx(1500), pytest.approx(10), pytest.approx(0))
    assert got.watts == pytest.approx(150)


def test_samples_outside_the_span_count_only_as_far_as_they_reach_in() -> None:
    assert energy(line([0, 10]), 4, 6, 10).joules == pytest.approx(2 * 150)


def test_a_gap_is_unknown_and_not_billed() -> None:
    got = energy([PowerSample(0, 100), PowerSample(1, 100), PowerSample(9, 700), PowerSample(10, 100)], 0, 10, 2)
    assert (got.joules, got.covered_s, got.unknown_s) == (pytest.approx(500), 2, 8)
    assert got.estimated_joules == pytest.approx(2500)


def test_no_samples_know_nothing() -> None:
    assert energy([], 0, 5, 1) == Energy(0, 0, 5)
    assert energy([], 0, 5, 1).estimated_joules == 0


@given(st.lists(st.floats(0, 100), min_size=2, max_size=20, unique=True), st.floats(1, 99))
def test_a_span_is_the_sum_of_its_parts(times: list[float], cut: float) -> None:
    samples = line(sorted(times))
    whole = energy(samples, 0, 100, 30)
    parts = energy(samples, 0, cut, 30) + energy(samples, cut, 100, 30)
    assert parts.joules == pytest.approx(whole.joules) and parts.covered_s == pytest.approx(whole.covered_s)
    assert whole.covered_s + whole.unknown_s == pytest.approx(100)


@pytest.mark.parametrize("arguments", [(5, 5, 1), (5, 4, 1), (0, 1, 0)])
def test_a_span_that_is_none_is_refused(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="span"):
        energy([], *arguments)


def test_samples_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="sort"):
        energy(line([3, 1]), 0, 10, 10)


def test_steps_tokens_and_replicas_get_their_part() -> None:
    gpus = {"a": Energy(1000, 10), "b": Energy(500, 5, 5), "c": Energy(2000, 10)}
    got = energy_per_work(gpus, {"a": 0, "b": 0, "c": 1}, steps=4, tokens=1000)
    assert got.joules_per_step == 1000 and got.joules_per_token == 4
    assert got.replica_watts == {0: 200, 1: 200}
    with pytest.raises(ValueError, match="whole step"):
        energy_per_work(gpus, {"a": 0, "b": 0, "c": 1}, steps=0, tokens=0)


def test_the_last_watts_of_a_boost_are_the_dearest() -> None:
    points = [OperatingPoint(100 + 100 * f**3, 1000 * f) for f in (1.3, 1.0, 1.1, 1.2)]
    prices = boost_prices(points)
    assert [round(each.speed, 6) for each in prices] == [1, 1.1, 1.2, 1.3]
    assert prices[0].efficiency == 1 and prices[0].joules_per_more_token == pytest.approx(0.2)
    dearer = [each.joules_per_more_token for each in prices[1:]]
    assert dearer == sorted(dearer) and dearer[0] > 0.2


def test_watts_that_win_nothing_cost_without_end() -> None:
    assert boost_prices([OperatingPoint(100, 10), OperatingPoint(200, 10)])[1].joules_per_more_token == float("inf")
    with pytest.raises(ValueError, match="above 0"):
        boost_prices([])
