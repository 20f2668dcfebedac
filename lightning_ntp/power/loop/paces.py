"""How long replicas compute per micro-batch, from what their ranks show of their progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lightning_ntp.launch.progress import ProgressReader, Sample

LEAST = 2
"""So many micro-batches of every rank are one measurement."""


class PaceMeter:
    """Measures from one look to the next.

    Args:
        job_dir: Where ranks show their progress.
        read: Gives what a slot shows; None if nothing.
    """

    def __init__(self, job_dir: Path, read: Callable[[int], Sample | None] | None = None) -> None:
        self._job_dir, self._read = job_dir, read or self._from_file
        self._readers: dict[int, ProgressReader] = {}
        self._before: dict[int, tuple[int, int]] = {}
        self._counted: dict[int, int] = {}

    def measure(self, replicas: Mapping[int, Iterable[int]]) -> dict[int, float]:
        """Seconds per micro-batch of every replica since the last measurement: those of its slowest rank.

        Args:
            replicas: Replica -> its live slots.

        Returns:
            Nothing as long as some rank has too few micro-batches; then the measurement goes on.
        """
        now = {slot: _shown(self._read(slot)) for slots in replicas.values() for slot in slots}
        if any(slot not in self._before or _began_anew(self._before[slot], shown) for slot, shown in now.items()):
            self._before = now
            return {}
        if not now or any(shown[1] - self._before[slot][1] < LEAST for slot, shown in now.items()):
            return {}
        before, self._before = self._before, now

        def seconds(slot: int) -> float:
            return (now[slot][0] - before[slot][0]) / (now[slot][1] - before[slot][1]) / 1e9

        return {replica: max(map(seconds, slots)) for replica, slots in replicas.items() if slots}

    def begin_anew(self) -> None:
        """What was measured so far is of another state: a limit has changed, or who works where."""
        self._before = {}

    def micro_batches(self, slots: Iterable[int]) -> int:
        """How many were computed since the last call, as far as one of these slots shows it."""
        now = {slot: _shown(self._read(slot))[1] for slot in slots}
        counted, self._counted = self._counted, now
        return max(
            (count - counted[slot] for slot, count in now.items() if count >= counted.get(slot, count + 1)), default=0
        )

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def forget(self, slot: int) -> None:
        """Its rank has ended: the next one shows its progress in another file."""
        reader = self._readers.pop(slot, None)
        if reader is not None:
            reader.close()

    def _from_file(self, slot: int) -> Sample | None:
        return self._readers.setdefault(slot, ProgressReader(self._job_dir, slot)).read()


def _shown(sample: Sample | None) -> tuple[int, int]:
    return (0, 0) if sample is None else (sample.computed_ns, sample.micro_batches)


def _began_anew(before: tuple[int, int], now: tuple[int, int]) -> bool:
    """Another rank works there."""
    return now[1] < before[1] or now[0] < before[0]
