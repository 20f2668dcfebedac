"""Who hangs? A pure state machine over a clock and what the ranks show of their progress.

A rank is blamed if it has shown no progress for longer than such work takes, and others cannot go on without it: they
have entered a collective that it has not. Who only waits in one is never blamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from lightning_ntp.launch.progress import EVERYBODY, IN_WORDS, NOT_WAITING, WAITING, WAITING_BLINDLY, Sample, Tag

_TIMES_LONGEST = 5.0
"""So many times the longest silence that came to a good end may the next one last."""
_TIMES_ARRIVAL = 2.0
"""So many heartbeats may all members wait while somebody is about to join."""
_TIMES_FIRST = 10.0
"""So many heartbeats may the first work of its kind be silent: it may have to be compiled."""
_PAUSE_SECONDS = 2.0
"""A look that comes so late says that this process, and perhaps the whole job, was stopped meanwhile."""
_TOGETHER_SECONDS = 1.0
"""Ranks that are all stopped within this time were stopped by somebody, as a whole job."""


@dataclass(frozen=True)
class Verdict:
    """What a look has found."""

    blamed: Mapping[int, str] = field(default_factory=dict)
    """Slot -> why it is taken as hung."""
    deadlock: str = ""
    """Why nobody can go on, if nobody can."""


@dataclass
class _Watched:
    sample: Sample
    moved: float
    """When it last showed progress."""
    waited_since: float | None = None
    """When others were first seen to need it."""


class Hangs:
    """Blames ranks that hang.

    Args:
        heartbeat: Seconds for which a rank may show no progress.
    """

    def __init__(self, heartbeat: float) -> None:
        self.heartbeat = heartbeat
        self._ranks: dict[int, _Watched] = {}
        self._stopped: dict[int, float] = {}
        self._all_stopped = self._paused = False
        self._longest: dict[Tag, float] = {}
        self._last_look: float | None = None
        self._last_step = 0.0
        self._next_blame = 0.0

    def limit(self, tag: Tag) -> float:
        """How many seconds of silence such work may have."""
        # hooks may do anything, on rank 0 alone, say: given up for it, the next rank 0 would do the same
        if not self._is_warm(tag) or tag not in (Tag.STEP, Tag.EVALUATION):
            return max(_TIMES_FIRST * self.heartbeat, _TIMES_LONGEST * self._longest.get(tag, 0.0))
        return max(self.heartbeat, _TIMES_LONGEST * self._longest.get(tag, 0.0))

    def look(
        self,
        now: float,
        samples: Mapping[int, Sample],
        stopped: Set[int] = frozenset(),
        newcomers: Set[int] = frozenset(),
    ) -> Verdict:
        """Look at all ranks that live, several times per heartbeat.

        Args:
            now: Seconds.
            samples: What they show, by slot.
            stopped: Slots whose process is stopped.
            newcomers: Slots that are about to join: they may be blamed, and do not break a deadlock.
        """
        late = self._last_look is not None and now - self._last_look > _PAUSE_SECONDS
        self._last_look = now
        if late:
            self._forget_clocks(now)
        samples = {slot: sample for slot, sample in samples.items() if not sample.left}
        others_left = not self._ranks.keys() <= samples.keys()
        self._take_in(now, samples)
        blamed = self._stopped_too_long(now, samples, stopped, others_left)
        running = {slot: sample for slot, sample in samples.items() if slot not in stopped}
        members = {slot: sample for slot, sample in samples.items() if slot not in newcomers}
        if not blamed and now >= self._next_blame:
            # one at a time: if many stall for one reason, the others may come back meanwhile
            blamed = self._silent_too_long(now, running, samples)
            if blamed:
                self._next_blame = now + self.heartbeat
        if not blamed and newcomers and self._all_wait(now, running, members, _TIMES_ARRIVAL * self.heartbeat):
            seconds = now - self._last_step
            why = f"hung: all others have waited for {seconds:.1f} s while it was about to join them"
            blamed = dict.fromkeys(newcomers & running.keys(), why)
        return Verdict(blamed, "" if blamed else self._deadlock(now, running, members))

    def _forget_clocks(self, now: float) -> None:
        self._stopped.clear()
        self._last_step = now
        for watched in self._ranks.values():
            watched.moved, watched.waited_since = now, None

    def _take_in(self, now: float, samples: Mapping[int, Sample]) -> None:
        for slot in self._ranks.keys() - samples.keys():
            del self._ranks[slot]
            self._last_step = now
        for slot, sample in samples.items():
            watched = self._ranks.get(slot)
            if watched is None:
                self._ranks[slot] = _Watched(sample, now)
                self._last_step = now
                continue
            before = watched.sample
            if sample.seq != before.seq or sample.groups != before.groups:  # the latter: a thread beside goes on
                self._last_step = now
            if (sample.seq, sample.ticks) != (before.seq, before.ticks):
                # the first of a kind is slow for reasons that do not come back
                if before.waiting == NOT_WAITING and before.done[before.tag] and self._is_warm(before.tag):
                    self._longest[before.tag] = max(self._longest.get(before.tag, 0.0), now - watched.moved)
                watched.moved = now
            watched.sample = sample

    def _is_warm(self, tag: Tag) -> bool:
        return any(watched.sample.done[tag] for watched in self._ranks.values())

    # ---- blame ------------------------------------------------------------------------------------------------

    def _stopped_too_long(
        self, now: float, samples: Mapping[int, Sample], stopped: Set[int], others_left: bool
    ) -> dict[int, str]:
        stopped = stopped & samples.keys()
        for slot in self._stopped.keys() - stopped:
            del self._stopped[slot]
        for slot in stopped:
            self._stopped.setdefault(slot, now)
        all_stopped = samples.keys() <= stopped
        if all_stopped and not self._all_stopped:
            # has somebody stopped the whole job, or have those who ran just finished, or died?
            together = now - min(self._stopped.values(), default=now) <= _TOGETHER_SECONDS
            self._paused = together and not others_left
        self._all_stopped = all_stopped
        if all_stopped and self._paused:
            self._stopped = dict.fromkeys(stopped, now)
        over = {slot: now - since for slot, since in self._stopped.items() if now - since >= self.heartbeat}
        return {
            slot: f"hung: its process is stopped (SIGSTOP) since {seconds:.1f} s, {IN_WORDS[samples[slot].tag]}"
            for slot, seconds in over.items()
        }

    def _silent_too_long(
        self, now: float, running: Mapping[int, Sample], samples: Mapping[int, Sample]
    ) -> dict[int, str]:
        suspects: dict[int, tuple[float, int]] = {}
        for slot, sample in running.items():
            watched = self._ranks[slot]
            waiter = None if _is_excused(slot, sample, samples) else _who_needs(slot, sample, samples)
            if waiter is None:
                watched.waited_since = None
                continue
            if watched.waited_since is None:
                watched.waited_since = now
            silent = now - watched.moved
            waited = now - max(watched.waited_since, watched.moved)
            if waited >= self.heartbeat and silent >= self.limit(sample.tag):
                suspects[slot] = (silent, waiter)
        if not suspects:
            return {}
        slot = max(suspects, key=lambda each: suspects[each][0])
        silent, waiter = suspects[slot]
        return {
            slot: f"hung: no progress for {silent:.1f} s {IN_WORDS[samples[slot].tag]}, and slot {waiter} waits for it"
        }

    def _deadlock(self, now: float, running: Mapping[int, Sample], samples: Mapping[int, Sample]) -> str:
        if len(samples) < 2 or not self._all_wait(now, running, samples, _TIMES_FIRST * self.heartbeat):
            return ""
        where = sorted({IN_WORDS[sample.tag] for sample in samples.values()})
        return (
            f"all {len(samples)} ranks wait for each other for {now - self._last_step:.0f} s ({', '.join(where)}): they"
            " have entered different collectives, so nobody can be blamed"
        )

    def _all_wait(
        self, now: float, running: Mapping[int, Sample], samples: Mapping[int, Sample], seconds: float
    ) -> bool:
        """Whether all of them have waited for each other for so long."""
        if not samples.keys() <= running.keys() or now - self._last_step < seconds:
            return False
        return all(s.waiting or s.blind and _is_ahead(slot, s, samples) for slot, s in samples.items())


def _is_excused(slot: int, sample: Sample, samples: Mapping[int, Sample]) -> bool:
    """Whether silence says nothing about a rank."""
    if sample.tag is Tag.SETUP or sample.waiting == WAITING_BLINDLY:
        return True
    return sample.blind and _is_ahead(slot, sample, samples)


def _who_needs(slot: int, sample: Sample, samples: Mapping[int, Sample]) -> int | None:
    """Somebody who cannot go on without ``slot``."""
    own = dict(sample.groups)
    for other, their in samples.items():
        if other == slot:
            continue
        if their.waiting and their.waits_for == EVERYBODY:
            return other
        for group, entered in their.groups:
            if group not in own or entered < own[group]:
                continue
            if entered > own[group]:
                return other
            # equal: it has entered what the other waits for. Then it is needed only if it is frozen in its own wait, or
            # if the two send to each other, which is not counted
            waits = bool(their.waiting) and their.waits_for == group
            if waits and (sample.waiting == WAITING or their.waiting == WAITING_BLINDLY):
                return other
    return None


def _is_ahead(slot: int, sample: Sample, samples: Mapping[int, Sample]) -> bool:
    """Whether ``slot`` has entered a collective that another one has not."""
    own = dict(sample.groups)
    return any(
        entered < own.get(group, 0)
        for other, their in samples.items()
        if other != slot
        for group, entered in their.groups
    )
