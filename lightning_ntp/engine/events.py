"""What happened to a job, for people and for programs: one log line per change, one JSON object per event.

The schema of ``events.jsonl`` is in ``docs/events.md``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ntp.launch.events_file import FILE_NAME, read_events
from lightning_ntp.plan.policy import name_slots, show_degrees

if TYPE_CHECKING:
    from lightning_ntp.engine.recovery import Change

__all__ = ["FILE_NAME", "PHASES", "EventLog", "describe", "read_events"]

log = logging.getLogger("lightning_ntp")

PHASES = {
    "detect": "detection",
    "agree": "agreement",
    "rebuild": "rebuild",
    "reshard": "reshard",
    "forward": "forward",
    "replay": "replay",
}
"""Keys of ``Change.seconds`` -> events, in the order in which they happen."""


class EventLog:
    """Appends to a run's ``events.jsonl``.

    All ranks may call it alike; only the one that ``writes`` at that moment does, so that a rank which becomes rank 0
    goes on in the same file. No file stays open: events are rare, and a rank may die or be forked at any moment. A line
    is appended by one system call (``O_APPEND``): a killed rank leaves all of it or nothing. If it cannot be written, a
    warning says so once, and training goes on.

    Args:
        path: The file; its directory is made when the first event is written.
        slot: The slot of this rank.
        writes: Whether this rank is the one that writes, asked at every event.
    """

    def __init__(self, path: str | os.PathLike[str], slot: int, writes: Callable[[], bool]) -> None:
        self.path = Path(path)
        self._slot, self._writes = slot, writes
        self._told = False
        """That the file cannot be written."""

    def write(self, event: str, *, step: int | None = None, monotonic: float | None = None, **details: Any) -> None:
        """Append one event.

        Args:
            event: Its kind, see ``docs/events.md``.
            step: Optimizer steps committed when it happened.
            monotonic: ``time.monotonic()`` when it happened, if that was not now.
            details: More fields. ``slot`` says whom it is about; it is this rank's by default.

        Raises:
            ValueError: If ``details`` repeat a field that every event has.
        """
        if not self._writes():
            return
        now = time.monotonic()
        when = now if monotonic is None else monotonic
        fixed = {
            "time": datetime.fromtimestamp(time.time() - (now - when), timezone.utc).isoformat(timespec="microseconds"),
            "monotonic": round(when, 6),
            "event": event,
            "slot": details.pop("slot", self._slot),
            "step": step,
        }
        if taken := fixed.keys() & details.keys():
            raise ValueError(f"event {event!r}: the fields {sorted(taken)} are set for every event")
        line = json.dumps({**fixed, **_plain(details)}, allow_nan=False) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning(
                    "%s cannot be written: %s; training goes on, its events are lost", self.path, error.strerror
                )

    def write_change(self, change: Change) -> None:
        """Append the events of a membership change that is complete: who went and came, phases and the change itself.

        Phases are taken to have followed each other without a gap, the last one ending now; ``monotonic`` is their end.
        """
        ended, step = time.monotonic(), change.step + change.gone_back
        phases = [(name, change.seconds[key]) for key, name in PHASES.items() if key in change.seconds]
        at = ended - sum(seconds for _, seconds in phases)
        for slot in change.lost:
            gone = {"reason": change.left} if change.left else {}
            self.write("leave" if change.left else "death", slot=slot, step=step, monotonic=at, **gone)
        for slot in change.joined:
            self.write("join", slot=slot, step=step, monotonic=at)
        for name, seconds in phases:
            at += seconds
            details: dict[str, Any] = {"seconds": round(seconds, 6)}
            if name == "reshard":
                details |= {"bytes": change.moved_bytes, "sources": list(change.sources)}
            self.write(name, step=step, monotonic=at, **details)
        self.write(
            "change",
            step=step,
            monotonic=ended,
            lost=list(change.lost),
            joined=list(change.joined),
            degrees_before=list(change.before.degrees),
            degrees_after=list(change.after.degrees),
            world_size=change.after.world_size,
            bytes=change.moved_bytes,
            sources=list(change.sources),
            seconds={key: round(seconds, 6) for key, seconds in _in_order(change.seconds).items()},
            gone_back=change.gone_back,
        )

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line  # the disk was full, or the file was copied while it was written
            while line:
                line = line[os.write(file, line) :]
        finally:
            os.close(file)


def _in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    """The phases of a change in the order in which they happened."""
    known = {key: seconds[key] for key in PHASES if key in seconds}
    return known | dict(seconds)


def describe(change: Change, goes_on: str = "") -> str:
    """A change in one line: what died, the new degrees, what moved from where, how long each phase took.

    Args:
        change: The change.
        goes_on: What is under way, if not a training step.
    """
    parts = []
    if change.left:
        parts.append(f"{name_slots(change.lost)} left ({change.left})")
    elif change.lost:
        parts.append(f"{name_slots(change.lost)} lost")
    if change.joined:
        parts.append(f"{name_slots(change.joined)} joined")
    head = " and ".join(parts) or ("slots are at their places" if change.planned else "all members live, new groups")
    degrees = f"degrees {show_degrees(change.before)} -> {show_degrees(change.after)}"
    if change.before.degrees == change.after.degrees:
        degrees = f"degrees {show_degrees(change.after)} as before"
    moved = "nothing moved"
    if change.moved_bytes:
        moved = f"{_size(change.moved_bytes)} moved from {name_slots(change.sources)}"
    ranks = change.after.world_size
    lines = [f"{head}: {degrees}, {ranks} rank{'s' if ranks != 1 else ''}", moved]
    if change.seconds:
        total = sum(change.seconds.values())
        phases = ", ".join(f"{key} {_milliseconds(seconds)}" for key, seconds in _in_order(change.seconds).items())
        lines.append(f"{_milliseconds(total)} ({phases})" if len(change.seconds) > 1 else phases)
    first = change.after.slots[0]
    if first != change.before.slots[0]:
        lines.append(f"slot {first} is rank 0 now")
    if change.gone_back:
        steps = f"{change.gone_back} step{'s' if change.gone_back != 1 else ''}"
        lines.append(f"no replica holds all of it: back to the neighbours' copies, {steps} to do again")
    # `step` counts committed steps, so the one that goes on has that number counted from 0
    step = f"step {change.step + change.gone_back}"
    lines.append(f"no step was done again: {step}" if change.planned else f"{goes_on or step} goes on")
    return "; ".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null, other objects their text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return str(value)
