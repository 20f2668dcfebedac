"""A bucket: gradients that travel together, from local shards to synced shards.

Exchange inside the replica, all-reduce across replicas, exchange inside the replica; parts that have nothing
to do are left out (see :mod:`lightning_ntp.plan.sync`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm.generation import Generation
from lightning_ntp.comm.wire import Wire, WireEntry, element_width
from lightning_ntp.parallel import ShardedParameter
from lightning_ntp.plan import Exchange, Move, Run, SyncPlan, plan_sync


class Bucket:
    """The gradients of some parameters, of one dtype and device.

    Args:
        entries: The parameters, the same on all ranks.
        generation: The current generation.
    """

    def __init__(self, entries: Sequence[ShardedParameter], generation: Generation) -> None:
        self.entries = tuple(entries)
        self._generation = generation
        topology, index = generation.topology, generation.index
        plans = [
            plan_sync(e.sharding, topology.family, topology.live_degrees, generation.degree, e.turn) for e in entries
        ]
        self._plans = plans
        self._shapes = [e.local_shape(p.reduced, index) for e, p in zip(entries, plans, strict=True)]
        self._in_sync = generation.is_sync_index
        # one flag per parameter says whether any replica has a gradient for it; they ride at the end
        self._flags = len(self.entries)
        self._numel = sum(shape.numel() for shape in self._shapes) + self._flags
        # where nothing has to be put together afterwards, the reduced tensor itself becomes the gradient
        self._becomes_gradient = [self._in_sync and not p.sum_after and _same(p, index) for p in plans]
        overlapping = [any(layout.overlapping for layout in p.compute) for p in plans]
        self._sums_before = [p.before is not None and o for p, o in zip(plans, overlapping, strict=True)]
        self._before = self._wire([p.before for p in plans], self._sums_before)
        extras = [i for i in topology.family.indices(generation.degree) if i not in topology.sync_indices]
        first = topology.sync_indices[0]
        flags = Exchange(tuple(Move(first, extra, (Run(0, 0, self._flags),)) for extra in extras))
        self._after = self._wire([p.after for p in plans], [p.sum_after for p in plans], flags)

    def fill(self) -> Filling:
        """Start a round.

        Its buffer is allocated anew: that of an interrupted round may still be written to by a collective that
        nobody can stop.
        """
        copied = [self._in_sync and plan.before is None for plan in self._plans]
        return Filling(self.entries[0].parameter.detach().new_empty(self._numel), self._shapes, copied)

    @property
    def has_work(self) -> bool:
        """Whether a round does anything; the same answer on all ranks of a replica."""
        return bool(self._before or self._after or len(self._generation.topology.live_replicas) > 1)

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank puts on the wire per round, by the ring algorithm for the all-reduce."""
        item = self.entries[0].parameter.element_size()
        replicas = len(self._generation.topology.live_replicas)
        ring = 2 * (replicas - 1) * self._numel // replicas if self._in_sync else 0
        return item * (ring + sum(wire.elements_sent for wire in (self._before, self._after) if wire))

    def run(self, filling: Filling) -> tuple[list[Tensor], Tensor]:
        """Sync one round. Collective.

        Args:
            filling: This rank's local gradients. Its buffer is used up.

        Returns:
            The synced gradients, in the shapes of the local shards, and a tensor with one number per parameter
            that is positive if any replica had a gradient.
        """
        generation, like = self._generation, self.entries[0].parameter.detach()
        reduced, flags = filling.reduced, filling.flags
        flags.copy_(torch.tensor([float(there) for there in filling.arrived], dtype=like.dtype))
        for k, plan in enumerate(self._plans):
            if self._sums_before[k] or (plan.before is None and self._in_sync and not filling.arrived[k]):
                reduced[k].zero_()
        if self._before is not None:
            assert generation.sync_tensor_parallel is not None
            self._before.run(filling.travelling, reduced, generation.sync_tensor_parallel, like)
        if generation.sync_data_parallel is not None:
            dist.all_reduce(filling.main, group=generation.sync_data_parallel)
        results: list[Tensor] = []
        for k, entry in enumerate(self.entries):
            if self._becomes_gradient[k]:
                results.append(reduced[k])
            elif self._plans[k].sum_after:
                results.append(torch.zeros_like(entry.parameter))
            else:
                results.append(torch.empty_like(entry.parameter))
        if self._after is not None:
            assert generation.sync_tensor_parallel is not None
            self._after.run([*reduced, flags], [*results, flags], generation.sync_tensor_parallel, like)
        return results, flags

    def _wire(self, exchanges: list[Exchange | None], sums: list[bool], flags: Exchange | None = None) -> Wire | None:
        if not any(x is not None and x.moves for x in (*exchanges, flags)):
            return None
        entries = [
            WireEntry(x, e.sharding.dim, element_width(e.shape, e.sharding.dim), s)
            for x, e, s in zip(exchanges, self.entries, sums, strict=True)
        ]
        if flags is not None:
            entries.append(WireEntry(flags, 0, 1, False))
        generation = self._generation
        return Wire(entries, generation.topology.family.indices(generation.degree), generation.index)


class Filling:
    """The local gradients of one round.

    A gradient goes into the buffer as soon as it arrives, so that its own memory is free again. Those that travel
    inside the replica first are kept: they are packed in other pieces.

    Args:
        main: The buffer to reduce; the parameters' shards in order, then one flag per parameter.
        shapes: Of the shards.
        copied: Whether a gradient goes into the buffer.
    """

    def __init__(self, main: Tensor, shapes: Sequence[torch.Size], copied: Sequence[bool]) -> None:
        self.main, self._copied = main, copied
        *pieces, self.flags = torch.split(main, [*(shape.numel() for shape in shapes), len(shapes)])
        self.reduced = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        self.arrived = [False] * len(shapes)
        self.travelling: list[Tensor | None] = [None] * len(shapes)

    def put(self, k: int, gradient: Tensor) -> None:
        """Take the gradient of the ``k``-th parameter."""
        self.arrived[k] = True
        if self._copied[k]:
            self.reduced[k].copy_(gradient)
        else:
            self.travelling[k] = gradient


def _same(plan: SyncPlan, index: int) -> bool:
    """Whether an index holds the same units in the compute and in the reduced layout."""
    return all(c.owned.get(index) == r.owned.get(index) for c, r in zip(plan.compute, plan.reduced, strict=True))
