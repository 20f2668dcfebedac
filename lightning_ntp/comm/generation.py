"""A generation: the span between two membership changes, and its process groups.

Whoever needs a group asks the current generation for it at the time of use; nobody keeps one.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_ntp.comm.backends import build_group, is_sliced
from lightning_ntp.comm.construction import Construction
from lightning_ntp.comm.interruptible import InterruptibleGroup
from lightning_ntp.comm.interruption import Interrupted, Life
from lightning_ntp.comm.store import StoreGuard
from lightning_ntp.launch import progress
from lightning_ntp.plan import Topology

_PLUGIN = "ntp"
_NAMES_PER_GENERATION = 1000


COPIES = "copies"


def group_slots(topology: Topology, copies: bool = False) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """All groups of more than one member: (attribute of the generation, unique name, slots in order of their ranks).

    Args:
        topology: The live members.
        copies: Whether neighbours keep copies of each other's shards.
    """
    yield "world", "world", topology.slots
    if copies:
        yield COPIES, COPIES, topology.slots
    for replica in topology.live_replicas:
        slots = topology.tensor_parallel_slots(replica)
        if len(slots) > 1:
            yield "tensor_parallel", f"tensor_parallel_{replica}", slots
            yield "sync_tensor_parallel", f"sync_tensor_parallel_{replica}", slots
    for index in topology.sync_indices:
        slots = topology.data_parallel_slots(index)
        if len(slots) > 1:
            yield "sync_data_parallel", f"sync_data_parallel_{index}", slots


class Generation:
    """The process groups of one topology, seen from one slot.

    Args:
        name: Unique in the job; part of every key in the store.
        topology: The live members.
        slot: This rank's slot.
        life: Ends the collectives.
        guard: Reaches the store.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: For every collective of the groups.
        device: This rank's device.
        changed: Notified when the membership changes.
        with_copies: Whether neighbours keep copies of each other's shards, which takes a group of its own.

    Attributes:
        world: All members.
        tensor_parallel: The members of this replica, for forward and backward; None at degree 1.
        sync_tensor_parallel: The same members, for gradient sync, which runs beside the backward pass.
        sync_data_parallel: The members of equal index in all replicas, for gradient sync; None if this index is
            no sync index or there is one replica.
        copies: All members, for what goes from host memory to host memory beside the training; None if nothing does.
    """

    world: dist.ProcessGroup
    tensor_parallel: dist.ProcessGroup | None = None
    sync_tensor_parallel: dist.ProcessGroup | None = None
    sync_data_parallel: dist.ProcessGroup | None = None
    copies: dist.ProcessGroup | None = None

    def __init__(
        self,
        name: str,
        topology: Topology,
        slot: int,
        life: Life,
        guard: StoreGuard,
        backend: str,
        timeout: timedelta,
        device: torch.device,
        changed: threading.Condition,
        with_copies: bool = False,
    ) -> None:
        self.name, self.number = name, life.number
        self.topology, self.slot, self.life, self.device = topology, slot, life, device
        self.rank = topology.rank(slot)
        self.replica, self.index = topology.place(slot)
        self.degree = topology.degrees[self.replica]
        self._guard, self._backend, self._timeout, self._changed = guard, backend, timeout, changed
        self._with_copies = with_copies
        self.preparations = 0
        """How many planned changes were begun in it; the same on all ranks."""
        self._client: TCPStore | None = None
        self._store: Store | None = None
        self._groups: dict[str, InterruptibleGroup] = {}
        self._users: weakref.WeakSet[InterruptibleGroup] = weakref.WeakSet()
        self._offered: InterruptibleGroup | None = None
        self._installing = False

    @property
    def is_sync_index(self) -> bool:
        return self.index in self.topology.sync_indices

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """For every live replica the rank of its lowest index: one voice per replica."""
        topology = self.topology
        return tuple(topology.rank(topology.tensor_parallel_slots(r)[0]) for r in topology.live_replicas)

    @property
    def is_first_of_replica(self) -> bool:
        return self.rank in self.first_ranks

    def connect(self) -> None:
        """Connect this rank's groups. Collective; touches no global state, so it may run in an abandoned thread.

        Raises:
            RuntimeError: If a member does not come in time.
        """
        self._client = self._guard.borrow()
        store = PrefixStore(f"generation/{self.name}", self._client)
        for attribute, name, slots in group_slots(self.topology, self._with_copies):
            if self.slot in slots:
                group = self._wrap(self._build(name, store, slots), attribute, name)
                self._groups[name] = group
                setattr(self, attribute, group)
        self._store = store

    def install(self) -> None:
        """Make the groups torch's own: the world becomes the default group. Local."""
        assert self._store is not None
        # not earlier: the groups may have been built while another generation was at work
        progress.current().enter_groups(blind=not is_sliced(self._backend))
        for name, each in self._groups.items():
            self._show(each, name)
        for group in _stale:
            # Who still holds it shall get our error. Without these entries torch complains of its own book-keeping.
            c10d._world.pg_map[group] = (dist.Backend(self._backend), self._store)
            c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
        if _PLUGIN.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(_PLUGIN, _offered_group, extended_api=True, devices=["cpu", "cuda"])
        world = self._groups["world"]
        world.maker = self._make_group
        former_hook = sys.excepthook
        # A name must never come back: a stale one (in a compiled graph, say) would find another generation's group.
        c10d._world.group_count = max(c10d._world.group_count, self.number * _NAMES_PER_GENERATION)
        _offer.append(world)
        self._installing = True
        try:
            dist.init_process_group(
                _PLUGIN,
                store=self._store,
                rank=self.rank,
                world_size=self.topology.world_size,
                timeout=self._timeout,
            )
            _call_it(world, self._backend)
            # All ranks register all groups in one order, also those they are no member of, so that they agree on the
            # names of groups which the user makes: torch counts them.
            for _, name, slots in group_slots(self.topology, self._with_copies):
                if name != "world":
                    ranks = [self.topology.rank(slot) for slot in slots]
                    self._offered = self._groups.get(name)
                    dist.new_group(ranks, timeout=self._timeout, group_desc=name, sort_ranks=False)
        finally:
            self._installing = False
            _offer.clear()
            sys.excepthook = former_hook  # torch wraps it again each time

    def uninstall(self) -> None:
        """Take the groups away from torch again. Local."""
        if dist.is_initialized() and dist.group.WORLD is self._groups.get("world"):
            dist.destroy_process_group()
        _stale.update((*self._groups.values(), *self._users))

    def plain_groups(self) -> list[dist.ProcessGroup]:
        """The backends' groups that still live, the user's included."""
        every = [*self._groups.values(), *self._users]
        return [group._inner for group in every if group._inner is not None]

    def release(self) -> list[Any]:
        """Let go of all groups and return what is left of them, for the reaper."""
        self.life.retired = True
        left: list[Any] = [group.release() for group in (*self._groups.values(), *self._users)]
        self._store = None
        client, self._client = self._client, None
        if client is not None:
            self._guard.give_back(client)
        for group in self._groups.values():
            group.maker = None
        return left

    def make_group(self, name: str, slots: Sequence[int], life: Life) -> InterruptibleGroup:
        """Connect another group, beside whatever is at work. Collective over ``slots``, in any thread.

        Args:
            name: Unique in the job.
            slots: Its members in order of their ranks; they need not be members of the generation.
            life: Ends its collectives.

        Raises:
            RuntimeError: If a member does not come in time.
        """
        store = PrefixStore(f"group/{name}", self._guard.borrow())
        ranks, own = list(range(len(slots))), slots.index(self.slot)
        plain = build_group(self._backend, name, store, ranks, own, self._timeout, self.device)
        group = InterruptibleGroup(plain, life, name, is_sliced(self._backend), self._timeout)
        self._show(group, name)
        # torch looks there for what to say of a collective that fails; all entries go with the generation
        c10d._world.pg_map[group] = (dist.Backend(self._backend), store)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in ranks}
        self._users.add(group)
        return group

    def _build(self, name: str, store: Store, slots: Sequence[int]) -> dist.ProcessGroup:
        ranks = [self.topology.rank(slot) for slot in slots]
        device = torch.device("cpu") if name == COPIES else self.device
        return build_group(self._backend_of(name), name, store, ranks, self.rank, self._timeout, device)

    def _backend_of(self, name: str) -> str:
        return "gloo" if name == COPIES else self._backend

    def _wrap(self, group: dist.ProcessGroup, description: str, name: str) -> InterruptibleGroup:
        return InterruptibleGroup(group, self.life, description, is_sliced(self._backend_of(name)), self._timeout)

    def _show(self, group: InterruptibleGroup, name: str) -> InterruptibleGroup:
        """Let the supervisor see what this rank enters on a group."""
        group.mark = progress.current().group(f"{self.name}/{name}")
        return group

    def _make_group(
        self, ranks: Sequence[int], *, group_name: str, group_desc: str | None = None, **_: Any
    ) -> InterruptibleGroup | None:
        """``torch.distributed.new_group`` comes here, for our own groups and for the user's."""
        if self._installing:
            offered, self._offered = self._offered, None
            if offered is not None:
                offered._set_group_name(group_name)
            return offered
        self.life.check("world")
        if self.rank not in ranks:
            return None
        slots = [self.topology.slots[rank] for rank in ranks]
        guard, prefix = self._guard, f"generation/{self.name}/user"
        construction = Construction(
            lambda: self._build(group_name, PrefixStore(prefix, guard.borrow()), slots), self._changed
        )
        plain = construction.wait(lambda: self.life.interrupted)
        if plain is None:
            raise Interrupted(f"a process group was being made: {self.life.reason}")
        description = group_desc or f"of ranks {list(ranks)}, made by torch.distributed.new_group"
        group = self._show(self._wrap(plain, description, f"user/{group_name}"), f"user/{group_name}")
        group._set_group_name(group_name)
        self._users.add(group)
        return group


_offer: list[InterruptibleGroup] = []

_stale: weakref.WeakSet[InterruptibleGroup] = weakref.WeakSet()
"""Groups of earlier generations that somebody holds."""


def _offered_group(options: Any, _: Any) -> InterruptibleGroup:
    """Called by ``init_process_group``: hands it the group that is ready."""
    if not _offer:
        raise RuntimeError(f"the backend {_PLUGIN!r} is made by lightning_ntp alone: use 'gloo' or 'nccl'")
    group = _offer.pop()
    group._set_group_name(options.group_id)
    return group


def _call_it(world: InterruptibleGroup, backend: str) -> None:
    """Have ``torch.distributed.get_backend`` tell the real backend: libraries decide by it."""
    _, store = c10d._world.pg_map[world]
    c10d._world.pg_map[world] = (dist.Backend(backend), store)
    c10d._world.pg_backend_config[world] = str(c10d.BackendConfig(dist.Backend(backend)))
