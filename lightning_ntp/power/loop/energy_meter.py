"""What power costs: watts of every replica, joules of a step and of a token, and the price of a boost, as measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_ntp.power.control import BoostPrice, OperatingPoint, boost_prices

STEP = 0.05
"""Boosts whose power differs by less than this, as a fraction of the power without one, are one point."""
LEAST = 6
"""Intervals that a point needs before it counts: a single one is of a few steps."""
WINDOW = 20
"""Numbers per step are of the last so many steps, or intervals in which one ended: of what is shorter."""


@dataclass
class _Sum:
    intervals: int = 0
    seconds: float = 0.0
    joules: float = 0.0
    work: float = 0.0
    """Samples that the replica would have computed without waiting, at full degree."""


@dataclass(frozen=True)
class Spent:
    """Energy of one interval.

    Args:
        watts: Replica -> mean power of its GPUs together.
        joules_per_step: Of all replicas; None if no step was completed.
        joules_per_token: None too if the tokens of a step are not known.
    """

    watts: Mapping[int, float]
    joules_per_step: float | None
    joules_per_token: float | None


@dataclass
class EnergyMeter:
    """Adds up intervals. A number of a single interval would be of two steps or of three, when there were two and a
    half: those per step are of many.
    """

    _points: dict[int, dict[int, _Sum]] = field(default_factory=dict)
    _recent: deque[tuple[float, float]] = field(default_factory=deque)
    """(joules, steps) of intervals in which a step has ended, with what lay before them since the last one."""
    _joules: float | None = None
    """Since then; None before the first one has ended: what lies before it is a part of a step, or none at all."""

    def take(self, seconds: float, watts: Mapping[int, float | None], steps: float, tokens_per_step: int) -> Spent:
        """Take an interval in.

        Args:
            seconds: How long it was.
            watts: Replica -> power of its GPUs together; None if one of them could not be read.
            steps: Optimizer steps in it, parts of one counted.
            tokens_per_step: Of all replicas; 0 if it is not known.
        """
        known = {replica: power for replica, power in watts.items() if power is not None}
        if len(known) < len(watts):  # a part of the energy is no energy of a step
            self._joules = None
            self._recent.clear()
            return Spent(known, None, None)
        if self._joules is not None:
            self._joules += seconds * sum(known.values())
        if steps > 0:
            if self._joules is not None:
                self._recent.append((self._joules, steps))
            self._joules = 0.0
        total = sum(count for _, count in self._recent)
        while len(self._recent) > 1 and (len(self._recent) > WINDOW or total - self._recent[0][1] >= WINDOW):
            total -= self._recent.popleft()[1]
        if not steps > 0 or total < 1:
            return Spent(known, None, None)
        per_step = sum(joules for joules, _ in self._recent) / total
        return Spent(known, per_step, per_step / tokens_per_step if tokens_per_step else None)

    def boosted(self, replica: int, seconds: float, watts: float, sample_s: float, base_watts: float) -> int:
        """An interval of a replica at a certain power.

        Args:
            replica: Which.
            seconds: How long it was.
            watts: Mean power of its GPUs.
            sample_s: Seconds that it computes per sample, over those that are planned at its degree.
            base_watts: The mean power of the same GPUs without a boost.

        Returns:
            The number of its point: 0 without a boost.
        """
        number = round((watts / base_watts - 1) / STEP)
        point = self._points.setdefault(replica, {}).setdefault(number, _Sum())
        point.intervals += 1
        point.seconds += seconds
        point.joules += seconds * watts
        point.work += seconds / sample_s
        return number

    def price(self, replica: int, number: int) -> BoostPrice | None:
        """What a point costs against that without a boost; None as long as one of the two is not known well."""
        points = self._points.get(replica, {})
        known = [points[each] for each in (0, number) if each in points and points[each].intervals >= LEAST]
        if len(known) < 2 or number <= 0:
            return None
        return boost_prices([OperatingPoint(each.joules / each.seconds, each.work / each.seconds) for each in known])[1]
