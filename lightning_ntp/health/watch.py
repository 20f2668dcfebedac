"""The health of a job's devices, watched from the launching process: sources are heard, judged, and acted upon.

What becomes of a verdict: a line on stderr and in the job's ``health.jsonl``, which the ranks carry into the run's
events and loggers; ``drain`` leaves a note for the rank, which leaves as planned, or answers why it cannot; ``restart``
and ``dead`` have the supervisor end the rank.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_ntp.health.conditions import one_line
from lightning_ntp.health.findings import Action, Finding, HealthSource, WatchedJob
from lightning_ntp.health.listening import Listener
from lightning_ntp.health.rules import SeverityTable
from lightning_ntp.health.verdicts import Limits, Verdict, Verdicts
from lightning_ntp.launch import jobs
from lightning_ntp.launch.console import say

_TICK = 0.1
"""Seconds between looks at what is due, if nothing is found."""
_STATE_SECONDS = 1.0
"""Between two states of all slots for who looks from outside."""
_BATCH_SECONDS = 0.02
"""Findings that come together are judged together: all devices at once fail for another reason than one."""
_CLOSE_SECONDS = 2.0
_CONSEQUENCE = {
    Action.SUSPECT: "suspect, it goes on",
    Action.RESTART: "its rank ends, and may be started again on the same device",
    Action.DRAIN: "it leaves in one of the next steps",
    Action.DEAD: "its rank is ended now",
}


@runtime_checkable
class _AsksDevices(Protocol):
    """A source that has them all at hand. Users' sources may have attributes of such names for themselves."""

    @property
    def readings(self) -> Mapping[str, Any]:
        """By UUID; each with its ``values``."""

    def check(self, gpus: Sequence[str]) -> None:
        """Whether they are there."""

    def find(self, uuids: Sequence[str]) -> list[str]:
        """Those that are not."""


class HealthWatch:
    """Implements :class:`~lightning_ntp.launch.device_watch.DeviceWatch`.

    Args:
        sources: Who finds something out.
        table: How bad it is.
        limits: See there.
        gpus: UUIDs of the devices by slot, if the ranks shall not say theirs themselves.
        interval: Seconds between two calls of a source.
    """

    def __init__(
        self,
        sources: Sequence[HealthSource],
        table: SeverityTable,
        limits: Limits | None = None,
        gpus: Sequence[str] = (),
        interval: float = 1.0,
    ) -> None:
        self._sources, self._gpus, self._interval = list(sources), tuple(gpus), interval
        self._verdicts = Verdicts(table, limits)
        self._lock = threading.RLock()
        """Of the verdicts, which the supervisor asks too."""
        self._heard = threading.Event()
        self._over = threading.Event()
        self._condemned: dict[int, str] = {}
        self._notes: dict[int, str] = {}
        """To be left for ranks that shall leave."""
        self._leaving: dict[int, str] = {}
        """Who was told to leave, until it has left or need not any more."""
        self._live: set[int] = set()
        self._staying: set[int] = set()
        """Slots that were told to leave, and have said why they cannot."""
        self._slots = 0
        self._devices: dict[int, str] = {}
        self._values: dict[int, dict[str, float]] = {}
        self._listeners: list[Listener] = []
        self._directory = Path()
        self._thread: threading.Thread | None = None
        self._next_state = 0.0

    # ---- for the supervisor -----------------------------------------------------------------------------------

    def check(self, slots: int) -> None:
        self._slots = slots
        if self._gpus and len(self._gpus) != slots:
            raise ValueError(
                f"gpus={list(self._gpus)!r} names {len(self._gpus)} devices, but the job has {slots} slots, spares"
                " included: one UUID each, or none, so that the ranks say theirs themselves"
            )
        self._devices = dict(enumerate(self._gpus))
        for source in self._sources:
            if isinstance(source, _AsksDevices):
                source.check(sorted(set(self._gpus)))

    def begin(self, job_dir: Path) -> None:
        self._directory = job_dir
        self._verdicts.place(self._devices)
        job = WatchedJob(
            job_dir, lambda: dict(self._devices), lambda: sorted(self._live), self._over.is_set, self._replicas
        )
        self._listeners = [Listener(source, job, self._interval, self._heard.set) for source in self._sources]
        self._thread = threading.Thread(target=self._run, name="ntp-health", daemon=True)
        self._thread.start()

    def started(self, slot: int) -> None:
        for note in (jobs.unwell_note, jobs.stays_note):
            note(self._directory, slot).unlink(missing_ok=True)
        with self._lock:
            self._live.add(slot)
            self._leaving.pop(slot, None)
            self._verdicts.started(slot)

    def ended(self, slot: int) -> None:
        with self._lock:
            self._live.discard(slot)
            self._leaving.pop(slot, None)
            self._verdicts.ended(slot)
        if not self._gpus:
            jobs.device_note(self._directory, slot).unlink(missing_ok=True)

    def condemned(self) -> Mapping[int, str]:
        if not self._condemned:  # asked all the time
            return {}
        with self._lock:
            condemned, self._condemned = self._condemned, {}
        return condemned

    def failed(self) -> str:
        return ""

    def leaving(self) -> Mapping[int, str]:
        if not self._leaving:  # asked all the time
            return {}
        with self._lock:
            return dict(self._leaving)

    def sent_away(self, slot: int) -> bool:
        with self._lock:
            return self._verdicts.sent_away(slot)

    def unfit(self, slot: int) -> str:
        with self._lock:
            return self._verdicts.unfit(slot, time.monotonic())

    def pardon(self, slot: int) -> None:
        with self._lock:
            self._verdicts.pardon(slot)

    def close(self) -> None:
        self._over.set()
        self._heard.set()
        deadline = time.monotonic() + _CLOSE_SECONDS
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        for listener in self._listeners:
            listener.close(max(0.0, deadline - time.monotonic()))

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.is_set():
            if self._heard.wait(_TICK):
                self._heard.clear()
                self._over.wait(_BATCH_SECONDS)
            with contextlib.suppress(OSError):  # the job's directory is gone, or full
                self._look()

    def _look(self) -> None:
        now = time.monotonic()
        found = [finding for listener in self._listeners for finding in listener.take()]
        self._follow_devices()
        with self._lock:
            verdicts = self._verdicts.judge(found, now)
        for finding in found:
            self._take_values(finding)
        for verdict in verdicts:
            self._act(verdict, now)
        self._leave_notes()
        self._hear_answers()
        self._withdraw(now)
        if now >= self._next_state or verdicts:
            self._next_state = now + _STATE_SECONDS
            jobs.write_whole(jobs.health_state(self._directory), json.dumps(self._state()))

    def _replicas(self) -> dict[int, int]:
        """As rank 0 has said it last."""
        try:
            layout = json.loads(jobs.layout_note(self._directory).read_text(encoding="utf-8"))["replicas"]
        except (OSError, ValueError):  # it has not yet
            return {}
        return {
            slot: number for number, replica in enumerate(layout) for slot in replica.values() if slot in self._live
        }

    def _follow_devices(self) -> None:
        if self._gpus:
            return
        changed = False
        for slot in range(self._slots):
            if slot in self._devices:
                continue  # a slot's device does not change: it goes by the slot
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self._devices[slot] = jobs.device_note(self._directory, slot).read_text(encoding="utf-8").strip()
                changed = True
        if changed:
            with self._lock:
                self._verdicts.place(self._devices)

    def _take_values(self, finding: Finding) -> None:
        for slot in range(self._slots):
            if finding.values and (slot == finding.slot or self._devices.get(slot, "-") == finding.gpu):
                self._values.setdefault(slot, {}).update(finding.values)

    def _act(self, verdict: Verdict, now: float) -> None:
        consequence = _CONSEQUENCE.get(verdict.action, "")
        # a line of its own for every verdict, but the one who is told to leave need not be told twice
        say(f"health: {verdict.text}{'; ' if consequence else ''}{consequence}")
        if verdict.action is Action.DRAIN:
            self._notes[verdict.slot] = _reason(verdict)
            with self._lock:
                if verdict.slot in self._live:
                    self._leaving[verdict.slot] = _reason(verdict)
        elif verdict.action in (Action.RESTART, Action.DEAD):
            with self._lock:
                self._condemned[verdict.slot] = _reason(verdict)
        self._record(verdict.slot, str(verdict.action), verdict.text, now, verdict.finding)

    def _leave_notes(self) -> None:
        """Tell ranks to leave; again at the next look if the disk is full."""
        for slot, reason in list(self._notes.items()):
            if slot in self._live:
                jobs.write_whole(jobs.unwell_note(self._directory, slot), reason)
            del self._notes[slot]

    def _hear_answers(self) -> None:
        """Ranks that cannot leave say why. The note stays, and they try again themselves."""
        for slot in sorted(self._live):
            note = jobs.stays_note(self._directory, slot)
            try:
                why = note.read_text(encoding="utf-8")
                note.unlink()
            except OSError:
                continue
            with self._lock:
                self._verdicts.stays(slot)
            self._staying.add(slot)
            text = f"slot {slot} stays: {why}"
            say(f"health: {text}")
            self._record(slot, "stays", text, time.monotonic())

    def _withdraw(self, now: float) -> None:
        """Who could not leave need not any more, if its device has been quiet for long enough meanwhile."""
        for slot in sorted(self._staying):
            with self._lock:
                calm = self._verdicts.reconsider(slot, now)
            if calm or slot not in self._live:
                self._staying.discard(slot)
                with self._lock:
                    self._leaving.pop(slot, None)
                jobs.unwell_note(self._directory, slot).unlink(missing_ok=True)

    def _record(self, slot: int, action: str, text: str, now: float, finding: Finding | None = None) -> None:
        entry: dict[str, Any] = {"monotonic": round(now, 6), "slot": slot, "action": action, "text": text}
        if finding is not None:
            gpu = finding.gpu or self._devices.get(finding.slot, "")
            entry |= {"signal": finding.signal, "code": finding.code, "gpu": gpu, "values": dict(finding.values)}
        # what cannot be written was said; a disk that is full keeps nobody from acting
        with contextlib.suppress(OSError), open(jobs.health_log(self._directory), "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _state(self) -> dict[str, Any]:
        asked = [source.readings for source in self._sources if isinstance(source, _AsksDevices)]
        answered = {gpu for readings in asked for gpu in readings}
        for readings in asked:
            for gpu, reading in readings.items():
                for slot in (slot for slot, device in self._devices.items() if device == gpu):
                    self._values[slot] = dict(reading.values)
        with self._lock:
            return {
                str(slot): {
                    "gpu": self._devices.get(slot, ""),
                    "live": slot in self._live,
                    "seen": not asked or self._devices.get(slot, "") in answered,
                    "worst": str(self._verdicts.worst(slot)),
                    "wrong": self._wrong(slot),
                    "values": self._values.get(slot, {}),
                }
                for slot in range(self._slots)
            }

    def _wrong(self, slot: int) -> list[str]:
        wrong = self._verdicts.standing(slot)
        if not wrong and slot not in self._live and self._verdicts.sent_away(slot):
            wrong = [why] if (why := self._verdicts.unfit(slot, time.monotonic())) else []
        return wrong


def _reason(verdict: Verdict) -> str:
    return one_line(f"{verdict.name}: {verdict.finding.text}")
