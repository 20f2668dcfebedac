"""Lets go of dead process groups: a gloo group's destructor takes 10 ms per connection, or waits for its threads.

It may wait until the time-out of the collective that was under way. A message of which a part had been taken by the
socket when the connection closed is forgotten by gloo (torch 2.13, ``Pair::signalException``), so nobody wakes the
thread of the group that waits for it. It holds the group's threads and descriptors until then, but nobody up.
"""

from __future__ import annotations

import threading
import time
from typing import Any

_LAST_SECONDS = 5.0


class Reaper:
    """Drops the last reference to things, each in a thread of its own."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def take(self, things: list[Any]) -> None:
        """Empty the list, in the background."""
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while things:
                last = [things.pop()]
                thread = threading.Thread(target=last.clear, name="ntp-reaper", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Wait until everything is gone, but not for ever."""
        deadline = time.monotonic() + _LAST_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
