"""What a rank can be watched for during some steps: bytes it sends, collectives it enters, memory it needs at peak."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from lightning_ntp.comm import runtime
from lightning_ntp.lightning.steps.snapshot import SnapshotRecorder
from lightning_ntp.lightning.survival import survival_of

_BYTES_SENT = 200  # offset of tcpi_bytes_sent in struct tcp_info (linux/tcp.h, Linux 4.19 and newer)
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_resident_at_start = 0


@dataclass(frozen=True)
class Traffic:
    """Of one rank in some steps."""

    bytes_sent: int
    """Over TCP, as the kernel has counted them: payload of all collectives, and gloo's headers."""
    collectives: dict[str, int]
    """Number of calls by name, those from C++ included."""


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes."""

    parameters: int
    state: int
    """Parameters, gradients and optimizer state: what a rank cannot do without."""
    peak: int
    """Highest resident memory during a step, over that before the model was built."""


def start_memory() -> None:
    """Take note of resident memory before the model exists.

    Tensors of 64 KiB and more get pages of their own from now on, which go back to the system at once when a tensor
    dies: what stays resident is what is used.
    """
    global _resident_at_start
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    _resident_at_start = _status("RssAnon")


def watch_traffic(module: Any) -> Callable[[], Traffic]:
    """Count what is sent until the returned function is called."""
    recorder = profile(
        activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
    )
    with _without_messages():
        recorder.start()
    before = _bytes_sent()

    def finish() -> Traffic:
        sent = _bytes_sent() - before
        with _without_messages():
            recorder.stop()
        events = recorder.profiler.kineto_results.events()  # type: ignore[union-attr]
        names = Counter(e.name().removeprefix("gloo:") for e in events if e.name().startswith("gloo:"))
        return Traffic(sent, dict(names))

    return finish


def watch_memory(module: Any) -> Callable[[], Memory]:
    """Measure the peak until the returned function is called, with batches of a few tokens."""
    module.tiny = True
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))

    def finish() -> Memory:
        module.tiny = False
        # pages of files (libraries) are resident as soon as they are touched, and stay so
        peak = _status("VmHWM") - _status("RssFile") - _status("RssShmem") - _resident_at_start
        parameters = list(module.parameters())
        states = [
            value
            for optimizer in module.trainer.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        held = sum(_size(p) for p in parameters)
        return Memory(held, 2 * held + sum(_size(t) for t in states), peak)

    return finish


def watch_snapshot(module: Any) -> Callable[[], float]:
    """Sum up the seconds in which steps remember what they may have to put back."""
    take, seconds = SnapshotRecorder.take, 0.0

    def timed(recorder: SnapshotRecorder) -> Any:
        nonlocal seconds
        began = time.perf_counter()
        taken = take(recorder)
        seconds += time.perf_counter() - began
        return taken

    SnapshotRecorder.take = timed  # type: ignore[method-assign]

    def finish() -> float:
        SnapshotRecorder.take = take  # type: ignore[method-assign]
        return seconds

    return finish


def watch_copies(module: Any) -> Callable[[], tuple[int, float, int]]:
    """How often neighbours' copies are made, what one costs, and what they take."""

    def finish() -> tuple[int, float, int]:
        current = runtime.current()
        assert current is not None
        copies = survival_of(current).engine.copies
        assert copies is not None
        return copies.interval, copies.cost, copies.bytes_kept()

    return finish


ACCOUNTS: dict[str, Callable[..., Callable[[], Any]]] = {
    "traffic": watch_traffic,
    "memory": watch_memory,
    "snapshot": watch_snapshot,
    "copies": watch_copies,
}


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """The profiler's start and stop write to stderr from C++."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _size(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _bytes_sent() -> int:
    """By all TCP connections of this process since they were made."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 8)
        except OSError:  # no TCP, or closed by now
            continue
        total += struct.unpack_from("Q", info, _BYTES_SENT)[0]
    return total
