"""What moves when members leave and join, with the bounds of the nested layouts."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan import (
    LayoutFamily,
    Segment,
    Sharding,
    Topology,
    TopologyError,
    UnitSpace,
    plan_reshard,
)
from tests.plan.drawing import quick, shardings
from tests.plan.lists import copied, spread


def held_in(topology: Topology, sharding: Sharding) -> dict[int, list[int]]:
    """What every live slot holds of a tensor whose elements are their own positions."""
    return {
        slot: spread(sharding.layouts(topology.family, len(members)), sharding.unit_sizes, index)
        for members in topology.replicas
        for index, slot in members.items()
    }


def dealt(units: int) -> Sharding:
    return Sharding(0, (Segment(UnitSpace(units), 1),))


@st.composite
def changes(draw: st.DrawFn) -> tuple[Sharding, Topology, Topology, set[int]]:
    """Two topologies with losses and joins in between, and the slots that are lost or new."""
    degrees = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    before = Topology.start(degrees, max(degrees))
    if before.world_size > 1 and draw(st.booleans()):
        before, _ = before.lose([draw(st.sampled_from(before.slots))])
    lost: set[int] = set()
    after = before
    if before.world_size > 1:
        lost = draw(st.sets(st.sampled_from(before.slots), max_size=before.world_size - 1))
        after, _ = before.lose(lost)
    free = sorted(lost) + [max(before.slots) + 1 + k for k in range(2)]  # a repair may take the slot that was lost
    for slot in free[: draw(st.integers(0, 3))]:
        joinable = [r for r, degree in enumerate(after.degrees) if degree < after.full_degree]
        if joinable:
            after = after.join(draw(st.sampled_from(joinable)), slot)
    return draw(shardings(before.full_degree)), before, after, lost


@quick
@given(changes())
def test_everybody_gets_what_the_new_layout_asks_and_keeps_what_it_has(
    drawn: tuple[Sharding, Topology, Topology, set[int]],
) -> None:
    sharding, before, after, lost = drawn
    old = {slot: elements for slot, elements in held_in(before, sharding).items() if slot not in lost}
    new = held_in(after, sharding)
    if len(set().union(*old.values())) < len(set().union(*new.values())):
        with pytest.raises(TopologyError, match="has no holder left: every copy was lost"):
            plan_reshard(before, after, sharding, gone=lost)
        return
    exchange = plan_reshard(before, after, sharding, gone=lost)
    assert old | copied(exchange, old) == old | new
    assert {m.receiver for m in exchange.moves} == {s for s in new if old.get(s) != new[s]}
    assert exchange.elements == sum(len(set(new[s]) - set(old.get(s, ()))) for s in new)
    assert {m.sender for m in exchange.traveling} <= set(old)
    if not lost & set(after.slots):
        assert plan_reshard(before, after, sharding) == exchange  # the default: gone is who is not in ``after``


@quick
@given(st.data(), st.integers(2, 6), st.integers(2, 3), st.integers(0, 30))
def test_first_loss_moves_exactly_the_lost_units(data: st.DataObject, degree: int, replicas: int, more: int) -> None:
    before = Topology.start([degree] * replicas)
    sharding = dealt(degree + more)
    peers = before.tensor_parallel_slots(data.draw(st.integers(0, replicas - 1)))
    lost = data.draw(st.sets(st.sampled_from(peers), min_size=1, max_size=degree - 1))
    after, relabels = before.lose(lost)
    exchange = plan_reshard(before, after, sharding)
    held = held_in(before, sharding)
    assert relabels == ()
    assert exchange.elements == sum(len(held[slot]) for slot in lost)
    if len(lost) == 1:
        assert exchange.elements in (sharding.size // degree, -(-sharding.size // degree))
    assert {m.receiver for m in exchange.traveling} <= set(peers) - lost
    assert {m.sender for m in exchange.traveling}.isdisjoint(peers)


@quick
@given(st.data(), st.integers(2, 7), st.integers(0, 60))
def test_later_loss_moves_less_than_three_units_above_its_bound(data: st.DataObject, degree: int, more: int) -> None:
    before = Topology.start([degree] * 3)
    before, _ = before.lose([data.draw(st.integers(0, degree - 1))])
    sharding = dealt(degree + more)
    slot = data.draw(st.sampled_from(before.tensor_parallel_slots(1)))
    after, relabels = before.lose([slot])
    exchange = plan_reshard(before, after, sharding)
    assert len(relabels) == (before.place(slot)[1] != before.dropped[0])
    lost = len(held_in(before, sharding)[slot])
    assert exchange.elements == lost if not relabels else exchange.elements < bound(degree, sharding.size) + 3


@quick
@given(changes())
def test_several_losses_move_no_more_than_one_after_the_other(
    drawn: tuple[Sharding, Topology, Topology, set[int]],
) -> None:
    _, before, _, lost = drawn
    sharding = dealt(23)
    after, _ = before.lose(lost)
    limit = Fraction(0)
    for replica, (old, new) in enumerate(zip(before.degrees, after.degrees, strict=True)):
        for degree in range(new + 1, old + 1) if new else ():
            limit += bound(degree, sharding.size) + 3
        assert new in (old, old - len(lost & set(before.tensor_parallel_slots(replica))))
    held = {e for s, elements in held_in(before, sharding).items() if s not in lost for e in elements}
    if len(held) == sharding.size:
        assert plan_reshard(before, after, sharding).elements <= limit


def bound(degree: int, units: int) -> Fraction:
    """``(2 - 1/(d - 1)) N/d``: what a loss at an index that is not the listed one moves, in real numbers."""
    return (2 - Fraction(1, degree - 1)) * Fraction(units, degree)


def test_rounding_costs_less_than_three_units_for_all_small_sizes() -> None:
    worst = Fraction(0)
    for degree in range(2, 13):
        for units in range(degree, 111):
            for heir in range(degree):
                family, space = LayoutFamily(degree, (heir,)), UnitSpace(units)
                old, new = family.layout(space, degree).owned, family.layout(space, degree - 1).owned
                for lost in new:
                    moved = 2 * len(old[lost]) + len(old[heir]) - len(new[lost])
                    worst = max(worst, moved - bound(degree, units))
    assert 2 < worst < 3


@pytest.mark.parametrize(("units", "degree"), [(96, 4), (64, 8), (64, 64)])
def test_both_bounds_are_met_to_the_unit_where_everything_divides(units: int, degree: int) -> None:
    units *= degree - 1  # N / (d (d - 1)) is whole
    before, _ = Topology.start([degree] * 3).lose([0])
    listed, _ = before.lose([degree])
    other, relabels = before.lose([degree + 1])
    assert plan_reshard(before, listed, dealt(units)).elements == units // degree
    assert len(relabels) == 1
    assert plan_reshard(before, other, dealt(units)).elements == bound(degree, units)


def test_a_join_moves_exactly_what_the_new_member_holds() -> None:
    before = Topology.start((4, 3))
    after = before.join(1, 9)
    exchange = plan_reshard(before, after, dealt(32))
    assert exchange.elements == 8 and {m.receiver for m in exchange.traveling} == {9}
    assert {m.sender for m in exchange.traveling} == {4, 5, 6}  # its own replica has all of them


def test_shrink_then_grow_brings_every_tensor_back() -> None:
    sharding = Sharding(0, (Segment(UnitSpace(14), 2), Segment(UnitSpace(2, shared_by=14), 2)))
    start = Topology.start((4, 4))
    shrunk, _ = start.lose([1])
    grown = shrunk.join(0, 1)
    held = held_in(start, sharding)
    survivors = {slot: elements for slot, elements in held.items() if slot != 1}
    survivors |= copied(plan_reshard(start, shrunk, sharding), survivors)
    survivors |= copied(plan_reshard(shrunk, grown, sharding), survivors)
    assert survivors == held


def test_what_the_other_replicas_send_is_spread_over_them() -> None:
    before = Topology.start([4] * 5)
    after, _ = before.lose([0])
    exchange = plan_reshard(before, after, dealt(64))
    sent = {m.sender: 0 for m in exchange.traveling}
    for move in exchange.traveling:
        sent[move.sender] += move.length
    assert sent == {4: 4, 8: 4, 12: 4, 16: 4}


def test_a_leaving_member_can_still_send() -> None:
    before = Topology.start((2,))
    after, _ = before.lose([1])
    with pytest.raises(TopologyError, match="unit 2 of segment 0 has no holder left"):
        plan_reshard(before, after, dealt(4))
    exchange = plan_reshard(before, after, dealt(4), gone=())
    assert [(m.sender, m.receiver, m.length) for m in exchange.traveling] == [(1, 0, 2)]


def test_nothing_changes_for_a_replica_that_lost_nobody() -> None:
    before = Topology.start((4, 4, 3))
    after, _ = before.lose([8])
    exchange = plan_reshard(before, after, dealt(29))
    assert {m.receiver for m in exchange.moves} <= {9, 10}
    assert plan_reshard(before, before, dealt(29)).moves == ()


def test_a_replicated_parameter_moves_only_to_new_members() -> None:
    before = Topology.start((3, 2))
    after, _ = before.lose([0])
    assert plan_reshard(before, after, Sharding(None)).moves == ()
    exchange = plan_reshard(after, after.join(0, 0), Sharding(None))
    assert [(m.receiver, m.length) for m in exchange.moves] == [(0, 1)]


def test_topologies_of_different_jobs_are_refused() -> None:
    with pytest.raises(TopologyError, match="full degree 3 and 4, 1 and 1 replicas"):
        plan_reshard(Topology.start((3,)), Topology.start((4,)), dealt(8))
    with pytest.raises(TopologyError, match="full degree 3 and 3, 1 and 2 replicas"):
        plan_reshard(Topology.start((3,)), Topology.start((3, 3)), dealt(8))
