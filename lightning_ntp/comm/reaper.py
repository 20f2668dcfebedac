"""Lets go of dead process groups: a gloo group's destructor takes 10 ms per connection, or waits for its threads."""

from __future__ import annotations

import queue
import threading
from typing import Any


class Reaper:
    """Drops the last reference to things in a thread of its own."""

    def __init__(self) -> None:
        self._things: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ntp-reaper", daemon=True)
        self._thread.start()

    def take(self, things: list[Any]) -> None:
        """Empty the list, in the background."""
        self._things.put(things)

    def close(self) -> None:
        """Wait until everything is gone, but not for ever."""
        self._things.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (things := self._things.get()) is not None:
            things.clear()
            del things
