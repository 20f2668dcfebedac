"""The loop over a simulated machine: what a replica that has lost a GPU is given, and what it never does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lightning_ntp.power.control import (
    BoostSettings,
    BudgetError,
    Controller,
    Domain,
    GpuBounds,
    GpuReading,
    HeatLimits,
    Measurement,
)
from tests.power.plant import Machine, Plant
from tests.power.runs import LOST, Run, simulate

ROOMY = Machine(start_w=300, budget_w=4400)
"""Limits far below what the hardware takes, and a budget that lets a replica of three have it."""
LOCKED = Machine(start_w=700, ceiling_w=None, start_clock=1200)
"""Clocks locked low by the operator: the limits are high enough for any clock."""
BOTH = BoostSettings(levers=frozenset({"power_limit", "clocks"}))
SOON = 20
NOT_SHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Shrinking a machine to a simpler one takes minutes, and a simpler one is none the clearer."""
CASES = {
    "power": (ROOMY, None),
    "degree 8": (dataclasses.replace(ROOMY, degree=8, start_w=400, budget_w=9000), None),
    "four replicas": (dataclasses.replace(ROOMY, replicas=4, budget_w=8000), None),
    "clocks": (LOCKED, BOTH),
    "clocks alone": (LOCKED, BoostSettings(levers=frozenset({"clocks"}))),
    "a part of the step follows no clock": (dataclasses.replace(ROOMY, serial=0.4), None),
    "low load": (dataclasses.replace(ROOMY, load=0.8, start_w=250), None),
    "unlike GPUs": (dataclasses.replace(ROOMY, spread=0.08, seed=3), None),
}


def stays_cool_and_bounded(run: Run) -> None:
    """Budget and ceilings are looked at after every write by the plant itself."""
    machine = run.plant.machine
    assert max(max(record.temperatures.values()) for record in run.plant.records) <= machine.t_max


def best_step_s(plant: Plant) -> float:
    """The shortest step of any split of the batch between two replicas, at the clocks of now."""
    batch = plant.machine.batch
    return min(max(plant.compute_s(0, n), plant.compute_s(1, batch - n)) for n in range(1, batch))


# ---- keeping pace -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_shrunken_replica_keeps_pace_soon(case: str, noise: float) -> None:
    machine, settings = CASES[case]
    run = simulate(dataclasses.replace(machine, noise=noise), settings=settings)
    reached = run.intervals_to(0.02)
    assert reached is not None and reached <= SOON
    assert run.decisions[-1].missing_percent == {}
    stays_cool_and_bounded(run)


@settings(max_examples=20, deadline=None, phases=NOT_SHRUNK)
@given(
    idle=st.floats(50, 110),
    dynamic=st.floats(500, 700),
    load=st.floats(0.8, 1),
    start=st.floats(260, 320),
    resistance=st.floats(0.03, 0.06),
    tau=st.floats(5, 120),
    serial=st.floats(0, 0.3),
    spread=st.floats(0, 0.08),
    interval=st.floats(5, 20),
    seed=st.integers(0, 1000),
)
def test_it_does_so_on_any_machine_with_headroom(
    idle: float,
    dynamic: float,
    load: float,
    start: float,
    resistance: float,
    tau: float,
    serial: float,
    spread: float,
    interval: float,
    seed: int,
) -> None:
    machine = Machine(
        idle_power=idle,
        dynamic_power=dynamic,
        load=load,
        start_w=start,
        resistance=resistance,
        time_constant=tau,
        serial=serial,
        spread=spread,
        interval_s=interval,
        seed=seed,
        noise=0.005,
        ceiling_w=1200.0,
        maximum_w=1200.0,
        budget_w=8 * 900.0,
    )
    run = simulate(machine, intervals=5 + SOON + 15)
    stays_cool_and_bounded(run)
    # else the clock's maximum is in the way
    if max(run.plant.records[-1].clocks[f"GPU-1{k}"] for k in range(3)) < 0.99:
        reached = run.intervals_to(0.02)
        assert reached is not None and reached <= SOON, [round(gap, 4) for gap in run.gaps]


@pytest.mark.parametrize("seed", range(10))
def test_noise_of_three_per_cent_leads_to_few_writes_and_a_small_error(seed: int) -> None:
    run = simulate(dataclasses.replace(ROOMY, noise=0.03, spread=0.05, seed=seed), intervals=5 + 40 + 200)
    # three GPUs are written at a time: at most three changes of mind in 200 intervals
    assert run.writes(40, 240) <= 9
    # two noisy times of 3 %, averaged over 60 intervals, leave 0.55 % of standard deviation beside a deadband of 1 %
    assert max(map(abs, run.gaps[65:])) <= 0.025


def test_without_noise_there_is_nothing_to_write_once_it_keeps_pace() -> None:
    assert simulate(ROOMY, intervals=245).writes(SOON) == 0


def test_the_plan_alone_brings_it_near_before_anything_is_measured() -> None:
    def deaf(plant: Plant) -> None:
        plant.measurement, measure = lambda _: measure({}), plant.measurement  # type: ignore[method-assign]

    run = simulate(ROOMY, intervals=15, events={5: deaf})
    assert abs(run.gaps[-1]) < 0.02


def test_a_further_loss_is_made_up_for_too() -> None:
    machine = dataclasses.replace(ROOMY, degree=8, budget_w=16 * 700.0)
    run = simulate(machine, intervals=60, events={25: lambda plant: plant.lose("GPU-15")})
    assert max(map(abs, run.gaps[45:])) < 0.02
    stays_cool_and_bounded(run)


def test_a_replica_that_lost_as_many_as_all_others_is_left_alone() -> None:
    run = simulate(ROOMY, intervals=60, events={25: lambda plant: plant.lose("GPU-02")})
    assert set(run.decisions[-1].limits_w.values()) == {300.0} and run.decisions[-1].notes == ()


def test_a_load_that_changes_is_followed() -> None:
    def heavier(plant: Plant) -> None:
        plant.gpus["GPU-11"].dynamic_power *= 1.15

    run = simulate(ROOMY, intervals=70, events={35: heavier})
    assert abs(run.gaps[36]) > 0.02
    assert max(map(abs, run.gaps[55:])) < 0.02


# ---- the way back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_that_comes_back_brings_everything_back(case: str) -> None:
    machine, settings = CASES[case]
    events: dict[int, Callable[[Plant], None]] = {
        30: lambda plant: plant.announce(LOST),
        31: lambda plant: plant.give_back(LOST),
    }
    run = simulate(dataclasses.replace(machine, noise=0.01), intervals=40, settings=settings, events=events)
    assert {gpu.limit_w for gpu in run.plant.gpus.values()} == {machine.start_w}
    assert {gpu.locked for gpu in run.plant.gpus.values()} == {machine.start_clock}
    assert run.decisions[-1].writes == () and run.decisions[-1].notes == ()


def test_what_was_lent_is_back_before_the_gpu_works() -> None:
    run = simulate(Machine(), intervals=30, events={29: lambda plant: plant.announce(LOST)})
    assert {write.after_w for write in run.decisions[-1].writes} == {450.0}
    assert {gpu.limit_w for gpu in run.plant.gpus.values()} == {450.0}


# ---- no headroom ------------------------------------------------------------------------------------------------

SHORT = {
    "what is lent": (Machine(), "what may be lent is used up"),
    "what is lent, noise": (Machine(noise=0.03), "what may be lent is used up"),
    "what is lent at degree 8": (Machine(degree=8, start_w=400, noise=0.01), "what may be lent is used up"),
    "the ceiling": (Machine(budget_w=5600, start_w=500, noise=0.01), "the ceiling is 700 W"),
    "the operator's limit": (
        Machine(ceiling_w=None, noise=0.01),
        "headroom 0 W: the ceiling is 450 W, the limit at start",
    ),
    "locked clocks": (dataclasses.replace(LOCKED, noise=0.01), "headroom 0 W: the clocks are locked at 1200 MHz"),
    "the highest clock": (Machine(budget_w=5600, load=0.7, noise=0.01), "the clock is at its maximum of 1980 MHz"),
    "heat": (
        dataclasses.replace(ROOMY, resistance=0.1, ambient=35, time_constant=20, noise=0.01),
        "is held at",
    ),
}


@pytest.mark.parametrize("case", SHORT)
def test_samples_do_what_power_cannot(case: str) -> None:
    machine, why = SHORT[case]
    run = simulate(machine, intervals=120, shares=True)
    assert sum(run.plant.samples.values()) == machine.batch and run.plant.samples[1] < run.plant.samples[0]
    for record in run.plant.records[-60::10]:
        assert record.step_s <= 1.02 * best_step_s(run.plant), case
    assert any(why in note for note in run.decisions[-1].notes), run.decisions[-1].notes
    assert run.decisions[-1].missing_percent[1] == pytest.approx(100 * run.gaps[-1], abs=1.5)
    assert run.writes(20, 120) <= 15
    stays_cool_and_bounded(run)


def test_a_lost_gpu_that_cannot_be_asked_lends_nothing_unless_somebody_vouches_for_it() -> None:
    silent = simulate(Machine(), intervals=30, readable=False)
    assert set(silent.decisions[-1].limits_w.values()) == {450.0}
    assert f"GPU {LOST}: its draw is not known, so its 450 W are not lent" in silent.decisions[-1].notes
    vouched = simulate(Machine(lost_draw_w=80), intervals=30, readable=False)
    assert vouched.decisions[-1].limits_w["GPU-10"] == pytest.approx(450 + 370 / 3, abs=1)


def test_a_lost_gpu_that_draws_again_has_its_power_back_at_once() -> None:
    def draws(plant: Plant) -> None:
        measure = plant.measurement

        def with_draw(compute_s: Mapping[int, float]) -> Measurement:
            found = measure(compute_s)
            reading = dataclasses.replace(found.gpus[LOST], power_w=320.0)
            return dataclasses.replace(found, gpus={**found.gpus, LOST: reading})

        plant.measurement = with_draw  # type: ignore[method-assign]

    run = simulate(Machine(), intervals=30, events={20: draws})
    assert run.decisions[19].limits_w["GPU-10"] == pytest.approx(450 + 365 / 3, abs=2)
    assert run.decisions[20].limits_w["GPU-10"] == pytest.approx(450 + 120 / 3, abs=2)
    assert run.decisions[20].held_w == 330


def test_samples_come_back_with_the_gpu() -> None:
    events: dict[int, Callable[[Plant], None]] = {
        40: lambda plant: plant.announce(LOST),
        41: lambda plant: plant.give_back(LOST),
    }
    run = simulate(Machine(noise=0.01), intervals=50, events=events, shares=True)
    assert run.plant.samples == {0: 32, 1: 32}


# ---- heat and other trouble -------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, phases=NOT_SHRUNK)
@given(
    resistance=st.floats(0.05, 0.13),
    ambient=st.floats(20, 40),
    tau=st.floats(5, 150),
    interval=st.floats(5, 20),
    spread=st.floats(0, 0.08),
    seed=st.integers(0, 1000),
)
@pytest.mark.chaos
def test_no_cooling_is_so_bad_that_a_boost_makes_a_gpu_too_hot(
    resistance: float, ambient: float, tau: float, interval: float, spread: float, seed: int
) -> None:
    machine = dataclasses.replace(
        ROOMY,
        resistance=resistance,
        ambient=ambient,
        time_constant=tau,
        interval_s=interval,
        spread=spread,
        seed=seed,
        noise=0.01,
    )
    stays_cool_and_bounded(simulate(machine, intervals=150))


def test_cooling_that_fails_takes_the_boost_back() -> None:
    def fail(plant: Plant) -> None:
        plant.gpus["GPU-11"].resistance *= 1.6

    run = simulate(ROOMY, intervals=150, events={30: fail})
    assert run.plant.records[29].limits_w["GPU-11"] > 600
    assert 300 <= run.plant.records[-1].limits_w["GPU-11"] < 600
    assert run.plant.records[-1].temperatures["GPU-11"] <= 83.5
    # the others of its replica are not heated for nothing
    assert len({run.plant.records[-1].limits_w[f"GPU-1{k}"] for k in range(3)}) == 1
    assert "GPU-11 is held at" in run.decisions[-1].notes[0] and run.decisions[-1].missing_percent[1] > 2


def brake(plant: Plant) -> None:
    plant.gpus["GPU-11"].brake = 0.7


def errors(plant: Plant) -> None:
    plant.gpus["GPU-11"].errors += 5


@pytest.mark.parametrize(("trouble", "why"), [(brake, "a power brake"), (errors, "corrected errors")])
def test_brakes_and_errors_end_the_boost_at_once(trouble: Callable[[Plant], None], why: str) -> None:
    run = simulate(ROOMY, intervals=35, events={30: trouble})
    assert run.plant.records[30].limits_w["GPU-11"] > 600
    assert {run.decisions[30].limits_w[f"GPU-1{k}"] for k in range(3)} == {300.0}
    assert why in run.decisions[30].notes[0] and run.decisions[30].notes[0].startswith("replica 1: headroom 0 W")


def test_trouble_that_comes_again_is_given_more_time_each_time() -> None:
    def again(plant: Plant) -> None:
        plant.gpus["GPU-11"].errors += 5

    run = simulate(ROOMY, intervals=700, events={k: again for k in range(30, 700, 15)})
    boosts = sum(
        before.limits_w["GPU-11"] == 300 < after.limits_w["GPU-11"]
        for before, after in zip(run.plant.records[30:], run.plant.records[31:], strict=False)
    )
    assert boosts <= 5


def blind(plant: Plant) -> None:
    plant.gpus["GPU-11"].readable = False


def seeing(plant: Plant) -> None:
    plant.gpus["GPU-11"].readable = True


def test_one_failed_reading_changes_nothing_and_many_end_the_boost() -> None:
    run = simulate(ROOMY, intervals=50, events={30: blind, 31: seeing, 40: blind})
    assert run.decisions[30].writes == run.decisions[32].writes == ()
    assert run.decisions[-1].limits_w["GPU-11"] == 300
    assert "a temperature that cannot be read" in run.decisions[-1].notes[0]


def test_a_write_that_is_refused_is_not_tried_again_at_once() -> None:
    def refuse(plant: Plant) -> None:
        plant.gpus["GPU-11"].refuses = True

    run = simulate(ROOMY, intervals=40, events={5: refuse}, shares=True)
    asked = sum(any(write.gpu == "GPU-11" for write in each.writes) for each in run.decisions)
    assert asked <= 6 and run.plant.records[-1].step_s <= 1.02 * best_step_s(run.plant)
    assert "a write had no effect" in run.decisions[-1].notes[0]


def test_clocks_that_are_refused_are_not_tried_again_at_once() -> None:
    def stuck(plant: Plant) -> None:
        plant.gpus["GPU-11"].stuck = True

    run = simulate(LOCKED, intervals=60, events={5: stuck}, settings=BOTH)
    raised = sum(
        before.clocks_mhz["GPU-10"] < after.clocks_mhz["GPU-10"]
        for before, after in zip(run.decisions, run.decisions[1:], strict=False)
    )
    assert raised <= 6
    assert run.decisions[-1].missing_percent[1] == pytest.approx(100 * run.gaps[-1], abs=1.5)


def test_limits_that_somebody_else_has_set_on_healthy_replicas_are_left_alone() -> None:
    def operator(plant: Plant) -> None:
        plant.gpus["GPU-00"].limit_w = 280.0

    run = simulate(ROOMY, intervals=40, events={20: operator})
    assert run.plant.gpus["GPU-00"].limit_w == 280
    assert not any(write.gpu == "GPU-00" for each in run.decisions for write in each.writes)


def test_a_budget_below_the_limits_at_start_is_kept_from_the_first_interval_on() -> None:
    run = simulate(Machine(start_w=500, budget_w=8 * 450.0), intervals=4)
    assert {gpu.limit_w for gpu in run.plant.gpus.values()} == {450.0}


# ---- by hand ----------------------------------------------------------------------------------------------------

TWO = Domain(tuple(GpuBounds(f"g{k}", k // 2, "node", 300, 100, 700, 700) for k in range(4)), budget_w=2000)


def measurement(now: float, compute: dict[int, float], **arguments: object) -> Measurement:
    gpus = {f"g{k}": GpuReading(300.0, 290.0, 40.0, 1500.0, None, frozenset({"power_cap"}), 0) for k in range(4)}
    live = {0: ("g0", "g1"), 1: ("g2", "g3")}
    return dataclasses.replace(Measurement(now, gpus, live, compute), **arguments)  # type: ignore[arg-type]


def test_without_a_loss_nothing_is_said_and_nothing_done() -> None:
    controller = Controller(TWO)
    for k in range(30):
        decision = controller.step(measurement(k, {0: 1.0, 1: 1.3}))
    assert decision.writes == () and decision.notes == () and decision.relative_time == {0: 1.0, 1: 1.0}


def test_a_gpu_of_another_job_is_refused() -> None:
    with pytest.raises(BudgetError, match="g9"):
        Controller(TWO).step(measurement(0, {}, live={0: ("g0", "g9")}))


def test_a_replica_that_is_gone_is_no_ones_concern() -> None:
    decision = Controller(TWO).step(measurement(0, {0: 1.0}, live={0: ("g0", "g1"), 1: ()}))
    assert decision.limits_w == {"g0": 300.0, "g1": 300.0} and decision.relative_time == {0: 1.0}


def test_compute_times_are_compared_at_equal_samples() -> None:
    controller = Controller(TWO)
    live = {0: ("g0", "g1"), 1: ("g2",)}
    for k in range(20):
        # half as many samples in half the time above what is fixed: as fast as the other
        decision = controller.step(
            measurement(
                k, {0: 4.2, 1: 2.2}, live=live, samples={0: 20, 1: 10}, fixed_s={0: 0.2, 1: 0.2}, planned={1: 1.002}
            )
        )
    assert decision.writes == () and decision.missing_percent == {}


def test_the_same_measurements_give_the_same_decisions() -> None:
    machine = dataclasses.replace(ROOMY, noise=0.03)
    assert simulate(machine, intervals=30).decisions == simulate(machine, intervals=30).decisions


@pytest.mark.parametrize(
    "arguments",
    [{"levers": frozenset()}, {"levers": frozenset({"fans"})}, {"deadband": 0.0}, {"slew_w": 0.0}, {"settle": -1}],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        BoostSettings(**arguments)  # type: ignore[arg-type]


def test_heat_limits_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="guard_c=0"):
        HeatLimits(guard_c=0)
