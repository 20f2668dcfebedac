"""How many samples of a global batch every replica computes when replicas differ in speed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """How fast a replica is, as measured. Any unit of time will do if all replicas use the same.

    Args:
        per_sample_s: Seconds per sample.
        fixed_s: Seconds per step, however many samples it has (optimizer, gradient sync).

    Raises:
        ValueError: If a time is no number, the first is not above 0, or the second is below 0.
    """

    per_sample_s: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.per_sample_s < math.inf or not 0 <= self.fixed_s < math.inf:
            raise ValueError(f"{self} is no pace: seconds per sample must be above 0 and seconds per step at least 0")

    def seconds(self, samples: int) -> float:
        """Seconds per step with so many samples."""
        return self.fixed_s + samples * self.per_sample_s


def slowest(counts: Mapping[int, int], paces: Mapping[int, Pace]) -> float:
    """Seconds per step of the slowest replica."""
    return max(paces[replica].seconds(count) for replica, count in counts.items())


def split(
    batch: int, paces: Mapping[int, Pace], present: Mapping[int, int] | None = None, gain: float = 0.01
) -> dict[int, int]:
    """Samples per replica, at least one each, that make the slowest replica's step as short as possible.

    Sample by sample goes to the replica that would be done with it first. As more samples never take less time, that is
    optimal; it is also monotone: whoever becomes faster gets no fewer samples, and a larger batch no replica fewer.

    Args:
        batch: Samples of the global batch.
        paces: Replica -> its pace.
        present: The counts now. They stay unless the best ones shorten the step by more than ``gain``, so that noise
            does not move samples to and fro.
        gain: A fraction of the step time.

    Raises:
        ValueError: If there are no replicas, or fewer samples than replicas.
    """
    if not paces or batch < len(paces):
        raise ValueError(
            f"a batch of {batch} cannot be split over {len(paces)} replicas, at least one sample each: use a larger"
            " batch or fewer replicas"
        )
    counts = _below(batch, paces)
    heap = [(pace.seconds(counts[replica] + 1), replica) for replica, pace in paces.items()]
    heapq.heapify(heap)
    for _ in range(batch - sum(counts.values())):
        _, replica = heap[0]
        counts[replica] += 1
        heapq.heapreplace(heap, (paces[replica].seconds(counts[replica] + 1), replica))
    if present is not None and _still_fits(batch, paces, present):
        if slowest(present, paces) * (1 - gain) <= slowest(counts, paces):
            return dict(present)
    return dict(sorted(counts.items()))


def _below(batch: int, paces: Mapping[int, Pace]) -> dict[int, int]:
    """Counts that are surely part of the answer, close to it: it saves handing out large batches sample by sample."""

    def done(seconds: float) -> dict[int, int]:
        # one less than what fits, so that rounding cannot count a sample that does not
        return {r: max(1, int((seconds - p.fixed_s) / p.per_sample_s) - 1) for r, p in paces.items()}

    low, high = 0.0, min(pace.seconds(batch) for pace in paces.values())
    for _ in range(60):
        middle = (low + high) / 2
        # who fits more with the last sample counted too must not be above the batch
        if sum(count + 1 for count in done(middle).values()) <= batch:
            low = middle
        else:
            high = middle
    return done(low) if low else dict.fromkeys(paces, 1)


def _still_fits(batch: int, paces: Mapping[int, Pace], counts: Mapping[int, int]) -> bool:
    return counts.keys() == paces.keys() and sum(counts.values()) == batch and min(counts.values()) >= 1
