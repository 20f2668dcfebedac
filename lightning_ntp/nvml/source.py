"""The source of findings that asks NVIDIA's driver, through a process of its own."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_ntp.health.findings import Finding, WatchedJob
from lightning_ntp.nvml.child import Child, ChildGone
from lightning_ntp.nvml.inventory import find
from lightning_ntp.nvml.protocol import UNAVAILABLE, finding_from_message
from lightning_ntp.nvml.readings import Reading
from lightning_ntp.nvml.stalls import Stalls

log = logging.getLogger("lightning_ntp")

_LOOK_SECONDS = 0.1
"""Between two looks at what the job wants."""
_START_SECONDS = 30.0
"""For the first heartbeat: starting Python may take long where everybody starts."""
_SILENCE_SECONDS = 2.0
"""Ten heartbeats: a busy machine may delay some."""
_LONGEST_PAUSE = 60.0
_STEADY_SECONDS = 60.0
"""A process that has lived for so long has not failed to start."""


class NvmlSource:
    """Watches the job's NVIDIA devices, by UUID (a :class:`~lightning_ntp.health.findings.HealthSource`).

    Where there is no driver it says so in one line, and is silent from then on: training goes on.

    Args:
        interval: Seconds between two looks at a device.
        stall: A driver call that takes more seconds hangs.
        renew: Seconds between two new starts of NVML for a device that is lost.
        off_means: What is said where there is no driver.

    Raises:
        ValueError: If one of them is no number of seconds.
    """

    def __init__(
        self,
        interval: float = 1.0,
        stall: float = 5.0,
        renew: float = 5.0,
        off_means: str = "health of GPUs is not watched",
    ) -> None:
        self._off_means = off_means
        for name, seconds in (("interval", interval), ("stall", stall), ("renew", renew)):
            if not 0 < seconds <= 86400:
                raise ValueError(f"{name}={seconds!r} must be a number of seconds above 0, up to 86400")
        self._interval, self._stall, self._renew = float(interval), float(stall), float(renew)
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        """By UUID: what another process needs to go on from here."""
        self._readings: dict[str, Reading] = {}
        self._notes: set[str] = set()
        self._off = False

    @property
    def readings(self) -> Mapping[str, Reading]:
        """The latest reading of every device, by UUID; each knows its age. Any thread may ask."""
        with self._lock:
            return dict(self._readings)

    def check(self, gpus: Sequence[str]) -> None:
        """Before a job: whether the driver has these devices. Takes ten seconds at most.

        Raises:
            ValueError: If it has not, as far as it says.
        """
        missing = find(gpus)
        if missing:
            raise ValueError(
                f"gpus names {', '.join(missing)}, which the driver of this machine does not have; nvidia-smi -L lists"
                " those that it has"
            )

    @staticmethod
    def find(uuids: Sequence[str], seconds: float = 10.0) -> list[str]:
        """Those that the driver does not have: see :func:`lightning_ntp.nvml.find`."""
        return find(uuids, seconds)

    def __call__(self, job: WatchedJob) -> Iterable[Finding]:
        """Watch a job's devices until it ends."""
        pause, stalls = 0.0, Stalls(self._stall)
        while not self._off and not job.ending():
            if not _devices(job):
                time.sleep(_LOOK_SECONDS)
                continue
            begun = time.monotonic()
            why = yield from self._watch(job, stalls)
            if not why:
                return
            if time.monotonic() - begun > _STEADY_SECONDS:
                pause = 0.0
            log.warning("the process that asks NVIDIA's driver is started again: %s", why)
            _sleep(job, pause)
            pause = min(max(1.0, 2 * pause), _LONGEST_PAUSE)

    # ---- one process ------------------------------------------------------------------------------------------

    def _watch(self, job: WatchedJob, stalls: Stalls) -> Generator[Finding, None, str]:
        """Watch for as long as one process does. Returns why it has ended, or nothing if nobody needs another one."""
        child = Child(["watch"])
        watched: list[str] = []
        last, patience = time.monotonic(), _START_SECONDS
        try:
            while not job.ending():
                if (devices := _devices(job)) != watched:
                    watched = devices
                    child.send(self._settings(watched))
                messages = child.receive(_LOOK_SECONDS)
                now = time.monotonic()
                if messages:
                    last, patience = now, max(self._stall, _SILENCE_SECONDS)
                elif now - last > patience:
                    why = f"the process that asks the driver has said nothing for {now - last:.0f} s"
                    yield from stalls.silent(watched, why)
                    return why
                for message in messages:
                    yield from self._take(message, watched, stalls)
                if self._off:
                    return ""
            return ""
        except ChildGone as error:
            return str(error)
        finally:
            child.close()

    def _settings(self, watched: Sequence[str]) -> bytes:
        known = {gpu: self._known[gpu] for gpu in watched if gpu in self._known}
        message = {"watch": watched, "interval": self._interval, "renew": self._renew, "known": known}
        return json.dumps(message).encode() + b"\n"

    def _take(self, message: Mapping[str, Any], watched: Sequence[str], stalls: Stalls) -> Iterator[Finding]:
        if "look" in message:
            reading = Reading.from_message(message["look"]["reading"])
            with self._lock:
                self._known[reading.gpu], self._readings[reading.gpu] = message["look"], reading
            yield from stalls.looked(reading.gpu)
        for each in message.get("findings", ()):
            finding = finding_from_message(each)
            if finding.signal == UNAVAILABLE and not finding.clears:  # an event: no look knows of it yet
                standing = self._known.setdefault(finding.gpu, {}).setdefault("standing", [])
                standing += [[UNAVAILABLE, None]] if [UNAVAILABLE, None] not in standing else []
            yield finding
        if "heartbeat" in message:
            yield from stalls.heard(message["calls"], watched, time.monotonic())
        elif "note" in message:
            if message["note"] not in self._notes:
                self._notes.add(message["note"])
                log.warning("health of GPUs: %s", message["note"])
        elif "off" in message:
            self._off = True
            log.warning("%s: %s; training goes on", self._off_means, message["off"])


def _devices(job: WatchedJob) -> list[str]:
    return sorted({gpu for gpu in job.devices().values() if gpu})


def _sleep(job: WatchedJob, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not job.ending():
        time.sleep(min(_LOOK_SECONDS, seconds))
