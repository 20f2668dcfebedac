"""Slots, ranks and degrees through losses and joins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan import LayoutFamily, Relabel, Topology, TopologyError
from tests.plan.drawing import quick


@st.composite
def topologies(draw: st.DrawFn, least: int = 1) -> Topology:
    """A start of any degrees."""
    degrees = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda d: sum(d) >= least))
    return Topology.start(degrees, max(degrees) + draw(st.integers(0, 1)))


def check(topology: Topology) -> None:
    """What holds for every topology."""
    family = topology.family
    for members in topology.replicas:
        if members:
            assert tuple(sorted(members)) == family.indices(len(members)), "a replica is outside the family"
    least = min(topology.live_degrees)
    assert len(topology.dropped) == topology.full_degree - least, "the list is fixed exactly as far as it is used"
    slots = topology.slots
    assert [topology.rank(slot) for slot in slots] == list(range(topology.world_size)), "ranks are not dense"
    assert topology.rank(min(slots)) == 0
    assert sum(topology.degrees) == topology.world_size
    assert topology.sync_indices == family.indices(least)
    for index in topology.sync_indices:
        assert len(topology.data_parallel_slots(index)) == len(topology.live_replicas)
    for replica in topology.live_replicas:
        peers = topology.tensor_parallel_slots(replica)
        assert [topology.place(slot) for slot in peers] == [(replica, i) for i in sorted(topology.replicas[replica])]


def change(data: st.DataObject, topology: Topology) -> Topology:
    """Lose some slots or let one join, and check what must hold between the two topologies."""
    joinable = [r for r, degree in enumerate(topology.degrees) if degree < topology.full_degree]
    if len(joinable) > 0 and data.draw(st.booleans()):
        replica, slot = data.draw(st.sampled_from(joinable)), max(topology.slots) + 1
        after = topology.join(replica, slot)
        assert after.place(slot)[0] == replica
        assert all(after.place(s) == topology.place(s) for s in topology.slots), "a join moved somebody"
        return after
    if topology.world_size == 1:
        return topology
    slots = st.sets(st.sampled_from(topology.slots), min_size=1, max_size=topology.world_size - 1)
    lost = data.draw(slots)
    after, relabels = topology.lose(lost)
    assert set(after.slots) == set(topology.slots) - lost
    changed = {s for s in after.slots if after.place(s) != topology.place(s)}
    assert [r.slot for r in relabels] == sorted(changed), "relabels are not exactly the changes"
    for relabel in relabels:
        replica, old = topology.place(relabel.slot)
        assert relabel.old == old and after.place(relabel.slot) == (replica, relabel.new)
        assert topology.replicas[replica][relabel.new] in lost, "a relabelled member took a living member's index"
        assert relabel.old in after.dropped
    return after


@quick
@given(st.data(), topologies())
def test_any_losses_and_joins_keep_the_topology_sound(data: st.DataObject, topology: Topology) -> None:
    check(topology)
    for _ in range(data.draw(st.integers(1, 5))):
        topology = change(data, topology)
        check(topology)


@quick
@given(st.data(), st.integers(2, 6), st.integers(1, 3))
def test_first_losses_in_one_replica_relabel_nobody(data: st.DataObject, degree: int, replicas: int) -> None:
    topology = Topology.start([degree] * replicas)
    peers = topology.tensor_parallel_slots(data.draw(st.integers(0, replicas - 1)))
    lost = data.draw(st.sets(st.sampled_from(peers), min_size=1, max_size=degree - 1))
    after, relabels = topology.lose(lost)
    assert relabels == ()
    assert set(after.dropped) == {topology.place(slot)[1] for slot in lost}


@quick
@given(st.data(), st.integers(2, 6), st.integers(1, 3))
def test_losing_and_repairing_is_the_identity(data: st.DataObject, degree: int, replicas: int) -> None:
    topology = Topology.start([degree] * replicas)
    slot = data.draw(st.sampled_from(topology.slots))
    after, _ = topology.lose([slot])
    assert after.join(topology.place(slot)[0], slot) == topology


def test_ranks_follow_the_live_slots_when_slot_zero_is_lost() -> None:
    topology, _ = Topology.start((2, 2)).lose([0])
    assert topology.slots == (1, 2, 3)
    assert [topology.rank(s) for s in (1, 2, 3)] == [0, 1, 2]


def test_a_later_loss_relabels_the_member_of_the_listed_index() -> None:
    topology, relabels = Topology.start((4, 4)).lose([1])
    assert (topology.dropped, relabels) == ((1,), ())
    topology, relabels = topology.lose([6])  # index 2 of replica 1: its index 1 must go, so slot 5 takes index 2
    assert topology.dropped == (1,)
    assert relabels == (Relabel(slot=5, old=1, new=2),)
    assert topology.replicas[1] == {0: 4, 2: 5, 3: 7}


def test_a_member_relabelled_twice_in_one_change_is_reported_once() -> None:
    start = Topology.start((4, 2))  # indices 3, then 2 are listed
    topology, relabels = start.lose([0, 2])
    assert topology.replicas[0] == {0: 3, 1: 1}
    assert relabels == (Relabel(slot=3, old=3, new=0),)


def test_a_dying_heir_is_not_reported() -> None:
    topology, relabels = Topology.start((4, 3)).lose([1, 3])
    assert relabels == () and topology.replicas[0] == {0: 0, 2: 2} and topology.dropped == (3, 1)


def test_a_replica_that_goes_whole_does_not_fix_the_list() -> None:
    topology, relabels = Topology.start((3, 3, 3)).lose([0, 1, 2, 4])
    assert relabels == ()  # slot 4 is the first loss that matters: index 1 goes
    assert topology.dropped == (1,) and topology.degrees == (0, 2, 3)
    assert topology.live_replicas == (1, 2) and topology.live_degrees == (2, 3)


def test_the_list_is_free_again_after_a_repair() -> None:
    topology, _ = Topology.start((3, 3)).lose([1])
    topology, relabels = topology.join(0, 1).lose([5])
    assert topology.dropped == (2,) and relabels == ()


def test_a_replica_that_comes_back_fixes_what_it_uses() -> None:
    topology, _ = Topology.start((3, 3)).lose([3, 4, 5])
    assert topology.dropped == ()
    topology = topology.join(1, 6)
    assert topology.replicas[1] == {0: 6} and topology.dropped == (2, 1)
    topology, relabels = topology.lose([0])  # must leave replica 0 at indices 0 and 1
    assert topology.replicas[0] == {0: 2, 1: 1} and relabels == (Relabel(2, old=2, new=0),)


def test_start_counts_slots_through_the_replicas() -> None:
    topology = Topology.start((4, 2, 3))
    assert [topology.place(s) for s in (0, 3, 4, 5, 6, 8)] == [(0, 0), (0, 3), (1, 0), (1, 1), (2, 0), (2, 2)]
    assert topology.family == LayoutFamily(4, (3, 2))
    assert topology.sync_indices == (0, 1) and not topology.uniform and Topology.start((2, 2)).uniform
    assert topology.data_parallel_slots(2) == (2, 8) and topology.data_parallel_slots(3) == (3,)


@pytest.mark.parametrize("slot", [7, -1, None])
def test_a_slot_that_is_not_alive_is_refused(slot: Any) -> None:
    topology = Topology.start((4, 3))
    for call in (topology.place, topology.rank, lambda s: topology.lose([s])):
        with pytest.raises(TopologyError, match=rf"slot {slot} is not alive; live slots are \[0, 1"):
            call(slot)


def test_losing_everybody_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"no slot is left after losing \[0, 1, 2\]"):
        Topology.start((2, 1)).lose(range(3))


def test_bad_joins_are_refused() -> None:
    topology = Topology.start((2, 1))
    with pytest.raises(TopologyError, match="slot 0 is alive already, in replica 0"):
        topology.join(1, 0)
    with pytest.raises(TopologyError, match="replica 0 is at its full degree 2 already"):
        topology.join(0, 9)
    for replica in (2, -1, None):
        with pytest.raises(TopologyError, match=rf"replica {replica} does not exist: there are 2"):
            topology.join(replica, 9)  # type: ignore[arg-type]


def test_losing_nobody_changes_nothing() -> None:
    topology = Topology.start((4, 3))
    assert topology.lose(()) == (topology, ())


@quick
@given(st.data(), topologies(least=2))
def test_settled_members_are_at_home_as_far_as_they_can(data: st.DataObject, start: Topology) -> None:
    topology = start
    for _ in range(data.draw(st.integers(0, 3))):
        topology = change(data, topology)
    settled = topology.settled(start)
    check(settled)
    for before, after, home in zip(topology.replicas, settled.replicas, start.replicas, strict=True):
        assert sorted(before.values()) == sorted(after.values()) and before.keys() == after.keys()
        assert all(after[i] == slot for i, slot in home.items() if i in after and slot in after.values())
    assert settled.settled(start) == settled
    assert start.settled(start) == start


def test_settling_moves_nobody_without_need() -> None:
    start = Topology.start((3, 3))
    topology = start.lose([0, 4])[0]  # the list says index 0, so slot 3 takes the place of slot 4
    assert topology.replicas == ({1: 1, 2: 2}, {1: 3, 2: 5})
    assert topology.settled(start) == topology
    back = topology.grow({0: 0, 4: 1})
    assert back.replicas == ({0: 0, 1: 1, 2: 2}, {0: 4, 1: 3, 2: 5})
    assert back.settled(start).replicas == start.replicas
