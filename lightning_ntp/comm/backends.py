"""Plain process groups, made and ended without touching any global state of torch.

Gloo is what the tests run. The NCCL half follows the sources of torch 2.13 and is *unconfirmed*: no machine with
several GPUs has run it (``tests/gpu/recover_nccl.py`` does so with one command).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

CONNECT_TIMEOUT = timedelta(seconds=10)
"""For finding the peers of a group. They have all just agreed to come, so one that does not is dead or broken."""

_IMPOSSIBLE_TAG = 0x7FFFFFF0
_DEVICE_TIMEOUT = 20.0

NCCL_ENVIRONMENT = {
    # The watchdog thread must not end the process, nor abort groups by itself: we do, all together.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    # A communicator being set up can then be aborted too.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(int(CONNECT_TIMEOUT.total_seconds())),
    # NVLink SHARP memory is not given back when a communicator is aborted.
    "NCCL_NVLS_ENABLE": "0",
}


def prepare_environment(backend: str) -> None:
    """Set what the backend reads from the environment, before the first group exists. The user's settings stay."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a time-out is how we wait, not worth a C++ trace
    if backend == "nccl":
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)


def is_sliced(backend: str) -> bool:
    """Whether a wait with a short time-out leaves the operation running and the device unsynchronised."""
    return backend == "gloo"


def build_group(
    backend: str, name: str, store: Store, ranks: Sequence[int], rank: int, timeout: timedelta, device: torch.device
) -> dist.ProcessGroup:
    """Connect a group. Blocks until all members have come.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        name: Unique in the generation; part of every key.
        store: A client used by this thread alone, with a prefix of the generation's own.
        ranks: Global ranks of the members, in the order of their ranks in the group.
        rank: This process's global rank.
        timeout: For every collective.
        device: This rank's device.

    Raises:
        RuntimeError: If a member does not come in time.
    """
    store, place = PrefixStore(name, store), list(ranks).index(rank)
    group = dist.ProcessGroup(store, place, len(ranks))
    kinds = dist.ProcessGroup.BackendType
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.blocking = 0
        options.global_ranks_in_group = list(ranks)
        options.group_name = c10d.GroupName(name)
        nccl = dist.ProcessGroupNCCL(store, place, len(ranks), options)
        group._set_default_backend(kinds.NCCL)
        group.bound_device_id = device
        group._register_backend(torch.device(device.type), kinds.NCCL, nccl)
        nccl._set_sequence_number_for_group()
        nccl.eager_connect_single_device(device)
    elif backend == "gloo":
        gloo = dist.ProcessGroupGloo(store, place, len(ranks), timeout=CONNECT_TIMEOUT)
        gloo.set_timeout(timeout)
        gloo.options.global_ranks_in_group = list(ranks)
        group._set_default_backend(kinds.GLOO)
        group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        gloo._set_sequence_number_for_group()
    else:
        raise ValueError(f"process_group_backend={backend!r} is not supported: use 'gloo' or 'nccl'")
    group._set_group_name(c10d.GroupName(name))
    return group


def abort(backend: str, groups: Iterable[dist.ProcessGroup]) -> None:
    """Make all pending and future operations of the groups fail, here and soon at the peers too.

    Gloo knows no abort that does this. A receive that nobody answers, with a time-out of 1 ms, does: it closes every
    connection of its group (measured: 10 ms per group; waiting threads are woken after 1.4 ms).
    """
    pending = [group for group in groups if group.size() > 1]
    if backend == "nccl":
        threads = [threading.Thread(target=group.abort, name="ntp-nccl-abort", daemon=True) for group in pending]
        for thread in threads:  # together: in some versions of NCCL an abort waits for the peers' aborts
            thread.start()
        for thread in threads:
            thread.join(_DEVICE_TIMEOUT)
        return
    with contextlib.ExitStack() as stack:
        for group in pending:
            stack.callback(_close_gloo, group)


def _close_gloo(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):
        group.recv_anysource([torch.zeros(1)], _IMPOSSIBLE_TAG).wait(timedelta(milliseconds=1))


def check_device(device: torch.device) -> None:
    """After an abort: wait for the device, in a helper thread.

    Raises:
        RuntimeError: If the device does not answer or an error sticks to it; only a new process can use it then.
    """
    if device.type != "cuda":
        return
    result: list[Any] = []

    def synchronize() -> None:
        try:
            torch.cuda.synchronize(device)
            result.append(None)
        except RuntimeError as error:
            result.append(error)

    thread = threading.Thread(target=synchronize, name="ntp-device-check", daemon=True)
    thread.start()
    thread.join(_DEVICE_TIMEOUT)
    if not result:
        raise RuntimeError(f"{device} did not finish its work within {_DEVICE_TIMEOUT:g} s of the abort")
    if result[0] is not None:
        raise RuntimeError(f"{device} reports an error that stays: {result[0]}") from result[0]
