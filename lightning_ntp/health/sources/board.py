"""From what is written somewhere now to findings about what has changed."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable, Sequence

from lightning_ntp.health.conditions import one_line
from lightning_ntp.health.findings import Action, Finding, WatchedJob
from lightning_ntp.health.sources.entries import Entry, is_this_host

log = logging.getLogger("lightning_ntp")

SIGNAL = "maintenance"
_MOST_PROBLEMS = 5
"""Of one content are told so many; the rest is counted."""

Place = tuple[str, int]
"""A device's UUID and -1, or nothing and a slot."""


class Board:
    """What is wanted of a job's slots and devices, as one source says it.

    What is written becomes a finding once; what is not written any more is over, once that was so at two looks in a
    row: people and programs empty files before they write them anew.

    Args:
        said_by: Who says it, if it gives no reason.
        host: This host's name; None asks the system.
    """

    def __init__(self, said_by: str, host: str | None = None) -> None:
        self._said_by, self._host = said_by, socket.gethostname() if host is None else host
        self._wanted: dict[Place, Entry] = {}
        self._missing: set[Place] = set()
        self._slots: set[int] = set()
        self._devices: set[str] = set()
        self._problems: frozenset[str] = frozenset()

    def look(self, entries: Iterable[Entry], job: WatchedJob) -> list[Finding]:
        """What has changed since the last look.

        Args:
            entries: What is written now.
            job: Whose slots and devices it is about.
        """
        # all that were seen: who has left because of an entry is not to come back for having left
        self._slots.update(job.slots())
        self._devices.update(job.devices().values())
        wanted: dict[Place, Entry] = {}
        for entry in entries:
            for place in self._places(entry):
                if entry.action > wanted.get(place, Entry(Action.IGNORE)).action:
                    wanted[place] = entry
        findings = []
        for place, entry in wanted.items():
            before = self._wanted.get(place)
            if before is None or (before.action, before.text) != (entry.action, entry.text):
                text = entry.text or f"said by {self._said_by}"
                findings.append(Finding(SIGNAL, text, place[0], place[1], action=entry.action))
        gone = self._wanted.keys() - wanted.keys()
        for place in sorted(gone & self._missing):
            findings.append(Finding(SIGNAL, f"{self._said_by} asks for nothing any more", *place, clears=True))
        self._missing = gone - self._missing
        self._wanted = {**{place: self._wanted[place] for place in self._missing}, **wanted}
        return findings

    def complain(self, problems: Sequence[str]) -> None:
        """Tell what is wrong with what is written: each mistake once, for as long as it is there."""
        new = [problem for problem in dict.fromkeys(problems) if problem not in self._problems]
        self._problems = frozenset(problems)
        for problem in new[:_MOST_PROBLEMS]:
            log.warning("health, %s: %s", self._said_by, one_line(problem))
        if len(new) > _MOST_PROBLEMS:
            log.warning("health, %s: %d mistakes more like these", self._said_by, len(new) - _MOST_PROBLEMS)

    def _places(self, entry: Entry) -> Iterable[Place]:
        if entry.host and not is_this_host(entry.host, self._host):
            return ()
        if entry.slot >= 0:
            return (("", entry.slot),)
        if not entry.gpu:
            return [("", slot) for slot in self._slots]
        # a list for a whole cluster names many that are not ours
        return ((entry.gpu, -1),) if entry.gpu in self._devices else ()


def wait(job: WatchedJob, seconds: float) -> None:
    """Wait, but no longer than the job runs."""
    until = time.monotonic() + seconds
    while not job.ending() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
