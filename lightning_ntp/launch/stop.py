"""The rank's side of a graceful stop: a signal becomes a note, which the rank's own vote turns into action."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_ntp.launch.environment import JOB_DIR, SLOT
from lightning_ntp.launch.jobs import leave_reason


def stop_mark(job_dir: str | os.PathLike[str]) -> str:
    """The file that says that the whole job was told to stop. Written by the supervisor before any rank is."""
    return os.path.join(job_dir, "stop")


_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopRequest:
    """Remembers the first SIGINT or SIGTERM instead of letting it interrupt the process.

    Signals reach the ranks of a job at different moments, so a rank that acted at once would leave its peers in a
    collective. The strategy asks :meth:`stop_requested` in its vote and stops all ranks at the same step. Later signals
    change nothing here: being more forceful the second time is the supervisor's task (it kills).

    Use as a context manager, or call :meth:`install` and :meth:`uninstall`. Outside the main thread, where Python
    cannot set handlers, it stays silent.
    """

    ALONE_SECONDS = 1.0
    """For the supervisor to say that the whole job was told to stop: it takes milliseconds."""

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self._signals = signals
        self._previous: dict[signal.Signals, _Handler] = {}
        self._requested: int | None = None
        self._when = 0.0

    def stop_requested(self) -> int | None:
        """Number of the signal that came first, or ``None``."""
        return self._requested

    def is_undecided(self) -> bool:
        """Whether it is too early to say whether the whole job was told to stop, or this rank alone."""
        return self._might_be_alone() and time.monotonic() - self._when < self.ALONE_SECONDS

    def is_alone(self) -> bool:
        """Whether SIGTERM was meant for this rank alone: the supervisor would have passed on one to the job."""
        return self._might_be_alone() and not self.is_undecided()

    def why_alone(self) -> str:
        """Why this rank alone is to leave, for people."""
        directory, slot = os.environ.get(JOB_DIR), os.environ.get(SLOT, "")
        if directory is not None and slot.isdigit():
            with contextlib.suppress(OSError):
                return leave_reason(Path(directory), int(slot)).read_text()
        return "SIGTERM to it alone"

    def _might_be_alone(self) -> bool:
        directory = os.environ.get(JOB_DIR)
        return self._requested == signal.SIGTERM and directory is not None and not os.path.exists(stop_mark(directory))

    def install(self) -> None:
        """Take the signals over. Signals which the process ignores (``nohup``) stay ignored."""
        if threading.current_thread() is not threading.main_thread() or self._previous:
            return
        for signum in self._signals:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)

    def uninstall(self) -> None:
        """Put the former handlers back, unless someone else has replaced ours since."""
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, handler)
        self._previous = {}

    def __enter__(self) -> StopRequest:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._requested is None:
            self._requested, self._when = signum, time.monotonic()
        former = self._previous.get(signal.Signals(signum))
        # A handler of the user's own still runs; Python's default one would raise KeyboardInterrupt here and now.
        if callable(former) and former is not signal.default_int_handler:
            former(signum, frame)
