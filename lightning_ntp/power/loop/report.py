"""What the power loop says: one line per event on stderr and in the job's log, and the state of now in a file."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ntp.launch import jobs
from lightning_ntp.launch.console import say

CHANGE = 0.02
"""A replica's power is told again if it has changed by more than this fraction."""
CALM = 3
"""After so many intervals without a change a boost has settled."""
_ABOUT = re.compile(r"replica (\d+): ")


class Report:
    """Tells what is new.

    Args:
        job_dir: The job's directory.
    """

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self._said: set[str] = set()
        self._notes: set[str] = set()
        """Those of the last interval, without numbers."""
        self._told_notes: set[str] = set()
        self._told_w: dict[int, float] = {}
        """Replica -> the sum of its limits as it was told last, of those that are boosted."""
        self._moving: dict[int, tuple[float, int]] = {}
        """Replica -> the sum of its limits, and for how many intervals it has been so."""

    def event(self, kind: str, text: str, replica: int = -1, **values: float) -> None:
        """One line, now.

        Args:
            kind: Of the event, see ``docs/events.md``.
            text: For people.
            replica: Whom it is about; -1 for all.
            values: Numbers by name with unit.
        """
        say(f"power: {text}")
        entry = {
            "monotonic": round(time.monotonic(), 6),
            "kind": kind,
            "text": text,
            "replica": replica,
            "values": values,
        }
        # what cannot be written was said; a disk that is full keeps nobody from acting
        with contextlib.suppress(OSError), open(jobs.power_log(self._job_dir), "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def once(self, kind: str, text: str, replica: int = -1) -> None:
        """As :meth:`event`, unless it was said before."""
        if text not in self._said:
            self._said.add(text)
            self.event(kind, text, replica)

    def notes(self, notes: Sequence[str], missing: Mapping[int, float]) -> None:
        """What the controller has to say of the state; told when it has held for two intervals, numbers aside.

        Args:
            notes: Its notes.
            missing: Replica -> by how many per cent its step takes longer.
        """
        now = {_without_numbers(note): note for note in notes}
        for kind, note in now.items():
            if kind in self._notes and kind not in self._told_notes:
                about = _ABOUT.match(note)
                replica = int(about[1]) if about else -1
                values = {"missing_percent": round(missing[replica], 1)} if replica in missing else {}
                self.event("headroom" if "headroom" in note else "note", note, replica, **values)
        self._told_notes = {kind for kind in now if kind in self._notes}
        self._notes = set(now)

    def limits(self, limits_w: Mapping[int, float], shares_w: Mapping[int, float], gpus: Mapping[int, int]) -> None:
        """The sums of the limits of the replicas, each interval.

        Args:
            limits_w: Replica -> watts now.
            shares_w: Replica -> watts of the same GPUs without a boost.
            gpus: Replica -> how many GPUs that is.
        """
        for replica, watts in limits_w.items():
            share = shares_w[replica]
            before, calm = self._moving.get(replica, (share, CALM))
            steady = abs(watts - before) <= CHANGE * share / 4
            self._moving[replica] = (before, calm + 1) if steady else (watts, 0)
            if steady and calm + 1 == CALM:
                self._tell(replica, watts, share, gpus[replica])
            elif not steady and replica not in self._told_w and watts > share:
                self._tell(replica, watts, share, gpus[replica])
        for replica in self._told_w.keys() - limits_w.keys():
            del self._told_w[replica]

    def forget(self) -> None:
        """Nothing is boosted any more."""
        self._told_w, self._moving, self._notes, self._told_notes = {}, {}, set(), set()

    def state(self, state: Mapping[str, Any]) -> None:
        """What holds at this moment, for loggers and who looks from outside."""
        with contextlib.suppress(OSError):
            jobs.write_whole(jobs.power_state(self._job_dir), json.dumps(state))

    def _tell(self, replica: int, watts: float, share: float, gpus: int) -> None:
        told = self._told_w.get(replica, share)
        if abs(watts - told) <= CHANGE * share:
            return
        name = f"replica {replica}"
        each, at_start = watts / gpus, share / gpus
        if watts > share + 0.5:
            self._told_w[replica] = watts
            self.event(
                "boost",
                f"{name}: {each:.0f} W per GPU on {gpus} GPUs, {each - at_start:+.0f} W over the limit at start",
                replica,
                limit_w=round(each, 1),
                start_w=round(at_start, 1),
            )
        else:
            self._told_w.pop(replica, None)
            self.event(
                "returned", f"{name}: {each:.0f} W per GPU again, as at the start", replica, limit_w=round(each, 1)
            )


def _without_numbers(note: str) -> str:
    return re.sub(r"\d+", "#", note)  # 9 and 10 are the same note
