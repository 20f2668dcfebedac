"""Ranks that need more time for their part of a step than their peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low

from lightning_ntp.health.findings import Finding, WatchedJob
from lightning_ntp.health.sources.board import log, wait
from lightning_ntp.launch.progress import ProgressReader, Sample, Tag

_LEAST_LOOKS = 5
"""So many looks in a row must agree: one pause of a machine, in which a hundred short steps fall, is one look."""
_LEAST_MS = 1.0
"""Of work per step more than the peers: below that it is noise of the host."""


@dataclass
class _Watched:
    """A rank, since the last look that has told something."""

    sample: Sample
    slow: int = 0
    """Steps for which it has been slow."""
    slow_looks: int = 0
    fine: int = 0
    fine_looks: int = 0


class StragglerSource:
    """Yields ranks whose own work per training step takes longer than that of their peers in the same replica.

    What counts is the time inside of training steps without the waits for others: a rank that waits for a slow one is
    not slow. Fetching data, hooks, validation and checkpoints, which lie between steps, do not count (rank 0 does more
    of that), and steps that are done again or in which the members change do not either. With gradient accumulation
    what lies between the micro-batches of one step does.

    Ranks are compared within their replica: at another degree the parts are of another size. So a replica of one rank
    is not looked at: its peers have other batches. Where a replica's degree does not divide the model's heads, some of
    its ranks have more of them, by plan: let ``factor`` be above that ratio. Waits on NCCL happen on the device, and
    cannot be told from work: then this is told once, and nothing is found.

    Args:
        factor: How many times the median of its replica a rank's work may take.
        steps: For how many steps in a row it must take longer, and, to be fine again, be below half of that excess.
        interval: Seconds between two looks. A rank is slow for five of them at least.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(self, factor: float = 1.3, steps: int = 20, interval: float = 1.0) -> None:
        if not 1.0 < factor <= 1000.0:
            raise ValueError(f"factor={factor!r} must be above 1: 1.3 is 30 % more than the median")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 10**9:
            raise ValueError(f"steps={steps!r} must be a number of steps, at least 1")
        if not 0.01 <= interval <= 3600:
            raise ValueError(f"interval={interval!r} must be a number of seconds from 0.01 to 3600")
        self.factor, self.steps, self.interval = float(factor), steps, float(interval)
        self._job: WatchedJob | None = None
        self._begin(None)

    def _begin(self, job: WatchedJob | None) -> None:
        self._job = job
        self._ranks: dict[int, _Watched] = {}
        self._members: dict[int, frozenset[int]] = {}
        self._found: set[int] = set()
        self._blind = False

    def __call__(self, job: WatchedJob) -> Iterable[Finding]:
        if self._job is not job:
            self._begin(job)
        while not job.ending():
            samples = {}
            for slot in job.slots():
                reader = ProgressReader(job.directory, slot)  # anew: another process may show its own by now
                try:
                    sample = reader.read()
                finally:
                    reader.close()
                if sample is not None:
                    samples[slot] = sample
            yield from self.look(samples, job.replicas())
            wait(job, self.interval)

    def look(self, samples: Mapping[int, Sample], replicas: Mapping[int, int]) -> list[Finding]:
        """Compare.

        Args:
            samples: What live ranks show, by slot.
            replicas: Their replicas, by slot; those without one are not looked at.
        """
        members: dict[int, set[int]] = {}
        for slot, replica in replicas.items():
            if slot in samples:
                members.setdefault(replica, set()).add(slot)
        compared = {slot for slots in members.values() if len(slots) > 1 for slot in slots}
        self._forget(self._ranks.keys() - compared)
        findings = [self._fine(slot, "it has no peers any more") for slot in sorted(self._found - compared)]
        for replica, slots in sorted(members.items()):
            if self._members.get(replica) != frozenset(slots):
                self._forget(slots)
            if len(slots) > 1 and not self._is_blind(samples, slots):
                findings += self._compare({slot: samples[slot] for slot in sorted(slots)})
        self._members = {replica: frozenset(slots) for replica, slots in members.items()}
        return findings

    def _forget(self, slots: set[int]) -> None:
        for slot in slots:
            self._ranks.pop(slot, None)

    def _is_blind(self, samples: Mapping[int, Sample], slots: set[int]) -> bool:
        if not any(samples[slot].blind for slot in slots):
            return False
        self._forget(slots)
        if not self._blind:
            self._blind = True
            log.warning("health: stragglers are not looked for: waits on the device cannot be told from work (NCCL)")
        return True

    def _compare(self, samples: Mapping[int, Sample]) -> list[Finding]:
        """Compare the ranks of a replica."""
        done = {slot: sample.done[Tag.STEP] for slot, sample in samples.items()}
        if not all(done.values()):  # a recovery, or the start: first steps are slow for reasons of their own
            self._forget(set(samples))
            return []
        for slot, sample in samples.items():
            watched = self._ranks.get(slot)
            if watched is None:
                self._ranks[slot] = _Watched(sample)
            elif sample.worked_ns < watched.sample.worked_ns or done[slot] < watched.sample.done[Tag.STEP]:
                # a step that could not be measured, on all of them: some show it a little earlier
                for each, latest in samples.items():
                    self._ranks[each] = _Watched(latest)
                return []
        steps = {slot: done[slot] - self._ranks[slot].sample.done[Tag.STEP] for slot in samples}
        if not all(steps.values()):
            return []
        work = {
            slot: (sample.worked_ns - self._ranks[slot].sample.worked_ns) / steps[slot] / 1e6
            for slot, sample in samples.items()
        }
        # of two ranks the faster one is the measure
        median = median_low(work.values())
        findings = []
        for slot, sample in samples.items():
            self._ranks[slot].sample = sample
            finding = self._judge(slot, steps[slot], work[slot], median)
            if finding is not None:
                findings.append(finding)
        return findings

    def _judge(self, slot: int, steps: int, work: float, median: float) -> Finding | None:
        watched = self._ranks[slot]
        if work > self.factor * median and work > median + _LEAST_MS:
            watched.slow, watched.slow_looks = watched.slow + steps, watched.slow_looks + 1
        else:
            watched.slow = watched.slow_looks = 0
        if work < (1.0 + 0.5 * (self.factor - 1.0)) * median or work < median + 0.5 * _LEAST_MS:
            watched.fine, watched.fine_looks = watched.fine + steps, watched.fine_looks + 1
        else:
            watched.fine = watched.fine_looks = 0
        text = f"{work:.1f} ms of work per step against {median:.1f} ms, the median of its replica"
        if slot in self._found:
            is_fine = watched.fine >= self.steps and watched.fine_looks >= _LEAST_LOOKS
            return self._fine(slot, text) if is_fine else None
        if watched.slow < self.steps or watched.slow_looks < _LEAST_LOOKS:
            return None
        self._found.add(slot)
        return Finding("straggler", text, slot=slot, values={"work_ms": work, "median_work_ms": median})

    def _fine(self, slot: int, text: str) -> Finding:
        self._found.discard(slot)
        return Finding("straggler", text, slot=slot, clears=True)
