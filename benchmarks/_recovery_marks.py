"""What the ranks of a recovery benchmark write down: one JSON object per line, each process into a file of its own.

All times are ``time.monotonic()``: the ranks are on one machine, where it is one clock for all processes. Imports
nothing heavy, so that a process which starts anew after a failure does not wait for the benchmark.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Mark = dict[str, Any]


class Marks:
    """Writes the marks of this process.

    Args:
        directory: Of the job.
        slot: Of this rank.
    """

    def __init__(self, directory: Path, slot: int) -> None:
        self._slot = slot
        path = directory / f"marks-{slot}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, kind: str, **details: Any) -> None:
        mark = {"kind": kind, "slot": self._slot, "at": time.monotonic(), **details}
        os.write(self._file, json.dumps(mark).encode() + b"\n")

    def die(self, step: int) -> None:
        """Kill this process as any other process would: by SIGKILL, which it cannot see coming."""
        self.write("kill", step=step)
        os.kill(os.getpid(), signal.SIGKILL)


def read_marks(directory: Path) -> list[Mark]:
    """All marks of a job, in order of time."""
    return sorted(_read(directory), key=lambda mark: float(mark["at"]))


def marked_pids(directory: Path) -> list[int]:
    """The processes that have ever written marks for a job."""
    return sorted({int(path.stem.rpartition("-")[2]) for path in directory.glob("marks-*.jsonl")})


def _read(directory: Path) -> Iterator[Mark]:
    for path in directory.glob("marks-*.jsonl"):
        for line in path.read_text().splitlines():
            yield json.loads(line)
