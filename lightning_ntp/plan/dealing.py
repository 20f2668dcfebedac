"""Who computes which samples of a global batch, when replicas take different numbers of them or are gone.

The sampler of the launch defines the global batches: the k-th is what all replicas' k-th batches hold together. However
it is dealt, it stays the same samples.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

Counts = tuple[int, ...]
"""Samples of a global batch by replica of the launch; 0 for one that was gone when they were asked for."""


def scale(counts: Sequence[int], total: int) -> Counts:
    """Counts in the same proportions for another number of samples, by largest remainders.

    Whoever has any keeps at least one, as far as there are enough.

    Args:
        counts: At least one above 0.
        total: Samples.

    Raises:
        ValueError: If nobody has any.
    """
    whole = sum(counts)
    if whole == total:
        return tuple(counts)
    if whole <= 0:
        raise ValueError(f"{total} samples cannot be dealt by the counts {tuple(counts)}: at least one must be above 0")
    scaled = [count * total // whole for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda r: (-(counts[r] * total % whole), r))
    for replica in by_remainder[: total - sum(scaled)]:
        scaled[replica] += 1
    for replica, count in enumerate(counts):
        richest = scaled.index(max(scaled))
        if count and not scaled[replica] and scaled[richest] > 1:
            scaled[richest] -= 1
            scaled[replica] = 1
    return tuple(scaled)


def covers(counts: Sequence[int] | None, live: Collection[int]) -> bool:
    """Whether every live replica has a share. Counts that leave one out do not hold: it has come back since."""
    return counts is None or all(counts[replica] > 0 for replica in live)


def shareholders(counts: Sequence[int] | None, replicas: int) -> tuple[int, ...]:
    """The replicas among which counts deal everything: if just these are live, nothing is left over."""
    return tuple(replica for replica in range(replicas) if counts is None or counts[replica] > 0)


def deal(batches: Sequence[Sequence[int]], counts: Sequence[int] | None, live: Sequence[int]) -> dict[int, list[int]]:
    """Deal a global batch.

    Whoever takes fewer samples than in the launch gives away the tail of its own; those that take more get them in the
    order of the replicas. The part of a replica that is gone goes to the live ones in turn.

    Args:
        batches: By replica of the launch, its own samples of this global batch.
        counts: How many each takes, of a batch of any size; None, or counts that leave a live one out: as in the
            launch.
        live: Who is there, ascending.

    Returns:
        Live replica -> its samples, its own of the launch first.
    """
    if counts is None or not covers(counts, live):
        parts = [list(batch) for batch in batches]
    else:
        sizes = scale(counts, sum(map(len, batches)))
        parts = [list(batch[:size]) for batch, size in zip(batches, sizes, strict=True)]
        pool = iter([index for batch, size in zip(batches, sizes, strict=True) for index in batch[size:]])
        for part, size in zip(parts, sizes, strict=True):
            part += [next(pool) for _ in range(size - len(part))]
    orphans = [index for replica, part in enumerate(parts) if replica not in live for index in part]
    return {replica: parts[replica] + orphans[place :: len(live)] for place, replica in enumerate(live)}
