"""Signals that reach the supervisor, and whether the ranks still need to be told.

A terminal's Ctrl-C goes to the whole foreground process group, and some schedulers signal every process of a job. The
ranks must stay in the supervisor's group (only the foreground group may read the terminal: ``breakpoint()`` and
``input()`` would stop working in a group of their own), so they may or may not have got the same signal. The fork
server, in the same group as the ranks, tells: it reports the signals it gets itself. If it got this one too, so did the
ranks, and nothing is forwarded; else the supervisor forwards it. So every rank sees a signal exactly once, with the
handlers of an ordinary script.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_WAIT = 0.25
"""Seconds to wait for the fork server to report the same signal."""
_DEBOUNCE = 0.5
"""Seconds within which a signal counts once: wrappers such as ``make`` pass on a Ctrl-C that the terminal sent too."""


class SignalRelay:
    """Context manager that takes over SIGINT and SIGTERM; outside the main thread it takes over nothing."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, float]] = []
        self._waiting: list[tuple[int, float]] = []
        self._reached: list[tuple[int, float]] = []
        self._last: dict[int, float] = {}
        self._former: dict[int, Callable[[int, FrameType | None], Any] | int | signal.Handlers | None] = {}

    def __enter__(self) -> SignalRelay:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                # nohup and shells' background jobs ignore signals on purpose
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._former[signum] = signal.signal(signum, lambda number, _: self.received(number))
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)
        self._former = {}

    @property
    def pending(self) -> bool:
        """A signal came which :meth:`due` has not given out yet."""
        return bool(self._queue or self._waiting)

    def received(self, signum: int) -> None:
        """This process got ``signum``. Called from a signal handler: only appends."""
        self._queue.append((signum, time.monotonic()))

    def reached_ranks(self, signum: int) -> None:
        """The fork server got ``signum`` too, hence so did the ranks."""
        self._reached.append((signum, time.monotonic()))

    def due(self, now: float) -> list[tuple[int, bool]]:
        """(signal, whether to forward it to the ranks) for those that count and whose case is clear."""
        while self._queue:
            signum, when = self._queue.pop(0)
            if when - self._last.get(signum, float("-inf")) > _DEBOUNCE:
                self._waiting.append((signum, when))
            self._last[signum] = when
        clear: list[tuple[int, bool]] = []
        for signum, when in list(self._waiting):
            reached = any(s == signum and abs(at - when) < 2 * _DEBOUNCE for s, at in self._reached)
            if reached or now - when > _WAIT:
                self._waiting.remove((signum, when))
                clear.append((signum, not reached))
        return clear
