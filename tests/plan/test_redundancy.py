"""Who keeps whose copies, and what moves when the job goes back to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan import Sharding, Topology, TopologyError
from lightning_ntp.plan.redundancy import keepers, plan_restore
from tests.plan.drawing import quick, shardings
from tests.plan.lists import copied
from tests.plan.test_reshard import held_in


def test_keepers_form_a_ring() -> None:
    assert keepers(Topology.start((4,))) == {0: 1, 1: 2, 2: 3, 3: 0}
    after, _ = Topology.start((2, 3)).lose([2])
    assert keepers(after) == {0: 1, 1: 3, 3: 4, 4: 0}


def test_a_single_rank_has_no_neighbour() -> None:
    with pytest.raises(TopologyError, match="there is one rank only"):
        keepers(Topology.start((1,)))


@quick
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5))
def test_the_keeper_is_on_another_node_where_nodes_are_equal(degrees: list[int], per_node: int) -> None:
    topology = Topology.start(degrees)
    if topology.world_size == 1:
        return
    keeper_of = keepers(topology, lambda slot: slot // per_node)
    assert set(keeper_of) == set(keeper_of.values()) == set(topology.slots)
    assert all(slot != keeper for slot, keeper in keeper_of.items())
    if topology.world_size % per_node == 0 and topology.world_size > per_node:
        assert all(slot // per_node != keeper // per_node for slot, keeper in keeper_of.items())


@st.composite
def losses(draw: st.DrawFn) -> tuple[Sharding, Topology, Topology]:
    degrees = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda d: sum(d) > 1))
    then = Topology.start(degrees)
    if then.world_size > 2 and draw(st.booleans()):
        then, _ = then.lose([draw(st.sampled_from(then.slots))])
    lost = draw(st.sets(st.sampled_from(then.slots), max_size=then.world_size - 1))
    return draw(shardings(then.full_degree)), then, then.lose(lost)[0]


@quick
@given(losses())
def test_everybody_gets_what_the_new_layout_asks(drawn: tuple[Sharding, Topology, Topology]) -> None:
    sharding, then, after = drawn
    keeper_of = keepers(then)
    copies = {s: k for s, k in keeper_of.items() if s not in after.slots and k in after.slots}
    old, new = held_in(then, sharding), held_in(after, sharding)
    left = {slot: elements for slot, elements in old.items() if slot in after.slots or slot in copies}
    if len(set().union(*left.values())) < len(set().union(*new.values())):
        with pytest.raises(TopologyError, match="has no holder left"):
            plan_restore(then, after, sharding, copies)
        return
    kept = {keeper: slot for slot, keeper in keeper_of.items()}
    held = {slot: old[slot] + old[kept[slot]] for slot in after.slots}
    exchange = plan_restore(then, after, sharding, copies)
    got = copied(exchange, held)
    assert {slot: got.get(slot, old[slot]) for slot in after.slots} == new
    assert {m.sender for m in exchange.moves} <= set(after.slots)
    assert len({(m.sender, m.receiver) for m in exchange.moves}) == len(exchange.moves)
