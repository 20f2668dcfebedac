"""What ranks do in the tests of membership."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ntp.comm import Interrupted, Recovery, Runtime, backends, runtime
from lightning_ntp.launch import RankIdentity
from lightning_ntp.plan import Topology

GROUPS = ("world", "tensor_parallel", "sync_tensor_parallel", "sync_data_parallel")


def start(degrees: tuple[int, ...], recoverable: bool = True, timeout: float = 60.0) -> Runtime:
    """This rank's runtime."""
    identity = RankIdentity.from_environ()
    started = runtime.start(
        (identity.store_host, identity.store_port),
        identity.slot,
        Topology.start(degrees),
        "gloo",
        timedelta(seconds=timeout),
        torch.device("cpu"),
    )
    backends.CONNECT_TIMEOUT = timedelta(seconds=2)  # what an abandoned thread takes to end
    if recoverable:
        started.announce_recoverable()
        use_every_group(started)
        time.sleep(0.1)  # for the others to have received the last bytes too
    return started


def die() -> None:
    """As a failing GPU's process does: at once, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # it takes a moment


def use_every_group(current: Runtime) -> list[int]:
    """One all-reduce per group of this rank, checked; the sizes of the groups."""
    sizes = []
    for name in GROUPS:
        group = getattr(current.generation, name)
        if group is not None:
            ones = torch.ones(7)
            dist.all_reduce(ones, group=group)
            assert ones.tolist() == [group.size()] * 7
            sizes.append(group.size())
    everyone: list[Any] = [None] * current.generation.topology.world_size
    dist.all_gather_object(everyone, current.slot)
    assert tuple(everyone) == current.generation.topology.slots
    return sizes


def wait_for_interruption(current: Runtime, group: Any = None, seconds: float = 20.0) -> Interrupted:
    """Be in collectives of ``group`` until one is interrupted; without a group, only look."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if group is None:
                if current.interrupted:
                    return Interrupted("seen")
                time.sleep(0.001)
            else:
                dist.all_reduce(torch.ones(1000), group=group)
    except Interrupted as error:
        return error
    raise AssertionError(f"not interrupted within {seconds:g} s")


def describe(recovery: Recovery) -> tuple[Any, ...]:
    """What all survivors must agree on."""
    return recovery.before, recovery.after, recovery.lost, dict(recovery.records)
