from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.power.control import BudgetError, Domain, GpuBounds, allocate, next_write, ordered


def domain(count: int = 8, start: float = 500.0, ceiling: float | None = 700.0, **arguments: Any) -> Domain:
    """So many GPUs in replicas of four on one node."""
    gpus = [GpuBounds(f"g{k}", k // 4, "node", start, 200.0, 700.0, ceiling) for k in range(count)]
    return Domain(tuple(gpus), **arguments)


def test_without_a_loss_everybody_keeps_the_limit_at_start() -> None:
    assert set(allocate(domain(), dict.fromkeys(["g0", "g5"], 700.0)).values()) == {500.0}


def test_what_a_lost_gpu_no_longer_draws_goes_to_its_replica_alone() -> None:
    limits = allocate(domain(), {f"g{k}": 700.0 for k in range(8)}, {"g3": 80.0})
    assert limits["g0"] == pytest.approx(500 + 420 / 3, abs=0.001)
    assert limits["g4"] == 500 and "g3" not in limits


def test_the_node_shares_it_if_allowed() -> None:
    limits = allocate(domain(lend="node"), {f"g{k}": 700.0 for k in range(8)}, {"g3": 80.0})
    assert set(limits.values()) <= {559.999, 560.0}


def test_a_draw_that_nobody_has_read_is_not_lent_unless_somebody_vouches_for_it() -> None:
    wishes = {f"g{k}": 700.0 for k in range(8)}
    assert set(allocate(domain(), wishes, {"g3": None}).values()) == {500.0}
    assert allocate(domain(lost_draw_w=0.0), wishes, {"g3": None})["g0"] == pytest.approx(666.666, abs=0.001)


def test_the_operators_limit_is_the_ceiling_by_default() -> None:
    assert set(allocate(domain(ceiling=None), {"g0": 700.0}, {"g3": 0.0}).values()) == {500.0}


def test_a_fellow_that_wishes_for_less_lends_too() -> None:
    limits = allocate(domain(), {"g0": 700.0, "g1": 400.0})
    assert (limits["g0"], limits["g1"], limits["g2"]) == (600.0, 400.0, 500.0)


def test_a_smaller_budget_shrinks_all_shares_alike() -> None:
    small = domain(budget_w=8 * 350.0)
    assert set(small.shares_w.values()) == {350.0}
    assert set(allocate(small, {}).values()) == {350.0}


def test_a_larger_budget_is_there_for_every_wish() -> None:
    limits = allocate(domain(budget_w=8 * 500.0 + 150), {"g0": 700.0, "g4": 550.0})
    assert limits["g4"] == 550 and limits["g0"] == 600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 800.0}, "not between"),
        ({"ceiling": 750.0}, "ceiling"),
        ({"budget_w": 100.0}, "below the sum"),
        ({"lend": "rack"}, "none of"),
        ({"lost_draw_w": -1.0}, "no draw"),
        ({"count": 0}, "needs GPUs"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        domain(**arguments)


def test_a_stranger_is_refused() -> None:
    with pytest.raises(BudgetError, match="g9"):
        allocate(domain(), {"g9": 500.0})


watts = st.floats(0, 1000, allow_nan=False)


@st.composite
def domains(draw: st.DrawFn) -> Domain:
    gpus = []
    for k in range(draw(st.integers(1, 9))):
        low = draw(st.floats(50, 300))
        start = draw(st.floats(low, 700))
        high = draw(st.floats(start, 900))
        ceiling = draw(st.none() | st.floats(low, high))
        node = draw(st.sampled_from("ab"))
        gpus.append(GpuBounds(f"g{k}", draw(st.integers(0, 2)), node, start, low, high, ceiling))
    least, most = sum(g.minimum_w for g in gpus), sum(g.maximum_w for g in gpus)
    budget = draw(st.none() | st.floats(least, most + 100))
    lend = draw(st.sampled_from(["replica", "node"]))
    return Domain(tuple(gpus), budget, lend, draw(st.none() | watts))


def milliwatts(value: float) -> int:
    return round(1000 * value)


@given(domains(), st.data())
def test_limits_stay_in_their_bounds_and_their_sum_in_the_budget(domain: Domain, data: st.DataObject) -> None:
    names = sorted(domain.by_gpu)
    wishes = data.draw(st.dictionaries(st.sampled_from(names), watts))
    away = data.draw(st.dictionaries(st.sampled_from(names), st.none() | watts))
    limits = allocate(domain, wishes, away)
    assert limits.keys() == domain.by_gpu.keys() - away.keys()
    held = sum(milliwatts(domain.held_w(gpu, draw)) for gpu, draw in away.items())
    assert sum(map(milliwatts, limits.values())) + held <= milliwatts(domain.total_w)
    for gpu, limit in limits.items():
        bounds = domain.by_gpu[gpu]
        wish = min(max(wishes.get(gpu, domain.shares_w[gpu]), bounds.minimum_w), bounds.top_w)
        assert min(wish, domain.shares_w[gpu]) - 0.001 <= limit <= wish + 0.001
        assert bounds.minimum_w - 0.001 <= limit <= max(bounds.top_w, bounds.minimum_w) + 0.001


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(watts, watts), min_size=1), watts, watts)
def test_the_sum_exceeds_the_budget_at_no_moment(
    moves: dict[str, tuple[float, float]], more: float, held: float
) -> None:
    before, after = {g: b for g, (b, _) in moves.items()}, {g: a for g, (_, a) in moves.items()}
    budget = held + max(sum(map(milliwatts, before.values())), sum(map(milliwatts, after.values()))) / 1000 + more
    now = {gpu: milliwatts(value) for gpu, value in before.items()}
    for write in ordered(before, after, budget, held):
        assert milliwatts(write.before_w) == now[write.gpu] != milliwatts(write.after_w)
        now[write.gpu] = milliwatts(write.after_w)
        assert sum(now.values()) + milliwatts(held) <= milliwatts(budget) + 1  # the budget is rounded here, too
    assert now == {gpu: milliwatts(value) for gpu, value in after.items()}


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(watts, watts), min_size=1), watts)
def test_above_the_budget_the_sum_only_falls(moves: dict[str, tuple[float, float]], budget: float) -> None:
    now = {gpu: milliwatts(before) for gpu, (before, _) in moves.items()}
    wanted = {gpu: after for gpu, (_, after) in moves.items()}
    total = sum(now.values())
    for write in ordered({gpu: before for gpu, (before, _) in moves.items()}, wanted, budget):
        now[write.gpu] = milliwatts(write.after_w)
        assert sum(now.values()) <= max(total, milliwatts(budget))
        assert sum(now.values()) <= total or sum(now.values()) <= milliwatts(budget)
        total = sum(now.values())


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(watts, watts, st.booleans()), min_size=2))
def test_a_refused_cut_costs_others_their_raise_and_the_budget_nothing(
    moves: dict[str, tuple[float, float, bool]],
) -> None:
    present = {gpu: before for gpu, (before, _, _) in moves.items()}
    budget = sum(map(milliwatts, present.values())) / 1000
    wanted = {gpu: after for gpu, (_, after, _) in moves.items()}
    refused: set[str] = set()
    for _ in range(100):
        write = next_write(present, wanted, budget, refused=refused)
        if write is None:
            break
        if moves[write.gpu][2]:
            refused.add(write.gpu)
        else:
            present[write.gpu] = write.after_w
        assert sum(map(milliwatts, present.values())) <= milliwatts(budget)
    else:
        pytest.fail("it never ends")
