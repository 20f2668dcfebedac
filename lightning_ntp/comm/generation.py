"""A generation: the span between two membership changes, and its process groups.

Whoever needs a group asks the current generation for it at the time of use; nobody keeps one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_ntp.plan import Topology


class Generation:
    """The process groups of one topology, seen from one slot. Collective: all live slots construct it together.

    Args:
        number: Counts the generations of a process; part of every key in the store.
        topology: The live members.
        slot: This rank's slot.
        store: Reaches all members.
        backend: ``"gloo"``, ``"nccl"``, ...
        timeout: For every collective of the groups.
        device: This rank's device.

    Attributes:
        world: All members.
        tensor_parallel: The members of this replica, for forward and backward; None at degree 1.
        sync_tensor_parallel: The same members, for gradient sync, which runs beside the backward pass.
        sync_data_parallel: The members of equal index in all replicas, for gradient sync; None if this index is
            no sync index or there is one replica.
    """

    def __init__(
        self,
        number: int,
        topology: Topology,
        slot: int,
        store: Store,
        backend: str,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        self.number, self.topology, self.slot, self.device = number, topology, slot, device
        self.rank = topology.rank(slot)
        self.replica, self.index = topology.place(slot)
        self.degree = topology.degrees[self.replica]
        dist.init_process_group(
            backend,
            store=PrefixStore(f"generation/{number}", store),
            rank=self.rank,
            world_size=topology.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        world = dist.group.WORLD
        assert world is not None
        self.world: dist.ProcessGroup = world
        self._backend, self._timeout = backend, timeout
        self.tensor_parallel: dist.ProcessGroup | None = None
        self.sync_tensor_parallel: dist.ProcessGroup | None = None
        self.sync_data_parallel: dist.ProcessGroup | None = None
        # All ranks make all groups in one order, also those they are no member of: torch numbers groups by what a
        # process has made before, and members must agree on the number (torch 2.13; so does local synchronization).
        for replica in topology.live_replicas:
            slots = topology.tensor_parallel_slots(replica)
            compute, sync = self._group(slots, "tensor_parallel"), self._group(slots, "sync_tensor_parallel")
            if slot in slots:
                self.tensor_parallel, self.sync_tensor_parallel = compute, sync
        for index in topology.sync_indices:
            slots = topology.data_parallel_slots(index)
            group = self._group(slots, "sync_data_parallel")
            if slot in slots:
                self.sync_data_parallel = group

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

    def close(self) -> None:
        """Destroy all process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _group(self, slots: Sequence[int], description: str) -> dist.ProcessGroup | None:
        if len(slots) == 1:
            return None
        ranks = [self.topology.rank(slot) for slot in slots]
        group: dist.ProcessGroup = dist.new_group(  # a non-member gets a placeholder, which the caller drops
            ranks, timeout=self._timeout, backend=self._backend, group_desc=description
        )
        return group
