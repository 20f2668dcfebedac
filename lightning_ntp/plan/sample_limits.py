"""How many samples a device has the memory for, and counts that keep to it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ntp.plan.dealing import Counts

UNLIMITED = 2**40
"""Samples: more than any batch has."""


def most_samples(now: int, static_bytes: int, peak_bytes: int, total_bytes: int, reserve: float = 0.1) -> int:
    """The largest batch that fits, if what a step needs beyond what is always there grows with the samples.

    Args:
        now: Samples of the largest batch that has been computed; it fits, whatever the numbers say.
        static_bytes: Allocated between steps: parameters, gradients, optimizer state.
        peak_bytes: The most that was allocated in a step of ``now`` samples.
        total_bytes: What this process may allocate.
        reserve: A fraction of that which stays free.

    Raises:
        ValueError: If ``now`` is below 1, or ``reserve`` not within [0, 1).
    """
    if now < 1:
        raise ValueError(f"now={now}: what a sample needs is told by a batch that has at least one")
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve={reserve}: it is a fraction of the memory, at least 0 and less than 1")
    activations = peak_bytes - static_bytes
    if activations <= 0:
        return UNLIMITED
    room = int(total_bytes * (1 - reserve)) - static_bytes
    return max(now, min(UNLIMITED, room * now // activations))


def within(counts: Sequence[int], most: Sequence[int]) -> Counts | None:
    """Cut counts to what fits; the rest goes, one by one, to whoever has the most room left.

    Args:
        counts: By replica; one with 0 is gone and gets nothing.
        most: By replica.

    Returns:
        None if there is not enough room for all samples.
    """
    cut = [min(count, limit) for count, limit in zip(counts, most, strict=True)]
    for _ in range(sum(counts) - sum(cut)):
        room = [limit - count if count else 0 for count, limit in zip(cut, most, strict=True)]
        replica = room.index(max(room))
        if room[replica] <= 0:
            return None
        cut[replica] += 1
    return tuple(cut)
