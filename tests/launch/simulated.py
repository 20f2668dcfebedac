"""Ranks that compute and wait in collectives, on a clock of their own: what the supervisor would see of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lightning_ntp.launch.hangs import Hangs
from lightning_ntp.launch.progress import NOBODY, NOT_WAITING, WAITING, Sample, Tag

HEARTBEAT = 2.0
LOOK = 0.1
FOR_EVER = math.inf
WORLD = 7


class Simulated:
    """A rank whose step is: compute, a collective of its replica, compute, a collective of all.

    Args:
        seconds: How long it computes before each of its collectives, one after the other; afterwards ``usual``.
        tag: What it says that it does.
        frozen_from: From then on it shows nothing, also while it waits.
    """

    def __init__(
        self,
        replica: int,
        seconds: Iterable[float] = (),
        usual: float = 0.3,
        tag: Tag = Tag.STEP,
        frozen_from: float = FOR_EVER,
    ) -> None:
        self.cycle = (100 + replica, WORLD)
        self.entered = dict.fromkeys(self.cycle, 0)
        self.sample = Sample(tag=tag, groups=tuple(self.entered.items()))
        self._seconds, self._usual, self._frozen_from = iter(seconds), usual, frozen_from
        self._position = 0
        self._until = next(self._seconds, usual)

    def live(self, now: float, world: Sequence[Simulated]) -> None:
        if now >= self._frozen_from:
            return
        sample = self.sample
        group = self.cycle[self._position % 2]
        if sample.waiting:
            if all(other.entered.get(group, FOR_EVER) >= self.entered[group] for other in world):
                self._position += 1
                done = list(sample.done)
                done[sample.tag] += self._position % 2 == 0
                self.sample = replace(
                    sample, seq=sample.seq + 1, waiting=NOT_WAITING, waits_for=NOBODY, done=tuple(done)
                )
                self._until = now + next(self._seconds, self._usual)
            else:
                self.sample = replace(sample, ticks=sample.ticks + 1)
        elif now >= self._until:
            self.entered[group] += 1
            self.sample = replace(
                sample, seq=sample.seq + 1, waiting=WAITING, waits_for=group, groups=tuple(self.entered.items())
            )


def blamed(
    world: dict[int, Simulated],
    seconds: float = 60.0,
    stopped: Callable[[float], set[int]] = lambda now: set(),
    pauses: Sequence[tuple[float, float]] = (),
) -> dict[int, tuple[float, str]]:
    """Let the world run until nobody goes on, or for so long. Who is blamed is gone, and the others go on.

    Args:
        stopped: The stopped slots at a time.
        pauses: (from, to): nobody looks and nobody moves.

    Returns:
        Slot -> (when it was blamed, why); slot -1 for all of them.
    """
    hangs, found, living = Hangs(HEARTBEAT), {}, dict(world)
    for look in range(int(seconds / LOOK)):
        now = look * LOOK
        if any(start <= now < end for start, end in pauses):
            continue
        for slot, rank in living.items():
            if slot not in stopped(now):
                rank.live(now, list(living.values()))
        verdict = hangs.look(now, {slot: rank.sample for slot, rank in living.items()}, stopped(now) & living.keys())
        for slot, why in verdict.blamed.items():
            found[slot] = (now, why)
            del living[slot]
        if verdict.deadlock:
            found[-1] = (now, verdict.deadlock)
            break
    return found
