"""Moving shards from one topology to the next: received beside the old ones, installed all at once.

Until :meth:`Resharding.install` the model is as it was. A death on the way costs nothing but the buffers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm.generation import Generation
from lightning_ntp.comm.wire import Wire, WireEntry, element_width
from lightning_ntp.parallel import ShardedModel, ShardedParameter, end_graphs, replace_data
from lightning_ntp.plan import Exchange, Sharding, Topology, plan_reshard

ShardedState = MutableMapping[Tensor, MutableMapping[str, Any]]
"""Per-parameter state outside of the model, as an optimizer keeps it: parameter -> key -> value."""


@dataclass
class _Shard:
    """One tensor that is cut like a parameter."""

    entry: ShardedParameter
    exchange: Exchange
    holder: MutableMapping[str, Any] | None
    key: str
    received: Tensor | None = None
    gradient: Tensor | None = None
    """What has arrived of a parameter's gradient."""

    @property
    def local(self) -> Tensor:
        value = self.entry.parameter.data if self.holder is None else self.holder[self.key]
        assert isinstance(value, Tensor)
        return value

    def replace(self) -> None:
        if self.received is None:
            return
        if self.holder is None:
            self.entry.parameter.grad = None
            end_graphs(self.entry.parameter, self.entry.name)
            replace_data(self.entry.parameter, self.received)
            self.entry.parameter.grad = self.gradient
        else:
            self.holder[self.key] = self.received


class Resharding:
    """The move of a model's parameters and of states that are cut like them.

    Args:
        model: The model, cut for ``before``.
        states: Optimizer states and the like. Tensors of a parameter's local shape move with it; numbers stay.
        before: The topology the shards are cut for. A rank that is not in it holds nothing yet.
        after: The topology to cut them for.
        gone: The slots of ``before`` that cannot send; by default those that are not in ``after``.
    """

    def __init__(
        self,
        model: ShardedModel,
        states: Iterable[ShardedState],
        before: Topology,
        after: Topology,
        gone: Iterable[int] | None = None,
    ) -> None:
        self._model, self._before, self.after = model, before, after
        gone = None if gone is None else tuple(gone)
        self._shards: list[_Shard] = []
        states = list(states)
        # layers are alike: a model has few ways to cut a parameter
        exchanges: dict[Sharding, Exchange] = {}
        for entry in model:
            exchange = exchanges.get(entry.sharding)
            if exchange is None:
                exchange = exchanges[entry.sharding] = plan_reshard(before, after, entry.sharding, gone)
            if not exchange.moves:
                continue
            self._shards.append(_Shard(entry, exchange, None, ""))
            for state in states:
                values = state.get(entry.parameter, {})
                for key in sorted(values):
                    if isinstance(values[key], Tensor) and values[key].shape == entry.parameter.shape:
                        self._shards.append(_Shard(entry, exchange, values, key))

    def bytes_moved(self) -> int:
        """Bytes that go over the wire, over all ranks."""
        return sum(
            s.exchange.elements * element_width(s.entry.shape, s.entry.sharding.dim) * s.local.element_size()
            for s in self._shards
        )

    def fingerprint(self) -> int:
        """A number that is equal on two ranks if they move the same tensors."""
        moves = [(s.entry.name, s.key, str(s.local.dtype), s.holder is None) for s in self._shards]
        return zlib.crc32(repr(moves).encode())

    def sources(self) -> tuple[int, ...]:
        """The slots that send."""
        return tuple(sorted({m.sender for s in self._shards for m in s.exchange.traveling}))

    def extra_bytes(self, slot: int) -> int:
        """Bytes that ``slot`` must be able to allocate for it: new shards beside the old, and the packed pieces."""
        replica, index = self.after.place(slot)
        total = 0
        for shard in self._shards:
            if any(m.receiver == slot for m in shard.exchange.moves):
                layouts = shard.entry.sharding.layouts(self.after.family, self.after.degrees[replica])
                total += shard.entry.local_shape(layouts, index).numel() * shard.local.element_size()
            moved = sum(m.length for m in (*shard.exchange.sent_by(slot), *shard.exchange.received_by(slot)))
            total += moved * element_width(shard.entry.shape, shard.entry.sharding.dim) * shard.local.element_size()
        return total

    def receive(self, generation: Generation) -> None:
        """Move everything into side buffers. Collective over all members of the new topology.

        Args:
            generation: Of the new topology.

        Raises:
            Interrupted: If the membership changes meanwhile; nothing has changed then.
        """
        self.travel(generation.world, self.after.slots, generation.slot)

    def travel(self, group: dist.ProcessGroup, slots: Sequence[int], own: int) -> None:
        """As :meth:`receive`, over any group: one with members that leave, say.

        Args:
            group: Of all who send or receive.
            slots: Its members in order of their rank.
            own: This rank's slot.
        """
        for shards in _by_dtype(self._shards):
            received = self._exchange(shards, [s.local.detach() for s in shards], group, slots, own)
            for shard, target in zip(shards, received, strict=True):
                shard.received = target

    def travel_gradients(self, group: dist.ProcessGroup, slots: Sequence[int], own: int) -> None:
        """Move the synced gradients of the parameters that move, to be put in place by :meth:`install`.

        Those that are not there on all ranks that hold something are left behind: they are of a step that is done
        again.
        """
        parameters = [s for s in self._shards if s.holder is None]
        for shard in self._shards:
            shard.gradient = None
        if not parameters:
            return
        newcomer = own not in self._before.slots
        there = torch.tensor([newcomer or s.entry.parameter.grad is not None for s in parameters], dtype=torch.int32)
        there = there.to(parameters[0].local.device)
        dist.all_reduce(there, op=dist.ReduceOp.MIN, group=group)
        moving = [s for s, flag in zip(parameters, there.tolist(), strict=True) if flag]
        for shards in _by_dtype(moving):
            # a newcomer sends nothing: any tensor of the kind will do
            gradients = [s.local if newcomer else s.entry.parameter.grad for s in shards]
            received = self._exchange(shards, [g.detach() for g in gradients if g is not None], group, slots, own)
            for shard, target in zip(shards, received, strict=True):
                shard.gradient = target

    @torch.no_grad()
    def _exchange(
        self,
        shards: list[_Shard],
        sources: list[Tensor],
        group: dist.ProcessGroup,
        slots: Sequence[int],
        own: int,
    ) -> list[Tensor | None]:
        """The new tensors of this rank; None for those that stay as they are."""
        wire = Wire(
            [
                WireEntry(s.exchange, s.entry.sharding.dim, element_width(s.entry.shape, s.entry.sharding.dim), False)
                for s in shards
            ],
            slots,
            own,
        )
        targets = [
            source.new_empty(self._shape(s, own)) if s.exchange.placed_at(own) else None
            for s, source in zip(shards, sources, strict=True)
        ]
        wire.run([*sources], targets, group, sources[0])
        return targets

    def _shape(self, shard: _Shard, slot: int) -> torch.Size:
        replica, index = self.after.place(slot)
        layouts = shard.entry.sharding.layouts(self.after.family, self.after.degrees[replica])
        return shard.entry.local_shape(layouts, index)

    def install(self, slot: int, group: dist.ProcessGroup | None) -> None:
        """Take the new shards, and let the modules take over the new sizes. Local.

        Args:
            slot: This rank's slot.
            group: The process group of the replica, for forward and backward.
        """
        with torch.no_grad():
            # states first: they are recognised by the shape their parameter still has
            for shard in sorted(self._shards, key=lambda s: s.holder is None):
                shard.replace()
        self._shards = []
        replica, index = self.after.place(slot)
        self._model.place.update(self.after.family, self.after.degrees[replica], index, group)
        self._model.relayout()


def _by_dtype(shards: list[_Shard]) -> Iterator[list[_Shard]]:
    groups: dict[torch.dtype, list[_Shard]] = {}
    for shard in shards:
        groups.setdefault(shard.local.dtype, []).append(shard)
    # by name: the same order on all ranks
    for dtype in sorted(groups, key=str):
        yield groups[dtype]
