"""Who keeps a copy of whose shards, and what moves when the job goes back to those copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_ntp.plan.exchange import Exchange, Pieces
from lightning_ntp.plan.reshard import plan_reshard
from lightning_ntp.plan.sharding import Sharding
from lightning_ntp.plan.topology import Topology, TopologyError


def keepers(topology: Topology, node_of: Callable[[int], int] = lambda slot: 0) -> dict[int, int]:
    """For every slot the one that keeps the copy of its shards: the next in a ring over all live slots.

    Slots of equal place on their nodes follow each other, so that the keeper is on another node where there is one;
    on one node the ring is in order of the slots, so a replica's members keep each other's copies, but for the last.

    Args:
        topology: The live members.
        node_of: The node of a slot.

    Raises:
        TopologyError: If there is one slot only.
    """
    if topology.world_size < 2:
        raise TopologyError("a copy in a neighbour's memory needs a neighbour: there is one rank only")
    place_on: dict[int, int] = {}
    ring: list[tuple[int, int, int]] = []
    for slot in topology.slots:
        node = node_of(slot)
        place_on[node] = place_on.get(node, -1) + 1
        ring.append((place_on[node], node, slot))
    if len(place_on) == 1:
        order = list(topology.slots)
    else:
        order = [slot for _, _, slot in sorted(ring)]
    return {slot: order[(position + 1) % len(order)] for position, slot in enumerate(order)}


def plan_restore(then: Topology, after: Topology, sharding: Sharding, copies: Mapping[int, int]) -> Exchange:
    """Plan how the members of ``after`` come by what the job held when the copies were made, for one parameter.

    Every member still has its own part of then, in a copy; what others held comes from who keeps it. In the local
    coordinates of a sender its own part of then comes first, and the part that it keeps for its neighbour behind it.

    Args:
        then: The topology in which the copies were made.
        after: The topology to go on with, its slots members of ``then``.
        sharding: How the parameter is cut.
        copies: Slot of ``then`` that is gone -> live slot that keeps its copy.

    Raises:
        TopologyError: If a unit has no copy left.
    """
    gone = [slot for slot in then.slots if slot not in after.slots and slot not in copies]
    exchange = plan_reshard(then, after, sharding, gone)
    pieces = Pieces()
    for move in exchange.moves:
        keeper = copies.get(move.sender)
        base = 0
        if keeper is not None:
            replica, index = then.place(keeper)
            base = sharding.local_size(sharding.layouts(then.family, then.degrees[replica]), index)
        for run in move.runs:
            sender = move.sender if keeper is None else keeper
            pieces.add(sender, move.receiver, run.source + base, run.target, run.length)
    return pieces.exchange()
