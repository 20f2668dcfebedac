"""What the helper says: lines on stderr, which may be a terminal that is stopped, or a pipe that nobody reads."""

from __future__ import annotations

import os
import queue
import threading
import time

_MOST_WAITING = 1000
_MOST_CHARACTERS = 2000
_END_SECONDS = 0.3


class Log:
    """Writes lines in a thread of its own, so that nobody waits for who does not read them; any thread may call."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Never waits: where too many lines wait already, this one is dropped."""
        try:
            self._lines.put_nowait(f"{time.strftime('%H:%M:%S')} power: {line[:_MOST_CHARACTERS]}")
        except queue.Full:
            return

    def close(self) -> None:
        """Write what waits, for a moment at most."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                os.write(2, line.encode("ascii", "backslashreplace").replace(b"\n", b" ") + b"\n")
            except OSError:  # nobody is there
                continue
