"""One thread per source: whatever a source does, findings come in order, in bounded number, and nobody waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from lightning_ntp.health.conditions import one_line
from lightning_ntp.health.findings import Finding, HealthSource, WatchedJob

log = logging.getLogger("lightning_ntp")

_MOST = 1000
"""Findings of one source that wait to be judged; what comes beyond is dropped, and that is said once."""
_LONGEST_PAUSE = 60.0


class Listener:
    """Calls a source again and again, in a thread of its own.

    Args:
        source: Yields findings.
        job: What it may ask.
        interval: Seconds between two calls.
        heard: Called when there is something to take.
    """

    def __init__(self, source: HealthSource, job: WatchedJob, interval: float, heard: Callable[[], None]) -> None:
        self.name = getattr(source, "__name__", None) or type(source).__name__
        self._source, self._job, self._interval, self._heard = source, job, interval, heard
        self._lock = threading.Lock()
        self._findings: deque[Finding] = deque()
        self._floods = False
        self._told = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ntp-health-{self.name}", daemon=True)
        self._thread.start()

    def take(self) -> list[Finding]:
        """What was found since."""
        with self._lock:
            found = list(self._findings)
            self._findings.clear()
            return found

    def close(self, seconds: float) -> None:
        """Let the thread end, and wait so long for it: one that a source blocks is left behind, and ends with us."""
        self._over.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        pause = self._interval
        while not self._is_ending():
            try:
                found = self._source(self._job)
                for finding in found:
                    self._put(finding)
                    if self._is_ending():
                        close = getattr(found, "close", None)  # a generator's
                        if close is not None:
                            close()
                        return
                pause = self._interval
            except BaseException as error:  # it is the user's code, which may also call sys.exit()
                self._say(f"{type(error).__name__}: {error}")
                pause = min(max(2.0 * pause, self._interval), _LONGEST_PAUSE)
            self._over.wait(pause)

    def _is_ending(self) -> bool:
        return self._over.is_set() or self._job.ending()

    def _put(self, finding: object) -> None:
        if not isinstance(finding, Finding):
            raise TypeError(f"it yields a {type(finding).__name__} where a Finding was expected: {finding!r:.100}")
        with self._lock:
            full = len(self._findings) >= _MOST
            if not full:
                self._findings.append(finding)
        if not full:
            self._heard()
            return
        if not self._floods:
            self._floods = True
            log.warning(
                "the health source %s floods: %d findings wait, and what comes now is dropped", self.name, _MOST
            )
        time.sleep(0.01)  # or it would take all of Python's time from the supervisor

    def _say(self, what: str) -> None:
        if what != self._told:
            self._told = what
            log.warning("the health source %s has raised %s; it is asked again later", self.name, one_line(what)[:300])
