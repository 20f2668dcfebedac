"""The process that asks the driver: it reads which devices to watch, and says what it finds (:mod:`.protocol`).

A call of the driver may hang for ever. pynvml lets go of Python's lock meanwhile, so that other devices' threads and
the heartbeat of the main thread go on, and the heartbeat says who is in which call.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from lightning_ntp.launch.lifeline import die_with_parent
from lightning_ntp.nvml.errors import CallError, Kind
from lightning_ntp.nvml.library import Library
from lightning_ntp.nvml.protocol import Lines, Outlet

HEARTBEAT_SECONDS = 0.2
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A terminal or a scheduler sends them to everybody, and means who launched this process."""
_NICENESS = 5
"""Training goes first."""
_PIECE = 1 << 16


def begin(parent: int) -> Outlet:
    """Become a process that asks the driver for another one: it goes with it, and gives way to training.

    Args:
        parent: Pid of the one who has started this process.

    Returns:
        Where messages go: nothing else gets into what was the standard output.
    """
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    die_with_parent(parent)
    os.nice(_NICENESS)
    out = os.dup(1)
    os.dup2(2, 1)
    return Outlet(out)


def watch(parent: int) -> None:
    """Watch devices until nobody wants it any more."""
    _Monitor(begin(parent)).run()


class _Monitor:
    def __init__(self, outlet: Outlet) -> None:
        self._outlet, self._library = outlet, Library()
        self._pollers: dict[str, Any] = {}
        self._settings: Mapping[str, Any] = {}
        self._lock = threading.Lock()
        self._events: Any = None
        self._begun = False

    def run(self) -> None:
        lines, beats = Lines(), 0
        while True:
            calls = [[call.name, call.gpu, call.since] for call in self._library.in_flight()]
            self._outlet.send(heartbeat=beats, calls=calls)
            beats += 1
            deadline = time.monotonic() + HEARTBEAT_SECONDS
            while (left := deadline - time.monotonic()) > 0:
                if not select.select([0], [], [], left)[0]:
                    continue
                piece = os.read(0, _PIECE)
                if not piece:  # not sys.exit(): that would wait for threads, of which one may hang in the driver
                    os._exit(0)
                for message in lines.feed(piece):
                    self._take(message)

    def _take(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._settings = message
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._start, name="start", daemon=True).start()
        elif self._events is not None:
            self._follow()

    def _start(self) -> None:
        """In a thread: it may hang like any call."""
        try:
            self._library.start()
        except CallError as error:
            if error.kind not in (Kind.RETRY, Kind.LOST, Kind.RESET):
                self._end(error.text)
        except ImportError as error:
            self._end(f"nvidia-ml-py cannot be imported ({error}): pip install nvidia-ml-py")
        # what needs pynvml is imported now that there is one
        from lightning_ntp.nvml.events import Events

        self._events = Events(self._library, self._outlet, lambda: self._pollers)
        self._follow()
        self._events.start()

    def _end(self, why: str) -> None:
        self._outlet.send(off=why)
        os._exit(0)

    def _follow(self) -> None:
        """Watch the devices that are to be watched."""
        from lightning_ntp.nvml.poller import Poller

        with self._lock:
            settings, known = self._settings, self._settings.get("known", {})
            interval, renew = settings["interval"], settings["renew"]
            pollers = dict(self._pollers)
            for gpu in [gpu for gpu in pollers if gpu not in settings["watch"]]:
                pollers.pop(gpu).stop()
            new = [gpu for gpu in settings["watch"] if gpu not in pollers]
            for gpu in new:
                pollers[gpu] = Poller(gpu, self._library, self._outlet, interval, renew, known.get(gpu))
            self._pollers = pollers
            for gpu in new:
                pollers[gpu].start()
        self._events.devices_changed()


def main() -> None:
    """``watch``, ``inventory``, ``find`` or ``bounds``, then the parent's pid, then UUIDs of the last two."""
    what, parent, *uuids = sys.argv[1:] if len(sys.argv) > 1 else ["watch", str(os.getppid())]
    if what == "watch":
        watch(int(parent))
        return
    from lightning_ntp.nvml.survey import bounds, find, survey

    outlet = begin(int(parent))
    if what == "find":
        find(outlet, uuids)
    elif what == "bounds":
        bounds(outlet, uuids)
    else:
        survey(outlet)
    os._exit(0)
