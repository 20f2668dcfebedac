"""Nested layouts: every unit owned, balanced, prefixes of each other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan import Layout, LayoutFamily, Segment, Sharding, UnitSpace
from tests.plan.drawing import families, quick, spaces


@st.composite
def families_and_spaces(draw: st.DrawFn, shared: bool | None = None) -> tuple[LayoutFamily, UnitSpace]:
    family = draw(families())
    return family, draw(spaces(family.full_degree, shared))


def test_example_of_the_design() -> None:
    layout = LayoutFamily(8, (7,)).layout(UnitSpace(32), 7)
    assert [layout.owned[i] for i in layout.indices] == [
        (0, 1, 2, 3, 28),
        (4, 5, 6, 7, 29),
        (8, 9, 10, 11, 30),
        (12, 13, 14, 15, 31),
        (16, 17, 18, 19),
        (20, 21, 22, 23),
        (24, 25, 26, 27),
    ]


@quick
@given(families_and_spaces())
def test_every_unit_is_owned_and_no_index_holds_it_twice(drawn: tuple[LayoutFamily, UnitSpace]) -> None:
    family, space = drawn
    for degree in range(1, family.full_degree + 1):
        layout = family.layout(space, degree)
        assert layout.degree == degree and layout.indices == family.indices(degree)
        assert set().union(*layout.owned.values()) == set(range(space.count))
        for units in layout.owned.values():
            assert units and len(set(units)) == len(units)


@quick
@given(families_and_spaces(shared=False))
def test_dealt_units_have_one_owner_and_sizes_are_within_one(drawn: tuple[LayoutFamily, UnitSpace]) -> None:
    family, space = drawn
    for degree in range(1, family.full_degree + 1):
        layout = family.layout(space, degree)
        sizes = {len(units) for units in layout.owned.values()}
        assert sizes <= {space.count // degree, -(-space.count // degree)}
        assert not layout.overlapping and layout.primaries is layout


@quick
@given(families_and_spaces(shared=False))
def test_full_degree_is_contiguous(drawn: tuple[LayoutFamily, UnitSpace]) -> None:
    family, space = drawn
    layout = family.layout(space, family.full_degree)
    assert sum((layout.owned[i] for i in layout.indices), ()) == tuple(range(space.count))


@quick
@given(families_and_spaces())
def test_units_at_a_degree_are_a_prefix_of_those_at_the_degree_below(drawn: tuple[LayoutFamily, UnitSpace]) -> None:
    family, space = drawn
    for degree in range(1, family.full_degree):
        larger, smaller = family.layout(space, degree + 1), family.layout(space, degree)
        for index in smaller.indices:
            assert smaller.owned[index][: len(larger.owned[index])] == larger.owned[index]


@quick
@given(families_and_spaces(shared=True))
def test_an_index_holds_exactly_the_heads_its_consumers_need(drawn: tuple[LayoutFamily, UnitSpace]) -> None:
    family, space = drawn
    assert space.shared_by is not None
    for degree in range(1, family.full_degree + 1):
        queries, heads = family.layout(UnitSpace(space.shared_by), degree), family.layout(space, degree)
        for index in queries.indices:
            needed = {u * space.count // space.shared_by for u in queries.owned[index]}
            assert set(heads.owned[index]) == needed


@quick
@given(families_and_spaces())
def test_primaries_name_one_owner_in_its_own_order(drawn: tuple[LayoutFamily, UnitSpace]) -> None:
    family, space = drawn
    for degree in range(1, family.full_degree + 1):
        layout = family.layout(space, degree)
        primaries = layout.primaries
        assert primaries.indices == layout.indices and not primaries.overlapping
        assert all(len(owners) == 1 for owners in primaries.owners)
        for index, units in primaries.owned.items():
            assert units == tuple(u for u in layout.owned[index] if u in units)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_primaries_of_heads_on_all_indices_are_spread_evenly(count: int) -> None:
    everywhere = Layout(count, {index: tuple(range(count)) for index in range(3)})
    sizes = [len(units) for units in everywhere.primaries.owned.values()]
    assert max(sizes) - min(sizes) <= 1


@quick
@given(families_and_spaces())
def test_owners_and_positions_agree_with_what_is_owned(drawn: tuple[LayoutFamily, UnitSpace]) -> None:
    family, space = drawn
    layout = family.layout(space, family.full_degree)
    for unit, owners in enumerate(layout.owners):
        assert owners == tuple(i for i in layout.indices if unit in layout.owned[i])
        for index in owners:
            assert layout.owned[index][layout.positions[index][unit]] == unit


def test_equal_layouts_are_one_key() -> None:
    one, other = Layout(2, {0: (0,), 1: (1,)}), Layout(2, {1: (1,), 0: (0,)})
    assert one == other and len({one, other}) == 1
    assert one != Layout(2, {0: (0,), 1: (0,)})


def test_a_layout_that_lacks_units_still_sees_several_owners() -> None:
    assert Layout(2, {0: (0,), 1: (0,)}).overlapping  # as many holdings as units, but unit 1 has none


@quick
@given(families())
def test_indices_shrink_along_the_list_of_dropped_indices(family: LayoutFamily) -> None:
    alive = set(range(family.full_degree))
    for step, index in enumerate(family.drop_order[:-1]):
        alive.remove(index)
        assert family.indices(family.full_degree - step - 1) == tuple(sorted(alive))
    assert family.drop_order[: len(family.dropped)] == family.dropped


@pytest.mark.parametrize("space", [UnitSpace(3), UnitSpace(1, shared_by=3), UnitSpace(3, shared_by=3)])
def test_degree_above_the_number_of_units_is_refused(space: UnitSpace) -> None:
    with pytest.raises(ValueError, match=r"degree 4 is above the number of units, 3.*at most 3"):
        LayoutFamily(4).layout(space, 4)
    with pytest.raises(ValueError, match="degree 4 is above"):
        LayoutFamily(4).layout(space, 2)  # the job can grow to 4: refuse now, not then


@pytest.mark.parametrize("degree", [0, -1, 5, math.nan])
def test_degree_outside_the_family_is_refused(degree: float) -> None:
    with pytest.raises(ValueError, match=f"degree {degree} is not between 1 and the full degree 4"):
        LayoutFamily(4).layout(UnitSpace(8), degree)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"degree {degree} is not"):
        LayoutFamily(4).indices(degree)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -3, math.nan, math.inf, 2.5, True, "4", None])
def test_what_cannot_count_is_refused_by_name(bad: object) -> None:
    named = str(bad).replace(".", r"\.")
    with pytest.raises(ValueError, match=f"number of units must be an integer of at least 1, got '?{named}"):
        UnitSpace(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"full degree must be .* got '?{named}"):
        LayoutFamily(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"unit size of a segment must be .* got '?{named}"):
        Segment(UnitSpace(4), bad)  # type: ignore[arg-type]
    if bad is not None:
        with pytest.raises(ValueError, match=f"number of query heads must be .* got '?{named}"):
            UnitSpace(4, shared_by=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "shared_by"), [(2, 3), (4, 2), (4, 6)])
def test_heads_that_cannot_be_shared_evenly_are_refused(count: int, shared_by: int) -> None:
    with pytest.raises(ValueError, match=f"{shared_by} query heads cannot share {count} key/value heads"):
        UnitSpace(count, shared_by=shared_by)


@pytest.mark.parametrize("dropped", [(1, 1), (4,), (-1,)])
def test_bad_list_of_dropped_indices_is_refused(dropped: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"different numbers below 4, got \["):
        LayoutFamily(4, dropped)


def test_inconsistent_shardings_are_refused() -> None:
    with pytest.raises(ValueError, match="segments exactly if it has a dimension"):
        Sharding(0)
    with pytest.raises(ValueError, match="segments exactly if it has a dimension"):
        Sharding(None, (Segment(UnitSpace(2), 1),))
    with pytest.raises(ValueError, match="gradient='whole' is none of"):
        Sharding(None, gradient="whole")  # type: ignore[arg-type]


def test_local_sizes_of_a_packed_weight_add_up() -> None:
    packed = Sharding(0, (Segment(UnitSpace(6), 4), Segment(UnitSpace(2, shared_by=6), 4)))
    family = LayoutFamily(3)
    layouts = packed.layouts(family, 3)
    assert packed.size == 32
    assert [packed.local_size(layouts, i) for i in range(4)] == [12, 16, 12, 0]
    assert packed.local_size(packed.whole_layouts(), 0) == packed.size
    assert Sharding(None).local_size(Sharding(None).layouts(family, 2), 1) == 1
