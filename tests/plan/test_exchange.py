"""Exchanges: what changes owner moves, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan import Layout, LayoutFamily, Sharding, UnitSpace, copy_exchange, reduce_exchange
from tests.plan.drawing import cut_shardings, families, quick
from tests.plan.lists import copied, cut, moved, spread


@st.composite
def two_cuts(draw: st.DrawFn, shared: bool | None = None) -> tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]]:
    """A sharding and the layouts of two degrees of one family."""
    family = draw(families())
    sharding = draw(cut_shardings(family.full_degree, shared))
    degrees = st.integers(1, family.full_degree)
    return sharding, sharding.layouts(family, draw(degrees)), sharding.layouts(family, draw(degrees))


@st.composite
def foreign_cuts(draw: st.DrawFn) -> tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]]:
    """Layouts of two unrelated families of different full degrees, as when a checkpoint is resumed elsewhere."""
    one, other = draw(families()), draw(families())
    sharding = draw(cut_shardings(max(one.full_degree, other.full_degree)))
    return sharding, sharding.layouts(one, one.full_degree), sharding.layouts(other, other.full_degree)


@quick
@given(st.one_of(two_cuts(), foreign_cuts()))
def test_copying_turns_one_cut_into_the_other_and_moves_only_what_changes_owner(
    drawn: tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]],
) -> None:
    sharding, before, after = drawn
    sizes = sharding.unit_sizes
    exchange = copy_exchange(before, after, sizes)
    held = cut(before, sizes)
    assert copied(exchange, held) == cut(after, sizes)
    changes_owner = sum(len(set(elements) - set(held.get(index, ()))) for index, elements in cut(after, sizes).items())
    assert exchange.elements == changes_owner
    assert list(exchange.moves) == sorted(exchange.moves, key=lambda m: (m.receiver, m.sender))


@quick
@given(st.one_of(two_cuts(), foreign_cuts()))
def test_runs_are_as_long_as_they_can_be(drawn: tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]]) -> None:
    sharding, before, after = drawn
    for exchange in (f(before, after, sharding.unit_sizes) for f in (copy_exchange, reduce_exchange)):
        for move in exchange.moves:
            assert move.length == sum(run.length for run in move.runs)
            for run, following in zip(move.runs, move.runs[1:], strict=False):
                assert run.target + run.length <= following.target
                assert (run.source + run.length, run.target + run.length) != (following.source, following.target)


@quick
@given(st.one_of(two_cuts(), foreign_cuts()))
def test_reducing_brings_every_copy_to_every_holder_once(
    drawn: tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]],
) -> None:
    sharding, before, after = drawn
    sizes = sharding.unit_sizes
    copies = {index: [(element, index) for element in elements] for index, elements in cut(before, sizes).items()}
    arrived = moved(reduce_exchange(before, after, sizes), copies)
    owners: dict[int, list[int]] = {}
    for index in before[0].indices:
        for element in spread(before, sizes, index):
            owners.setdefault(element, []).append(index)
    for index, elements in cut(after, sizes).items():
        assert arrived.get(index, []) == [[(e, owner) for owner in owners[e]] for e in elements]


@quick
@given(two_cuts())
def test_reducing_to_the_primaries_sums_each_unit_in_one_place(
    drawn: tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]],
) -> None:
    sharding, before, after = drawn
    sizes = sharding.unit_sizes
    primaries = tuple(layout.primaries for layout in after)
    exchange = reduce_exchange(before, primaries, sizes)
    ones = {index: [1] * len(elements) for index, elements in cut(before, sizes).items()}
    total = sum(sum(map(sum, values)) for values in moved(exchange, ones).values())
    assert total == sum(map(len, ones.values()))  # every copy is counted once


@quick
@given(two_cuts(shared=False))
def test_inverse_brings_everything_back(drawn: tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]]) -> None:
    sharding, before, after = drawn
    exchange = copy_exchange(before, after, sharding.unit_sizes)
    assert copied(exchange.inverse, cut(after, sharding.unit_sizes)) == cut(before, sharding.unit_sizes)
    assert exchange.inverse.inverse == exchange
    assert exchange.inverse.elements == exchange.elements


@quick
@given(two_cuts())
def test_inverse_of_a_reduction_hands_the_sum_to_every_copy(
    drawn: tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]],
) -> None:
    sharding, before, after = drawn
    sizes = sharding.unit_sizes
    primaries = tuple(layout.primaries for layout in after)
    exchange = reduce_exchange(before, primaries, sizes)
    assert copied(exchange.inverse, cut(primaries, sizes)) == cut(before, sizes)


@quick
@given(two_cuts())
def test_shrink_then_grow_is_the_identity(drawn: tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]]) -> None:
    sharding, before, after = drawn
    sizes = sharding.unit_sizes
    there, back = copy_exchange(before, after, sizes), copy_exchange(after, before, sizes)
    assert copied(back, copied(there, cut(before, sizes))) == cut(before, sizes)


@quick
@given(two_cuts())
def test_what_an_index_keeps_stays_in_front_of_its_segment(
    drawn: tuple[Sharding, tuple[Layout, ...], tuple[Layout, ...]],
) -> None:
    sharding, before, after = drawn
    for old, new, size in zip(before, after, sharding.unit_sizes, strict=True):
        exchange = copy_exchange((old,), (new,), (size,))
        for move in exchange.moves:
            if move.sender == move.receiver:
                kept = min(len(old.owned[move.sender]), len(new.owned[move.sender])) * size
                assert [tuple(run) for run in move.runs] == [(0, 0, kept)]


@quick
@given(families())
def test_one_drop_moves_exactly_the_units_of_the_dropped_index(family: LayoutFamily) -> None:
    space = UnitSpace(5 * family.full_degree + 3)
    for degree in range(family.full_degree, 1, -1):
        old, new = family.layout(space, degree), family.layout(space, degree - 1)
        dropped = family.drop_order[family.full_degree - degree]
        exchange = copy_exchange((old,), (new,), (1,))
        assert {m.sender for m in exchange.traveling} == {dropped}
        assert exchange.elements == len(old.owned[dropped])


@pytest.mark.parametrize(("holders", "receivers"), [(1, 5), (2, 5), (3, 11), (4, 4)])
def test_copies_of_one_unit_come_from_all_holders_evenly(holders: int, receivers: int) -> None:
    before = Layout(1, {index: (0,) for index in range(holders)})
    after = Layout(1, {index: (0,) for index in range(holders + receivers)})
    exchange = copy_exchange((before,), (after,), (1,))
    sent = [sum(m.length for m in exchange.sent_by(index)) for index in range(holders)]
    assert sum(sent) == receivers and max(sent) - min(sent) <= 1


def test_forced_sends_count_when_senders_are_chosen() -> None:
    # index 0 alone holds units 0 and 1 and must send them; unit 2, which 1 holds too, comes from 1
    before, after = Layout(3, {0: (0, 1, 2), 1: (2,)}), Layout(3, {2: (0, 1, 2)})
    exchange = copy_exchange((before,), (after,), (1,))
    assert [(m.sender, m.length) for m in exchange.received_by(2)] == [(0, 2), (1, 1)]


def test_views_of_an_exchange_agree() -> None:
    before, after = Layout(4, {0: (0, 1), 1: (2, 3)}), Layout(4, {0: (0, 1, 3), 1: (2,)})
    exchange = copy_exchange((before,), (after,), (5,))
    assert exchange.sent_by(1) == exchange.received_by(0) == exchange.traveling
    assert [m.sender for m in exchange.placed_at(0)] == [0, 1]
    assert exchange.elements == 5
    assert "Run(source=5, target=10, length=5)" in str(exchange)


def test_a_unit_without_a_holder_is_refused() -> None:
    whole = Layout.whole(2)
    with pytest.raises(ValueError, match="unit 1 has no holder: it cannot be sent to 0"):
        copy_exchange((Layout(2, {0: (0,)}),), (whole,), (1,))
    with pytest.raises(ValueError, match="layouts of 3 and 2 units"):
        copy_exchange((Layout.whole(3),), (whole,), (1,))
