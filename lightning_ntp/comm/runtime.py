"""The one runtime of a rank: its store client and its current generation.

A script may call ``fit`` and then ``test`` with another ``Trainer``: both work on the same process groups.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lightning_ntp.comm.generation import Generation
from lightning_ntp.comm.lane import Lane, make_lane
from lightning_ntp.plan import Topology


class Runtime:
    """What a rank keeps across trainer calls.

    Attributes:
        generation: The current generation.
        lane: Runs gradient communication beside the backward pass.
    """

    def __init__(
        self, store: Store, slot: int, topology: Topology, backend: str, timeout: timedelta, device: torch.device
    ) -> None:
        self.slot, self.backend, self.timeout, self.device = slot, backend, timeout, device
        self._store = store
        self._generations = 0
        self.lane: Lane = make_lane(device)
        self.generation = self._build(topology)

    def serves(self, topology: Topology, backend: str, device: torch.device) -> bool:
        """Whether the current generation is what is asked for."""
        return self.generation.topology == topology and self.backend == backend and self.device == device

    def change(self, topology: Topology) -> None:
        """Enter the next generation. Collective over its members."""
        self.generation.close()
        self.generation = self._build(topology)

    def close(self) -> None:
        self.lane.close()
        self.generation.close()

    def _build(self, topology: Topology) -> Generation:
        self._generations += 1
        return Generation(self._generations, topology, self.slot, self._store, self.backend, self.timeout, self.device)


_current: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process, if it is a rank that has started."""
    return _current


def start(
    store: tuple[str, int], slot: int, topology: Topology, backend: str, timeout: timedelta, device: torch.device
) -> Runtime:
    """Start the runtime, or return the one that serves already. Collective over all slots of ``topology``.

    Args:
        store: Host and port of the supervisor's store.
        slot: This rank's slot.
        topology: The live members.
        backend: Process group backend.
        timeout: For every collective and for reaching the store.
        device: This rank's device.

    Raises:
        RuntimeError: If process groups exist that were not made here.
        torch.distributed.DistNetworkError: If the store cannot be reached in time.
    """
    global _current
    if _current is not None and _current.serves(topology, backend, device):
        return _current
    if _current is not None:
        _current.change(topology)
        return _current
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialized already, by someone else: lightning_ntp builds its own process groups,"
            " since they change when a rank is lost; remove the call of init_process_group"
        )
    client = TCPStore(store[0], store[1], is_master=False, wait_for_workers=False, timeout=timeout)
    _current = Runtime(client, slot, topology, backend, timeout, device)
    return _current


def shutdown() -> None:
    """End the runtime of this process, if there is one."""
    global _current
    runtime, _current = _current, None
    if runtime is not None:
        runtime.close()
