"""Who works where, as the ranks have noted it in the job's directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ntp.launch import jobs


@dataclass(frozen=True)
class Work:
    """What there is to compute, as rank 0 has said it last.

    Args:
        training: Whether a fit is running.
        planned: Replica -> planned compute time over that at full degree.
        samples: Replica -> samples of a micro-batch.
        micro_batches: Of a step.
        tokens: Of a step; 0 if nobody has said it.
        degrees: Replica -> GPUs for which ``planned`` was said.
    """

    training: bool = False
    planned: Mapping[int, float] = field(default_factory=dict)
    samples: Mapping[int, int] = field(default_factory=dict)
    micro_batches: int = 1
    tokens: int = 0
    degrees: Mapping[int, int] = field(default_factory=dict)


class Places:
    """Reads the notes.

    Args:
        job_dir: The job's directory.
        slots: How many there are, spares included.
        gpus: UUIDs by slot, if the ranks shall not say theirs themselves.
    """

    def __init__(self, job_dir: Path, slots: int, gpus: tuple[str, ...]) -> None:
        self._job_dir, self._slots, self._given = job_dir, slots, bool(gpus)
        self.gpus: dict[int, str] = dict(enumerate(gpus))
        """Slot -> UUID, for those that are known."""
        self._homes: dict[int, int] = {}

    def homes(self, alive: set[int]) -> dict[int, int]:
        """Slot -> replica in which it has worked first; others have one of their own, below 0: spares, and who was lost
        before anybody looked, whose GPU draws all the same."""
        for replica, slots in self.replicas().items():
            for slot in slots:
                self._homes.setdefault(slot, replica)
        return {slot: self._homes.get(slot, -1 - slot) for slot in sorted({*self._homes, *alive, *self.gpus})}

    def look(self) -> None:
        """Take in what was noted since. The device of a slot does not change."""
        for slot in range(0 if self._given else self._slots):
            if slot not in self.gpus:
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    self.gpus[slot] = jobs.device_note(self._job_dir, slot).read_text(encoding="utf-8").strip()

    def replicas(self) -> dict[int, tuple[int, ...]]:
        """Replica -> slots that work in it; none if it is not known yet."""
        layout = _read(jobs.layout_note(self._job_dir)).get("replicas", [])
        return {number: tuple(sorted(replica.values())) for number, replica in enumerate(layout) if replica}

    def work(self) -> Work:
        """What rank 0 has said of it."""
        found = _read(jobs.work_note(self._job_dir))
        try:
            return Work(
                bool(found.get("training", False)),
                {int(replica): float(time) for replica, time in found.get("planned", {}).items()},
                {int(replica): int(count) for replica, count in found.get("samples", {}).items()},
                max(1, int(found.get("micro_batches", 1))),
                max(0, int(found.get("tokens", 0))),
                {int(replica): int(degree) for replica, degree in found.get("degrees", {}).items()},
            )
        except (TypeError, ValueError, AttributeError):
            return Work()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet
        return {}
    return found if isinstance(found, dict) else {}
