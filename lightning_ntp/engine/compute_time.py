"""How long a replica computes per micro-batch: forward and backward, without waiting for other replicas.

Collectives inside of the replica count: its ranks wait for the slowest of them, and that is how fast the replica is. On
CUDA the time is the stream's own, between two events that nobody waits for; the host runs ahead there, and its clock
says nothing (no GPU has confirmed this part yet).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from lightning_ntp.launch import progress

_MOST_WAITING = 64
"""Micro-batches whose events may be outstanding; a stream that is further behind is not waited for."""


class _Clock(Protocol):
    def mark(self) -> Any:
        """This moment."""

    def reached(self, mark: Any) -> bool:
        """Whether it has come."""

    def between(self, begin: Any, end: Any) -> int:
        """Nanoseconds."""


class _Host:
    def mark(self) -> int:
        return time.monotonic_ns()

    def reached(self, mark: int) -> bool:
        return True

    def between(self, begin: int, end: int) -> int:
        return end - begin


class _Stream:
    """The current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
        return int(begin.elapsed_time(end) * 1e6)


class ComputeTime:
    """Measures micro-batches, and shows the sum in this rank's progress. Costs two marks each, and no waiting.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: _Clock = _Stream(device) if device.type == "cuda" else _Host()
        self._begun: Any = None
        self._parts: list[tuple[Any, Any]] = []
        self._waiting: deque[list[tuple[Any, Any]]] = deque(maxlen=_MOST_WAITING)

    def begin(self) -> None:
        """A micro-batch begins. One that has not ended before was given up, and does not count."""
        self._collect()
        self._parts, self._begun = [], self._clock.mark()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for other replicas in the middle of a micro-batch; elsewhere it does nothing."""
        if self._begun is None:
            yield
            return
        self._pause()
        try:
            yield
        finally:
            self._begun = self._clock.mark()

    def end(self) -> None:
        """The micro-batch is computed. Of several backward passes in one, the first ends it."""
        if self._begun is not None:
            self._pause()
            self._waiting.append(self._parts)
        self._parts = []

    def _pause(self) -> None:
        self._parts.append((self._begun, self._clock.mark()))
        self._begun = None

    def _collect(self) -> None:
        waiting, clock = self._waiting, self._clock
        while waiting and clock.reached(waiting[0][-1][1]):
            parts = waiting.popleft()
            progress.current().computed(sum(clock.between(begin, end) for begin, end in parts))
