"""Copies of shards in a neighbour's host memory: the way back when every replica has lost the same part.

At some steps every rank copies its parameters and the states that are cut like them to host memory, and sends that to
its neighbour (:func:`~lightning_ntp.plan.redundancy.keepers`) in a thread beside the training. When a unit has no
holder left, all go back to the newest step whose copies the survivors have between them, cut for whoever is left.
"""

from __future__ import annotations

import copy
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm import background
from lightning_ntp.comm.generation import Generation
from lightning_ntp.comm.interruption import Interrupted
from lightning_ntp.comm.reshard import ShardedState
from lightning_ntp.comm.wire import Wire, WireEntry, element_width
from lightning_ntp.launch import progress
from lightning_ntp.parallel import ShardedModel, ShardedParameter, replace_data
from lightning_ntp.plan import Exchange, Sharding, Topology, TopologyError
from lightning_ntp.plan.redundancy import keepers, plan_restore

COST = 0.01
"""What the copies may cost, as a share of the steps."""
_MARGIN = 0.75
"""What of it is planned for: the next copy may cost more than the last, and its steps be shorter."""
LONGEST_INTERVAL = 200
"""Steps between copies at most: so many batches are kept, and so many steps are done again."""
_CHUNK = 1 << 24
"""Bytes that are sent at a time: how much host memory the wire takes besides."""
_ALIGNMENT = 16
_SENDING = 0.7e-9
"""Seconds of processor time per byte that gloo's thread sends and receives (measured; 2 cores, loopback)."""
_PATIENCE_SECONDS = 5.0
"""For the thread to end after the interruption of its collective, which takes milliseconds."""

Key = tuple[int, int, str]
"""Turn of the parameter; -1 for the parameter itself, else the number of the state; key in the state."""


@dataclass
class Copy:
    """What this rank keeps of one moment.

    Args:
        name: The same on all ranks, and of no other copy.
        step: The steps that were committed.
        topology: Of the moment.
        own: This rank's shards.
        rest: Of every state, what is no shard: numbers, by turn of the parameter.
        keeps: The slot whose shards this rank keeps too.
        kept: Those shards, once they have arrived.
    """

    name: str
    step: int
    topology: Topology
    own: dict[Key, Tensor]
    rest: list[dict[int, dict[str, Any]]]
    keeps: int
    kept: dict[Key, Tensor] = field(default_factory=dict)
    complete: bool = False


class NeighbourCopies:
    """Makes the copies of one rank, and keeps the newest that are complete everywhere.

    Args:
        model: The cut model.
        states: Gives the per-parameter states that are copied with the parameters.
        node_of: The node of a slot.

    Attributes:
        interval: Steps between copies, as the ranks have agreed on last.
        cost: Seconds that the last copy has cost this rank: packing, for which the steps wait, and sending.
    """

    def __init__(
        self,
        model: ShardedModel,
        states: Callable[[], Iterable[ShardedState]],
        node_of: Callable[[int], int] = lambda slot: 0,
    ) -> None:
        self._model, self._states, self._node_of = model, states, node_of
        self._copies: list[Copy] = []
        self._thread: threading.Thread | None = None
        self.interval, self.cost, self.step_seconds = 1, 0.0, 0.0
        self._next, self._taken, self._hurried = 0, 0, False
        self._agreed: Copy | None = None
        self.lost_way = ""
        """Why the steps since the newest copy cannot be done again; empty if they can."""

    # ---- making copies ----------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The step of the oldest copy that is kept: steps after it may have to be done again."""
        return self._copies[0].step if self._copies else None

    def is_due(self, step: int) -> bool:
        """Whether a copy is to be made now that ``step`` steps are committed; the same on all ranks."""
        return step >= self._next and not self._under_way

    def take(self, step: int, generation: Generation, wait: bool = False) -> None:
        """Copy the shards of now, and send them to the neighbour beside the work. All ranks call it alike.

        Args:
            step: The steps that are committed.
            generation: The current generation.
            wait: Whether to return only when this rank has all that it keeps.

        Raises:
            Interrupted: If it waits, and the membership changes meanwhile.
        """
        self.abandon()
        started = time.monotonic()
        with torch.inference_mode(False):  # in evaluation too: what is made there could not be written to later
            made = self._pack(step, generation)
        if self.lost_way:
            self._agreed = None
        self._copies = [*([self._agreed] if self._agreed is not None else []), made]
        self._hurried = self._hurried and step < self._taken + self.interval
        self.lost_way, self._taken = "", step
        if made.complete:
            return
        self.cost = time.monotonic() - started
        if generation.device.type == "cpu":  # else the cores are idle enough
            self.cost += _SENDING * sum(tensor.nbytes for tensor in made.own.values())
        if wait:
            self._exchange(made, generation)
            return
        self._thread = background.run("ntp-neighbour-copies", self._exchange_beside, made, generation)

    def abandon(self) -> None:
        """Drop a copy that is under way. After an interruption: before the process groups are let go."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_PATIENCE_SECONDS)
        self._copies = [each for each in self._copies if each.complete]

    def forget(self, why: str) -> None:
        """What was done since the copies cannot be done again: they are of no use until there is a new one.

        Args:
            why: For the message.
        """
        self.lost_way = why

    @property
    def _under_way(self) -> bool:
        return bool(self._copies) and self._copies[-1] is not self._agreed

    # ---- agreeing ---------------------------------------------------------------------------------------------

    def ballot(self) -> tuple[int, int, int]:
        """What this rank says in the vote of a step; the largest of each counts.

        Returns:
            Whether its newest copy is incomplete, whether the way back is lost, and the steps between copies it wants.
        """
        pending = self._under_way and not self._copies[-1].complete
        return int(pending), int(bool(self.lost_way)), self._wanted()

    def counted(self, pending: int, lost: int, interval: int) -> None:
        """What the vote has said: the same on all ranks that have passed it."""
        if lost:
            self._copies, self._agreed, self.interval = [], None, max(1, interval)
            # at once, but for whoever loses the way again and again not more often than copies may cost
            self._next, self._hurried = self._taken + self.interval if self._hurried else 0, True
        elif self._under_way and not pending:
            self._agree_on(self._copies[-1], interval)

    def renew(self) -> None:
        """A member has left as planned, with what it kept: a new copy is due at once."""
        self._next = 0

    def joined(self, step: int) -> None:
        """A rank has joined, perhaps this one: a new copy is due at once, on all ranks.

        When the last one was made is what a newcomer cannot know, so from here on nobody goes by it.

        Args:
            step: The steps that are committed.
        """
        self.forget("a rank has joined, which has not seen the steps before")
        self._next, self._taken, self._hurried = 0, step, False

    def changed(self, step: int, records: Mapping[int, Mapping[str, Any]]) -> None:
        """The membership has changed: a new copy is due at once, since those that the dead kept are gone.

        Args:
            step: The steps that are committed.
            records: What every survivor has brought, by slot. Some may have missed a vote.
        """
        newest = next(iter(self._held_by_all(records)), None)
        if newest is None:
            self._copies, self._agreed = [], None
        else:
            self._agree_on(newest, self.interval)
        self._next = step

    def _agree_on(self, newest: Copy, interval: int) -> None:
        """It is complete everywhere: older ones may go."""
        self._copies, self._agreed, self.interval = [newest], newest, max(1, interval)
        self._next = newest.step + self.interval

    def _wanted(self) -> int:
        """How many steps must share the cost of a copy."""
        if not self.step_seconds:
            return 1
        return min(LONGEST_INTERVAL, max(1, math.ceil(self.cost / (_MARGIN * COST * self.step_seconds))))

    # ---- going back -------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """What the other survivors must know."""
        return {"held": [each.name for each in self._copies if each.complete], "lost_way": self.lost_way}

    def choose(self, records: Mapping[int, Mapping[str, Any]], after: Topology) -> Restoring | str:
        """The way back to the newest copies that the survivors have between them, or why there is none.

        Args:
            records: What every survivor has brought, by slot.
            after: The topology to go on with.
        """
        for record in records.values():
            if record["copies"]["lost_way"]:
                return f"the neighbours' copies are of no use: {record['copies']['lost_way']}"
        reason = "no neighbours' copies were complete yet"
        for each in self._held_by_all(records):
            then = each.topology
            keeper_of = keepers(then, self._node_of) if then.world_size > 1 else {}
            copies = {s: k for s, k in keeper_of.items() if s not in after.slots and k in after.slots}
            try:
                return Restoring(self._model, list(self._states()), each, after, copies)
            except TopologyError:
                missing = [s for s in then.slots if s not in after.slots and s not in copies]
                where = ", ".join(f"the copy of slot {s} was on slot {keeper_of.get(s, s)}" for s in missing)
                reason = f"the neighbours' copies, of step {each.step}, do not help: {where}, which is lost too"
        return reason

    def _held_by_all(self, records: Mapping[int, Mapping[str, Any]]) -> Iterator[Copy]:
        """Copies that are complete on all survivors, the newest first."""
        held = [set(record["copies"]["held"]) for record in records.values()]
        return (each for each in reversed(self._copies) if all(each.name in names for names in held))

    def bytes_kept(self) -> int:
        """Host memory that the copies of this rank take now."""
        every = [t for each in self._copies for t in (*each.own.values(), *each.kept.values())]
        return sum(tensor.nbytes for tensor in every)

    # ---- inside -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _pack(self, step: int, generation: Generation) -> Copy:
        topology = generation.topology
        states = list(self._states())
        found = {key: value for key, value in _shards(self._model, states)}
        views = _views([(key, value.shape, value.dtype) for key, value in found.items()], pinned=_on_device(found))
        for key, value in found.items():
            views[key].copy_(value, non_blocking=True)
        if generation.device.type == "cuda":
            torch.cuda.current_stream(generation.device).synchronize()
        rest = [
            {
                entry.turn: {k: copy.deepcopy(v) for k, v in state[entry.parameter].items() if not _is_shard(v, entry)}
                for entry in self._model
                if entry.parameter in state
            }
            for state in states
        ]
        keeps = generation.slot
        if topology.world_size > 1:
            keeps = next(s for s, keeper in keepers(topology, self._node_of).items() if keeper == generation.slot)
        name = f"{step}/{generation.name}"
        return Copy(name, step, topology, views, rest, keeps, complete=topology.world_size == 1)

    def _exchange_beside(self, made: Copy, generation: Generation) -> None:
        with progress.current().beside():
            try:
                self._exchange(made, generation)
            except (Interrupted, RuntimeError):
                # the membership has changed; whoever waits in a collective of the training hears of it too
                return

    def _exchange(self, made: Copy, generation: Generation) -> None:
        """Send the own shards to the keeper, and receive those of the neighbour whose keeper this rank is."""
        topology = made.topology
        keeper = keepers(topology, self._node_of)[generation.slot]
        replica, index = topology.place(made.keeps)
        layouts = {e.turn: e.sharding.layouts(topology.family, topology.degrees[replica]) for e in self._model}
        entries = {e.turn: e for e in self._model}
        shapes = [
            (key, entries[key[0]].local_shape(layouts[key[0]], index), value.dtype) for key, value in made.own.items()
        ]
        kept = _views(shapes, pinned=False)
        outgoing, incoming = _bytes_of(made.own), _bytes_of(kept)
        size, place = topology.world_size, {slot: rank for rank, slot in enumerate(topology.slots)}
        largest = torch.tensor([max(outgoing.numel(), incoming.numel())])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=generation.copies)
        for start in range(0, int(largest), _CHUNK):
            sends, receives = [0] * size, [0] * size
            there, here = outgoing[start : start + _CHUNK], incoming[start : start + _CHUNK]
            sends[place[keeper]], receives[place[made.keeps]] = there.numel(), here.numel()
            dist.all_to_all_single(here, there, receives, sends, group=generation.copies)
        made.kept = kept
        made.complete = True


class Restoring:
    """The move back to a copy, cut for the topology to go on with. The interface is that of ``Resharding``.

    Args:
        model: The cut model.
        states: The states that were copied with it, the same ones in the same order.
        source: This rank's copy.
        after: The topology to cut it for.
        copies: Slot that is gone -> live slot that keeps its copy.

    Raises:
        TopologyError: If a unit has no copy.
    """

    def __init__(
        self,
        model: ShardedModel,
        states: Sequence[ShardedState],
        source: Copy,
        after: Topology,
        copies: Mapping[int, int],
    ) -> None:
        self._model, self._states, self._source = model, states, source
        self.after, self.step = after, source.step
        # state that was registered last may have been taken out, at the end of a fit
        self._own = {key: value for key, value in source.own.items() if key[1] < len(states)}
        exchanges: dict[Sharding, Exchange] = {}
        for entry in model:
            if entry.sharding not in exchanges:
                exchanges[entry.sharding] = plan_restore(source.topology, after, entry.sharding, copies)
        self._exchanges = exchanges
        self._entries = {entry.turn: entry for entry in model}
        self._received: dict[Key, Tensor] = {}

    def bytes_moved(self) -> int:
        """Bytes that go over the wire, over all ranks."""
        return sum(
            self._exchange(key).elements * self._width(key) * value.element_size() for key, value in self._own.items()
        )

    def fingerprint(self) -> int:
        """A number that is equal on two ranks if they move the same tensors."""
        moves = [(self.step, *key, str(value.dtype)) for key, value in self._own.items()]
        return zlib.crc32(repr(moves).encode())

    def sources(self) -> tuple[int, ...]:
        """The slots that send."""
        return tuple(sorted({m.sender for x in self._exchanges.values() for m in x.traveling}))

    def extra_bytes(self, slot: int) -> int:
        """Bytes of device memory that ``slot`` must be able to allocate: the new shards, beside the old."""
        replica, index = self.after.place(slot)
        return sum(
            self._entries[key[0]].local_shape(self._layouts(key, replica), index).numel() * value.element_size()
            for key, value in self._own.items()
        )

    @torch.no_grad()
    def receive(self, generation: Generation) -> None:
        """Put the shards together in host memory. Collective over all members of the new topology.

        Raises:
            Interrupted: If the membership changes meanwhile; nothing has changed then.
        """
        slots, own = self.after.slots, generation.slot
        assert generation.copies is not None
        groups: dict[torch.dtype, list[Key]] = {}
        for key, value in self._own.items():
            groups.setdefault(value.dtype, []).append(key)
        for dtype in sorted(groups, key=str):
            keys = groups[dtype]
            entries = [WireEntry(self._exchange(key), self._dim(key), self._width(key), False) for key in keys]
            sources: list[Tensor | None] = [self._held(key) for key in keys]
            targets: list[Tensor | None] = [
                self._own[key].new_empty(self._shape(key, generation)) if self._exchange(key).placed_at(own) else None
                for key in keys
            ]
            Wire(entries, slots, own).run(sources, targets, generation.copies, self._own[keys[0]])
            for key, target in zip(keys, targets, strict=True):
                # where nothing arrives, the shard is what it was
                self._received[key] = self._own[key] if target is None else target

    @torch.no_grad()
    def install(self, slot: int, group: dist.ProcessGroup | None) -> None:
        """Take the shards of then, and let the modules take over the new sizes. Local.

        Args:
            slot: This rank's slot.
            group: The process group of the replica, for forward and backward.
        """
        for number, state in enumerate(self._states):
            if number == len(self._source.rest):
                break  # registered since, by nobody who has made a step since
            rest = self._source.rest[number]
            for turn, entry in self._entries.items():
                if turn not in rest:
                    state.pop(entry.parameter, None)
                    continue
                # in place: others may hold these mappings
                values = state.setdefault(entry.parameter, {})
                values.clear()
                values.update(copy.deepcopy(rest[turn]))
        for key, value in self._received.items():
            turn, number, name = key
            parameter = self._entries[turn].parameter
            # the copy stays as it is: a second loss may need it again
            value = value.to(parameter.device, copy=True)
            if number < 0:
                parameter.grad = None
                if parameter.shape == value.shape:
                    parameter.copy_(value)
                else:
                    replace_data(parameter, value)
            else:
                self._states[number][parameter][name] = value
        self._received = {}
        replica, index = self.after.place(slot)
        self._model.place.update(self.after.family, self.after.degrees[replica], index, group)
        self._model.relayout()

    def _held(self, key: Key) -> Tensor:
        """This rank's own part and, behind it, the one it keeps for its neighbour."""
        own, kept = self._own[key], self._source.kept.get(key)
        dim = self._dim(key)
        # of what is not cut everybody has all
        return own if kept is None or dim is None else torch.cat([own, kept], dim)

    def _exchange(self, key: Key) -> Exchange:
        return self._exchanges[self._entries[key[0]].sharding]

    def _dim(self, key: Key) -> int | None:
        return self._entries[key[0]].sharding.dim

    def _width(self, key: Key) -> int:
        return element_width(self._entries[key[0]].shape, self._dim(key))

    def _layouts(self, key: Key, replica: int) -> Any:
        return self._entries[key[0]].sharding.layouts(self.after.family, self.after.degrees[replica])

    def _shape(self, key: Key, generation: Generation) -> torch.Size:
        return self._entries[key[0]].local_shape(self._layouts(key, generation.replica), generation.index)


def _shards(model: ShardedModel, states: Sequence[ShardedState]) -> Iterator[tuple[Key, Tensor]]:
    """Everything that is cut like a parameter, in an order that is the same on all ranks."""
    for entry in model:
        yield (entry.turn, -1, ""), entry.parameter.detach()
        for number, state in enumerate(states):
            values = state.get(entry.parameter, {})
            for key in sorted(values):
                if _is_shard(values[key], entry):
                    yield (entry.turn, number, key), values[key].detach()


def _is_shard(value: Any, entry: ShardedParameter) -> bool:
    return isinstance(value, Tensor) and value.shape == entry.parameter.shape


def _on_device(shards: Mapping[Key, Tensor]) -> bool:
    return any(value.device.type == "cuda" for value in shards.values())


def _views(shapes: Sequence[tuple[Key, torch.Size, torch.dtype]], pinned: bool) -> dict[Key, Tensor]:
    """Tensors of these shapes, one behind the other in one piece of host memory."""
    sizes = [-(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for _, shape, dtype in shapes]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    views, start = {}, 0
    for (key, shape, dtype), size in zip(shapes, sizes, strict=True):
        used = shape.numel() * dtype.itemsize
        views[key] = memory[start : start + used].view(dtype).view(shape)
        start += size
    return views


def _bytes_of(views: Mapping[Key, Tensor]) -> Tensor:
    """The piece of memory that :func:`_views` has made."""
    first = next(iter(views.values()), None)
    if first is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
