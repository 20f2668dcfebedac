"""What a membership change costs, before it happens: bytes from whom to whom, and memory per slot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from lightning_ntp.plan.reshard import plan_reshard
from lightning_ntp.plan.sharding import Sharding
from lightning_ntp.plan.topology import Topology


@dataclass(frozen=True)
class CutTensor:
    """A parameter together with the states that are cut like it.

    Args:
        name: For people.
        shape: Unsharded.
        sharding: How it is cut.
        element_bytes: Bytes per element of the parameter and its states together; 12 for float32 with two moments.
        count: Number of such tensors in the model.
    """

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    element_bytes: int
    count: int = 1

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.count

    @property
    def bytes(self) -> int:
        """Unsharded."""
        return self.elements * self.element_bytes

    @property
    def bytes_per_place(self) -> int:
        """Bytes per element of the cut dimension; all of them if it is replicated."""
        dim = self.sharding.dim
        return self.bytes if dim is None else self.bytes // self.shape[dim]


@dataclass(frozen=True)
class ReshardCost:
    """What a change from one topology to another costs. All sizes in bytes.

    Args:
        before, after: The topologies.
        transfers: (sender, receiver) -> bytes over the wire.
        held_before: Slot -> bytes of parameters and states it holds, for the slots of ``before``.
        held_after: The same for the slots of ``after``.
        peak: Slot of ``after`` -> bytes it must be able to allocate while shards move: the new ones beside the old,
            and the pieces it packs and unpacks.
        model_bytes: The unsharded model.
    """

    before: Topology
    after: Topology
    transfers: Mapping[tuple[int, int], int]
    held_before: Mapping[int, int]
    held_after: Mapping[int, int]
    peak: Mapping[int, int]
    model_bytes: int

    @cached_property
    def bytes_moved(self) -> int:
        return sum(self.transfers.values())

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The slots that send."""
        return tuple(sorted({sender for sender, _ in self.transfers}))

    def extra(self, slot: int) -> int:
        """Bytes that a survivor holds more than before, for good."""
        return self.held_after[slot] - self.held_before.get(slot, 0)

    def largest_share(self, replica: int) -> tuple[float, float]:
        """The largest part of the model that a member of ``replica`` holds, before and after: 0 when it is gone."""
        before = (self.held_before[s] for s in self.before.replicas[replica].values())
        after = (self.held_after[s] for s in self.after.replicas[replica].values())
        return max(before, default=0) / self.model_bytes, max(after, default=0) / self.model_bytes


def reshard_cost(before: Topology, after: Topology, tensors: Iterable[CutTensor], lost: Iterable[int]) -> ReshardCost:
    """What going from ``before`` to ``after`` costs.

    Args:
        before: The topology in which slots are lost.
        after: The topology to go on with.
        tensors: The model and its optimizer.
        lost: The slots whose holdings are lost; members that leave in good health can still send.

    Raises:
        TopologyError: If a unit has no copy left.
    """
    gone = set(lost)
    by_sharding: dict[Sharding, list[CutTensor]] = defaultdict(list)
    for tensor in tensors:
        by_sharding[tensor.sharding].append(tensor)
    transfers: dict[tuple[int, int], int] = defaultdict(int)
    peak = dict.fromkeys(after.slots, 0)
    for sharding, alike in by_sharding.items():
        size = sum(tensor.bytes_per_place for tensor in alike)
        exchange = plan_reshard(before, after, sharding, gone)
        for move in exchange.traveling:
            transfers[move.sender, move.receiver] += move.length * size
            for slot in (move.sender, move.receiver):
                if slot in peak:
                    peak[slot] += move.length * size
        for slot in {move.receiver for move in exchange.moves}:
            peak[slot] += _local_size(sharding, after, slot) * size
    return ReshardCost(
        before,
        after,
        dict(sorted(transfers.items())),
        _held(before, by_sharding),
        _held(after, by_sharding),
        peak,
        sum(tensor.bytes for alike in by_sharding.values() for tensor in alike),
    )


def _held(topology: Topology, by_sharding: Mapping[Sharding, list[CutTensor]]) -> dict[int, int]:
    held = dict.fromkeys(topology.slots, 0)
    for sharding, alike in by_sharding.items():
        size = sum(tensor.bytes_per_place for tensor in alike)
        for slot in topology.slots:
            held[slot] += _local_size(sharding, topology, slot) * size
    return held


def _local_size(sharding: Sharding, topology: Topology, slot: int) -> int:
    replica, index = topology.place(slot)
    return sharding.local_size(sharding.layouts(topology.family, topology.degrees[replica]), index)
