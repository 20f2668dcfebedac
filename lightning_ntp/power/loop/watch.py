"""The power loop in the launching process, where nothing that befalls a rank can stop it.

Every interval: read the driver, measure paces, ask the :class:`~lightning_ntp.power.control.Controller`, write what it
says, and tell rank 0 how slow replicas are, which moves samples for what power cannot make up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from lightning_ntp.health.findings import WatchedJob
from lightning_ntp.health.listening import Listener
from lightning_ntp.launch.console import say
from lightning_ntp.nvml.source import NvmlSource
from lightning_ntp.power.loop.job import PowerJob
from lightning_ntp.power.loop.places import Places
from lightning_ntp.power.loop.settings import PowerSettings
from lightning_ntp.power.loop.start import check_bounds

_CLOSE_SECONDS = 12.0
"""For messages to the helper that are under way, and for it to put everything back."""
_LONGEST_HOLD = 10.0
"""Seconds for which a new rank is held back because its GPU's power is lent."""
_LOOK_SECONDS = 0.05
"""Between two looks whether it is back."""
_LONGEST_DUE = 120.0
"""Seconds after which a slot that was to be started, and was not, lends again."""


class PowerWatch:
    """Implements :class:`~lightning_ntp.launch.device_watch.DeviceWatch`.

    Args:
        settings: See there.
    """

    def __init__(self, settings: PowerSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._live: set[int] = set()
        self._due: dict[int, float] = {}
        """Slots that are to be started, and since when; their GPUs count as working from now on."""
        self._over, self._awake = threading.Event(), threading.Event()
        self._slots = 0
        self._job: PowerJob | None = None
        self._source: NvmlSource | None = None
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None

    # ---- for the supervisor -----------------------------------------------------------------------------------

    def check(self, slots: int) -> None:
        self._slots = slots
        if self._settings.gpus and len(self._settings.gpus) != slots:
            raise ValueError(
                f"gpus={list(self._settings.gpus)!r} names {len(self._settings.gpus)} devices, but the job has {slots}"
                " slots, spares included: one UUID each, or none, so that the ranks say theirs themselves"
            )
        check_bounds(self._settings, slots)

    def begin(self, job_dir: Path) -> None:
        places = Places(job_dir, self._slots, self._settings.gpus)
        # two looks per interval: a reading is to be of after the last write
        source = self._source = NvmlSource(self._settings.interval / 2, off_means="power of GPUs is not known")
        watched = WatchedJob(job_dir, lambda: dict(places.gpus), self._alive, self._over.is_set)
        self._job = PowerJob(self._settings, job_dir, places, self._alive, lambda: source.readings)
        self._listener = Listener(source, watched, self._settings.interval, lambda: None)
        self._thread = threading.Thread(target=self._run, name="ntp-power-loop", daemon=True)
        self._thread.start()

    def started(self, slot: int) -> None:
        with self._lock:
            self._live.add(slot)
            self._due.pop(slot, None)
        if self._job is not None:
            self._job.started(slot)

    def ended(self, slot: int) -> None:
        with self._lock:
            self._live.discard(slot)
        self._awake.set()

    def condemned(self) -> Mapping[int, str]:
        return {}

    def failed(self) -> str:
        return self._job.fatal if self._job is not None else ""

    def leaving(self) -> Mapping[int, str]:
        return {}

    def sent_away(self, slot: int) -> bool:
        return False

    def unfit(self, slot: int) -> str:
        """What its GPU has lent must be back before it works again. That is waited for: whoever asks does so in a
        thread of its own, and would ask again only after the backoff of restarts."""
        if self._job is None or not self._job.lends(slot):
            return ""
        ends = time.monotonic() + _LONGEST_HOLD
        self._expect(slot)
        while not self._over.wait(_LOOK_SECONDS):
            if not self._job.lends(slot):
                return ""
            if time.monotonic() > ends:
                say(f"power: slot {slot} starts although what its GPU has lent is not back: {self._job.why_held(slot)}")
                return ""
        return "the job ends"

    def pardon(self, slot: int) -> None:
        self._expect(slot)  # a person is not kept waiting

    def _expect(self, slot: int) -> None:
        """The slot is about to start: its GPU counts as working from now on."""
        with self._lock:
            self._due.setdefault(slot, time.monotonic())
        self._awake.set()

    def close(self) -> None:
        self._over.set()
        self._awake.set()
        deadline = time.monotonic() + _CLOSE_SECONDS
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        if self._job is not None:
            self._job.close()
        if self._listener is not None:
            self._listener.close(max(0.0, min(2.0, deadline - time.monotonic())))

    # ---- the thread -------------------------------------------------------------------------------------------

    def _alive(self) -> set[int]:
        """Slots that work, or are about to."""
        with self._lock:
            late = [slot for slot, since in self._due.items() if time.monotonic() - since > _LONGEST_DUE]
            for slot in late:  # somebody else has forbidden it since
                del self._due[slot]
            return {*self._live, *self._due}

    def _run(self) -> None:
        job, listener, told = self._job, self._listener, ""
        assert job is not None and listener is not None
        while not self._over.is_set():
            listener.take()  # readings are what is wanted here; findings that nobody takes would pile up
            try:
                job.look(lambda: not self._over.is_set())
                told = ""
            except Exception as error:  # training goes on, and so does the loop
                what = f"{type(error).__name__}: {error}"
                if what != told and not self._over.is_set():
                    say(f"power: {what}; it is tried again")
                told = what
                with contextlib.suppress(Exception):
                    job.give_back()
            self._awake.wait(self._settings.interval)
            self._awake.clear()
