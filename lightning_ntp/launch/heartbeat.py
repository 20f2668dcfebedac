"""The supervisor's hand on the ranks' pulse: who hangs is made to leave its stacks, then killed, then declared dead."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Set
from datetime import timedelta
from pathlib import Path

from lightning_ntp.launch.deaths import Deaths
from lightning_ntp.launch.hangs import Hangs
from lightning_ntp.launch.progress import (
    DUMP_SIGNAL,
    ProgressReader,
    Sample,
    Tag,
    dump_path,
    progress_path,
    run_directory_path,
)

_DUMP_SECONDS = 1.0
"""For a process to write its stacks: milliseconds, unless the machine is very busy."""
_QUIET_SECONDS = 0.05
"""A dump that does not grow for so long is whole."""
_COPY_SECONDS = 10.0


class Heartbeat:
    """Watches the progress of all ranks.

    Args:
        job_dir: Where ranks show it.
        heartbeat: How long a rank may show none.
        deaths: Kills and declares.
        job: Unique, for dumps of a run whose directory is not known.
    """

    def __init__(self, job_dir: Path, heartbeat: timedelta, deaths: Deaths, job: str) -> None:
        self._job_dir, self._deaths, self._job = job_dir, deaths, job
        self._hangs = Hangs(heartbeat.total_seconds())
        self._limit = heartbeat.total_seconds()
        self._stopped_newcomers: dict[int, float] = {}
        self._readers: dict[int, ProgressReader] = {}
        self._copies: list[threading.Thread] = []

    def look(self) -> str:
        """Look once; kill who hangs. Returns why nobody can go on, if so: then the job must end."""
        now, stopped = time.monotonic(), self._deaths.stopped()
        members = self._read(self._deaths.watched)
        # nobody needs a newcomer before it takes part
        arriving = self._read(self._deaths.arriving)
        newcomers = {slot: sample for slot, sample in arriving.items() if sample.tag is not Tag.SETUP}
        samples = {**members, **newcomers}
        verdict = self._hangs.look(now, samples, stopped, newcomers.keys())
        self._end_stopped_newcomers(now, stopped)
        for slot, why in verdict.blamed.items():
            stack = self._keep_stacks(slot, samples[slot], slot in stopped)
            self._deaths.kill(slot, f"{why} ({stack})")
        if not verdict.deadlock:
            return ""
        stacks = [f"slot {slot}: {self._keep_stacks(slot, samples[slot], False)}" for slot in sorted(samples)]
        return f"{verdict.deadlock} ({'; '.join(stacks)})"

    def _read(self, slots: Iterable[int]) -> dict[int, Sample]:
        """What they show, of those that show something."""
        samples = {}
        for slot in slots:
            sample = self._readers.setdefault(slot, ProgressReader(self._job_dir, slot)).read()
            if sample is not None:
                samples[slot] = sample
        return samples

    def _end_stopped_newcomers(self, now: float, stopped: Set[int]) -> None:
        """The next one may come: nobody waits for them, so they would stay for ever."""
        if {*self._deaths.watched} <= stopped:  # the job is paused
            self._stopped_newcomers.clear()
            return
        since = {slot: self._stopped_newcomers.get(slot, now) for slot in self._deaths.arriving if slot in stopped}
        self._stopped_newcomers = since
        for slot, when in since.items():
            if now - when >= self._limit:
                self._deaths.kill(slot, f"hung: its process is stopped (SIGSTOP) since {now - when:.1f} s")

    def forget(self, slot: int) -> None:
        """The process in a slot has ended, and another one will show its own progress."""
        reader = self._readers.pop(slot, None)
        if reader is not None:
            reader.close()
        progress_path(self._job_dir, slot).unlink(missing_ok=True)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        for copy in self._copies:
            copy.join(_COPY_SECONDS)

    def _keep_stacks(self, slot: int, sample: Sample, stopped: bool) -> str:
        """Have a rank write its stacks, and keep them in the directory of its run. Returns where, or why not."""
        if stopped:
            return "no stack: a stopped process cannot write it"
        pid = self._deaths.pid(slot)
        if not sample.dumps or DUMP_SIGNAL is None or pid is None:
            return "no stack: it cannot write one"
        source = dump_path(self._job_dir, slot)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, DUMP_SIGNAL)
        if not _wait_until_written(source):
            return f"no stack: it did not write one within {_DUMP_SECONDS:g} s"
        target = self._directory(slot) / f"hang-slot{slot}-{time.strftime('%H%M%S')}.txt"
        # in a thread: a rank may hang because the file system of its run does
        copy = threading.Thread(target=_copy, args=(source.read_bytes(), target), name="ntp-stacks", daemon=True)
        copy.start()
        self._copies.append(copy)
        return f"stack: {target}"

    def _directory(self, slot: int) -> Path:
        for each in (slot, *sorted(self._readers)):
            with contextlib.suppress(OSError):
                return Path(run_directory_path(self._job_dir, each).read_text(encoding="utf-8"))
        return Path(tempfile.gettempdir()) / f"lightning_ntp-{self._job}-stacks"


def _wait_until_written(path: Path) -> bool:
    deadline = time.monotonic() + _DUMP_SECONDS
    size, since = 0, time.monotonic()
    while (now := time.monotonic()) < deadline:
        with contextlib.suppress(OSError):
            if path.stat().st_size != size:
                size, since = path.stat().st_size, now
        if size and now - since >= _QUIET_SECONDS:
            break
        time.sleep(0.005)
    return size > 0


def _copy(content: bytes, target: Path) -> None:
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
