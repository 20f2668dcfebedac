"""Gradient sync, end to end on lists: every owner ends with the dense sum over replicas, in the same bits."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan import LayoutFamily, Segment, Sharding, UnitSpace, plan_sync
from tests.plan.drawing import families, quick, shardings
from tests.plan.lists import spread, synced

MIXES = [(4, 3), (4, 2, 3), (3, 1), (1,), (2,), (3,), (4, 4), (1, 1, 1), (5, 5, 2), (7, 1, 6, 7)]
KINDS = {
    "dealt": Sharding(0, (Segment(UnitSpace(23), 2),)),
    "shared heads": Sharding(0, (Segment(UnitSpace(2, shared_by=14), 3),)),
    "packed": Sharding(
        0, (Segment(UnitSpace(14), 2), Segment(UnitSpace(2, shared_by=14), 2), Segment(UnitSpace(7, shared_by=14), 2))
    ),
    "dealt full": Sharding(0, (Segment(UnitSpace(23), 2),), "full"),
    "shared full": Sharding(0, (Segment(UnitSpace(2, shared_by=14), 1), Segment(UnitSpace(9), 1)), "full"),
    "replicated full": Sharding(None, gradient="full"),
    "replicated partial": Sharding(None, gradient="partial"),
}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Sharding, LayoutFamily, tuple[int, ...]]:
    """A sharding and replicas of any degrees, also none of the full degree."""
    family = draw(families())
    degrees = draw(st.lists(st.integers(1, family.full_degree), min_size=1, max_size=4))
    return draw(shardings(family.full_degree)), family, tuple(degrees)


def check_sync(sharding: Sharding, family: LayoutFamily, degrees: Sequence[int], turn: int) -> None:
    """The result at every owner equals the dense sum: exactly in integers, in the same bits in floats."""
    full = sharding.gradient == "full"

    def copies(replica: int, element: int) -> list[int]:
        layouts = sharding.layouts(family, degrees[replica])
        return [i for i in layouts[0].indices if element in spread(layouts, sharding.unit_sizes, i)]

    def whole_number(replica: int, index: int, element: int) -> int:
        return 1_000_003 * element + 1009 * replica + (0 if full else 7**index)

    def real(replica: int, index: int, element: int) -> float:
        draw = random.Random(f"{replica} {element} {0 if full else index}")
        return draw.uniform(-1, 1) * 10.0 ** draw.randint(-8, 8)  # the order of additions shows in the last bits

    def dense(element: int) -> int:
        return sum(
            whole_number(r, i, element) for r in range(len(degrees)) for i in copies(r, element)[: 1 if full else None]
        )

    seen: dict[int, set[bytes]] = {}
    exact = synced(sharding, family, degrees, whole_number, turn)
    rounded = synced(sharding, family, degrees, real, turn)
    for (plan, integers), (_, floats) in zip(exact, rounded, strict=True):
        for index in plan.compute[0].indices:
            held = spread(plan.compute, sharding.unit_sizes, index)
            assert integers.get(index, []) == [dense(element) for element in held]
            for element, value in zip(held, floats.get(index, []), strict=True):
                seen.setdefault(element, set()).add(struct.pack("d", value))
    assert all(len(bits) == 1 for bits in seen.values()), "two owners of an element differ in bits"


@pytest.mark.parametrize("degrees", MIXES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_owner_ends_with_the_dense_sum_in_the_same_bits(kind: str, degrees: tuple[int, ...]) -> None:
    for dropped in ((), (1,), (2, 0)):
        if len(dropped) < max(degrees):
            check_sync(KINDS[kind], LayoutFamily(max(degrees), dropped), degrees, turn=1)


@quick
@given(worlds(), st.integers(0, 9))
def test_any_world_ends_with_the_dense_sum_in_the_same_bits(
    world: tuple[Sharding, LayoutFamily, tuple[int, ...]], turn: int
) -> None:
    check_sync(*world, turn)


@quick
@given(worlds())
def test_uniform_world_needs_no_exchange_unless_a_partial_unit_is_shared(
    world: tuple[Sharding, LayoutFamily, tuple[int, ...]],
) -> None:
    sharding, family, degrees = world
    plan = plan_sync(sharding, family, [degrees[0]] * len(degrees), degrees[0])
    shared = any(layout.overlapping for layout in plan.compute)
    assert plan.before is None and plan.reduced == plan.compute
    assert (plan.after is not None) == plan.sum_after == (shared and sharding.gradient == "partial")


@quick
@given(worlds())
def test_only_sync_indices_reduce_and_each_partial_unit_once(
    world: tuple[Sharding, LayoutFamily, tuple[int, ...]],
) -> None:
    sharding, family, degrees = world
    for degree in degrees:
        plan = plan_sync(sharding, family, degrees, degree)
        assert set(plan.reduced[0].indices) <= set(family.indices(min(degrees)))
        if len(set(degrees)) > 1 and sharding.gradient == "partial":
            assert not any(layout.overlapping for layout in plan.reduced)


@quick
@given(worlds())
def test_a_replica_sends_each_extra_copy_once_and_gets_it_back(
    world: tuple[Sharding, LayoutFamily, tuple[int, ...]],
) -> None:
    sharding, family, degrees = world
    for degree in degrees:
        plan = plan_sync(sharding, family, degrees, degree)
        if plan.before is None or sharding.gradient == "full":
            continue
        assert plan.after == plan.before.inverse
        extra = 0
        for compute, reduced, size in zip(plan.compute, plan.reduced, sharding.unit_sizes, strict=True):
            for index, units in compute.owned.items():
                extra += size * len(set(units) - set(reduced.owned.get(index, ())))
        assert plan.before.elements == extra


def test_replicas_of_the_smallest_degree_send_nothing_for_dealt_units() -> None:
    plan = plan_sync(KINDS["dealt"], LayoutFamily(4), (4, 3), 3)
    assert plan.before is None and plan.after is None


def test_replicated_full_parameter_is_only_handed_out() -> None:
    plan = plan_sync(KINDS["replicated full"], LayoutFamily(4), (4, 2), 4)
    assert plan.before is None and plan.after is not None
    assert sorted(m.receiver for m in plan.after.traveling) == [2, 3]
    assert sorted(m.sender for m in plan.after.traveling) == [0, 1]  # each sync index serves one


def test_extra_units_of_a_cut_full_parameter_reach_the_sync_layout() -> None:
    plan = plan_sync(KINDS["dealt full"], LayoutFamily(4), (4, 3), 4)
    assert plan.before is not None and {m.sender for m in plan.before.traveling} == {3}


def test_turn_spreads_replicated_partial_parameters_over_the_sync_indices() -> None:
    family = LayoutFamily(5, (0, 3))
    primaries = []
    for turn in range(6):
        reduced = plan_sync(KINDS["replicated partial"], family, (5, 3), 5, turn).reduced[0]
        primaries += [index for index, units in reduced.owned.items() if units]
    assert primaries == [1, 2, 4, 1, 2, 4]


def test_degrees_may_come_from_a_generator() -> None:
    family = LayoutFamily(4)
    assert plan_sync(KINDS["dealt"], family, (d for d in (4, 3)), 4) is plan_sync(KINDS["dealt"], family, (4, 3), 4)


@pytest.mark.parametrize("degree", [2, 0, math.nan, None])
def test_a_degree_nobody_has_is_refused(degree: object) -> None:
    with pytest.raises(ValueError, match=rf"no live replica has degree {degree}; theirs are \[3, 4\]"):
        plan_sync(KINDS["dealt"], LayoutFamily(4), (4, 3), degree)  # type: ignore[arg-type]


@pytest.mark.parametrize("degrees", [(4, 0), (4, 5), (4, -1)])
def test_degrees_outside_the_family_are_refused(degrees: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{min(degrees)}.* not between 1 and the full degree 4"):
        plan_sync(KINDS["dealt"], LayoutFamily(4), degrees, 4)
