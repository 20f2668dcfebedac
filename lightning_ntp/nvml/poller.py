"""One thread per device, which looks at it again and again, and starts NVML anew for one that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from lightning_ntp.nvml.changes import Changes
from lightning_ntp.nvml.errors import NOT_FOUND, UNINITIALIZED
from lightning_ntp.nvml.library import INIT, Library, Renewed
from lightning_ntp.nvml.protocol import Outlet, finding_to_message
from lightning_ntp.nvml.reader import DeviceReader, Poll

_LEAST_SECONDS = 0.05
"""Between two looks, however often one is asked for."""
_SLOWEST = 6
"""The pauses between new starts of NVML grow up to so many times the first one: others lose events meanwhile."""


class Poller(threading.Thread):
    """Looks at one device.

    Args:
        gpu: UUID of the device or MIG instance.
        library: NVML.
        outlet: Where findings go.
        interval: Seconds between two looks.
        renew: Seconds between two new starts of NVML for a device that is gone.
        memory: What is known of the device from a former process.
    """

    def __init__(
        self,
        gpu: str,
        library: Library,
        outlet: Outlet,
        interval: float,
        renew: float,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name=f"poll-{gpu}", daemon=True)
        self.gpu, self.interval, self.renew = gpu, interval, renew
        self._library, self._outlet = library, outlet
        self._reader, self._changes = DeviceReader(gpu, library), Changes(gpu, memory)
        self._wake = threading.Event()
        self._unavailable = threading.Event()
        self._events = 0
        self._over = False
        self._was_there, self._absent = bool(memory), False
        self._away = 0
        """How often in a row the device was not there, or the driver was not."""

    # ---- for other threads ------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Look now."""
        self._wake.set()

    def event(self) -> None:
        """An event is told, under the outlet's lock: a look that has begun before says nothing about it."""
        self._events += 1

    def unavailable(self) -> None:
        """It is told that the device is not available. Under the outlet's lock."""
        self._unavailable.set()
        self._wake.set()

    def stop(self) -> None:
        self._over = True
        self._wake.set()

    # ---- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._over:
            try:
                self._look()
            except Renewed:
                continue
            self._wake.wait(self._pause())
            self._wake.clear()
            time.sleep(_LEAST_SECONDS)

    def _pause(self) -> float:
        if not self._away:
            return max(0.0, self.interval - _LEAST_SECONDS)
        if self._absent:
            return 2 * _SLOWEST * self.renew
        return self.renew * min(self._away, _SLOWEST)

    def _look(self) -> None:
        if self._unavailable.is_set():
            self._unavailable.clear()
            self._changes.unavailable()
            self._away = 1
            self._reader.close()
            self._wake.wait(self.renew)  # it says so because it is about to go
        if self._away:
            self._library.renew(self._reader.epoch)
        events = self._events
        poll = self._reader.poll()
        if self._over:
            return
        self._count(poll)
        for note in poll.notes:
            self._outlet.send(note=note)
        if self._absent:
            return
        findings = self._changes.see(poll)
        healthy = self._changes.healthy(poll)
        with self._outlet.lock:
            if healthy is not None and events == self._events:
                findings.append(healthy)
            if self._unavailable.is_set():  # told since this look began: the next one goes by it, here or elsewhere
                self._changes.unavailable()
            # in one message: who goes on from here in another process has told all of them, or none
            self._outlet.send(findings=[*map(finding_to_message, findings)], look=self._changes.memory())

    def _count(self, poll: Poll) -> None:
        """Whether the device never was there, so that it cannot be lost; how often in a row it was not there."""
        lost = poll.lost
        absent = lost is not None and lost.code == NOT_FOUND and not self._was_there
        if absent and not self._away:
            poll.notes.append(f"the driver does not know {self.gpu}: it is looked for now and then")
        no_driver = any(each.call == INIT or each.code == UNINITIALIZED for each in poll.errors.values())
        self._away = self._away + 1 if lost is not None or no_driver else 0
        self._was_there = self._was_there or bool(poll.reading.values) or lost is not None and not absent
        self._absent = absent
