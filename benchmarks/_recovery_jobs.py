"""Jobs that lose ranks, under lightning_ntp and under torchrun, and how long each loss has held them up."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _recovery_marks import Mark, marked_pids, read_marks

from lightning_ntp.engine.events import FILE_NAME, read_events

HERE = Path(__file__).resolve().parent
RANKS = 8
ALONE = 5
"""Undisturbed steps after the last kill."""
Kill = tuple[int, int]
"""(slot, step, counted from 0)"""
PHASES = ("detect", "agree", "rebuild", "reshard", "rest", "replay")


@dataclass(frozen=True)
class Loss:
    """What a loss has cost under lightning_ntp, from the kill until every survivor had finished the step. Seconds.

    Args:
        slot: Who was killed.
        before, after: The degrees.
        phases: Of the survivor that finished last; they add up to the whole. ``rest``: unwinding the step, putting its
            start back, and what follows the change (gradient buckets, rank zero). ``replay``: from there to the end of
            the step's update.
        announced: Until the supervisor had told the survivors; a part of ``detect``.
        step: An undisturbed step in the new layout, median.
        moved: Bytes of parameters and optimizer state over the wire.
    """

    slot: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    phases: dict[str, float]
    announced: float
    step: float
    moved: int

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    @property
    def beyond(self) -> float:
        """The time beyond that of the step itself."""
        return self.total - self.step


@dataclass(frozen=True)
class Restart:
    """What a loss has cost under torchrun, until every worker was beyond the point where the job had been. Seconds.

    Args:
        slot: Who was killed.
        total: From the kill until the step in which it happened was finished.
        gone: Until the first new process ran the script.
        training: Until the last process was about to train.
        redone: Steps from the checkpoint on that were finished before and were done again.
        complete: False if time was up before; what was not reached by then counts as reached then.
    """

    slot: int
    total: float
    gone: float
    training: float
    redone: int
    complete: bool


def run_ntp(kills: Sequence[Kill], limit: float) -> list[Loss]:
    """One job at degrees (4, 4) with successive kills. After ``limit`` seconds it is ended, wherever it is.

    Raises:
        RuntimeError: If it fails.
    """
    steps = max(step for _, step in kills) + 1 + ALONE
    script = [sys.executable, str(HERE / "_recovery_ntp.py")]
    with tempfile.TemporaryDirectory(prefix="recovery-ntp-") as name:
        directory = Path(name)
        run_job([*script, name, str(steps), *_as_arguments(kills)], directory, limit)
        return list(_losses(read_marks(directory), kills))


def run_copies(kills: Sequence[Kill], limit: float) -> list[dict[str, Any]]:
    """One job of a single replica of 4 whose ranks keep copies of each other's shards, with successive kills.

    Returns:
        Its events.

    Raises:
        RuntimeError: If it fails.
    """
    steps = max(step for _, step in kills) + 1 + ALONE
    script = [sys.executable, str(HERE / "_recovery_ntp.py")]
    with tempfile.TemporaryDirectory(prefix="recovery-copies-") as name:
        run_job([*script, name, str(steps), *_as_arguments(kills), "--copies"], Path(name), limit)
        return list(read_events(Path(name) / FILE_NAME))


def run_torchrun(kills: Sequence[Kill], every: int, limit: float) -> list[Restart]:
    """One job of 8 workers that is restarted by torchrun after each kill, with a checkpoint every ``every`` steps.

    After ``limit`` seconds it is ended, wherever it is.

    Raises:
        RuntimeError: If it fails.
    """
    steps = max(step for _, step in kills) + 2
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "3"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(HERE / "_recovery_torchrun.py")]
    with tempfile.TemporaryDirectory(prefix="recovery-torchrun-") as name:
        directory = Path(name)
        run_job([*launcher, name, str(steps), str(every), *_as_arguments(kills)], directory, limit)
        return list(_restarts(read_marks(directory), kills, time.monotonic()))


def _as_arguments(kills: Sequence[Kill]) -> list[str]:
    return [f"{slot}:{step}" for slot, step in kills]


def run_job(command: list[str], directory: Path, limit: float) -> None:
    # without the first variable torchrun's restart never gets over its own store's port, on gloo
    environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with open(directory / "output.txt", "wb") as output, _ended(directory, command, environ, output) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return
    if code != 0:
        told = (directory / "output.txt").read_text(errors="replace")[-4000:]
        raise RuntimeError(f"{' '.join(command)}: exit code {code}\n{told}")


@contextmanager
def _ended(
    directory: Path, command: list[str], environ: dict[str, str], output: object
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, and an end by its pid to it and to all ranks that have written marks."""
    process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in marked_pids(directory):
            # not another process that has got the number meanwhile
            with suppress(OSError):
                if os.fsencode(directory) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def _losses(marks: list[Mark], kills: Sequence[Kill]) -> Iterator[Loss]:
    for slot, step in kills:
        # the steps behind it, until the next kill
        until = min((s for _, s in kills if s > step), default=1 << 30)
        steps = [m for m in marks if m["kind"] == "step"]
        if not any(m["step"] == min(until - 1, step + ALONE) for m in steps):
            return  # the job was cut off before
        killed = _one(marks, "kill", slot=slot)
        last = [m for m in steps if m["step"] == step][-1]
        change = _one(marks, "change", slot=last["slot"], step=step)
        seconds = change["seconds"]
        known = {phase: float(seconds.get(phase, 0.0)) for phase in ("agree", "rebuild", "reshard")}
        rest = change["at"] - change["interrupted"] - sum(known.values())
        phases = {
            "detect": change["interrupted"] - killed["at"],
            **known,
            "rest": rest,
            "replay": last["at"] - change["at"],
        }
        ends = [m["at"] for m in steps if m["slot"] == last["slot"] and step <= m["step"] < until]
        alone = statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False))
        before, after = (tuple(degrees) for degrees in change["degrees"])
        announced = change["announced"] - killed["at"]
        yield Loss(slot, before, after, phases, announced, alone, change["bytes"])


def _restarts(marks: list[Mark], kills: Sequence[Kill], ended: float) -> Iterator[Restart]:
    for life, (slot, step) in enumerate(kills):
        killed = [m for m in marks if m["kind"] == "kill" and m["step"] == step]
        if not killed:
            return  # the job was cut off before
        again = [m for m in marks if m.get("life") == life + 1]
        started = [m for m in again if m["kind"] == "start"]
        training = [m for m in again if m["kind"] == "train"]
        finished = [m["at"] for m in again if m["kind"] == "step" and m["step"] == step]
        complete = len(finished) == RANKS
        at = killed[0]["at"]
        yield Restart(
            slot,
            total=(max(finished) if complete else ended) - at,
            gone=(started[0]["at"] if started else ended) - at,
            training=(training[-1]["at"] if len(training) == RANKS else ended) - at,
            redone=step - training[0]["step"] if training else 0,
            complete=complete,
        )


def _one(marks: list[Mark], kind: str, **fields: int) -> Mark:
    found = [m for m in marks if m["kind"] == kind and all(m[key] == value for key, value in fields.items())]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} marks of kind {kind!r} with {fields} instead of one")
    return found[0]
