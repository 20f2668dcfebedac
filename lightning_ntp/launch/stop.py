"""The rank's side of a graceful stop: a signal becomes a note, which the rank's own vote turns into action."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopRequest:
    """Remembers the first SIGINT or SIGTERM instead of letting it interrupt the process.

    Signals reach the ranks of a job at different moments, so a rank that acted at once would leave its peers in a
    collective. The strategy asks :meth:`stop_requested` in its vote and stops all ranks at the same step. Later signals
    change nothing here: being more forceful the second time is the supervisor's task (it kills).

    Use as a context manager, or call :meth:`install` and :meth:`uninstall`. Outside the main thread, where Python
    cannot set handlers, it stays silent.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self._signals = signals
        self._previous: dict[signal.Signals, _Handler] = {}
        self._requested: int | None = None

    def stop_requested(self) -> int | None:
        """Number of the signal that came first, or ``None``."""
        return self._requested

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
            self._requested = signum
        former = self._previous.get(signal.Signals(signum))
        # A handler of the user's own still runs; Python's default one would raise KeyboardInterrupt here and now.
        if callable(former) and former is not signal.default_int_handler:
            former(signum, frame)
