"""What a step, a token and a boost cost in energy, from samples of power."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class PowerSample:
    """The power that a GPU drew at a moment: seconds on any one clock, watts."""

    at_s: float
    watts: float


@dataclass(frozen=True)
class Energy:
    """Energy over a span of time.

    Args:
        joules: The energy of the time that samples cover.
        covered_s: Seconds that they cover.
        unknown_s: Seconds of the span that they do not: gaps, and what lies before the first and after the last one.
    """

    joules: float
    covered_s: float
    unknown_s: float = 0.0

    @property
    def watts(self) -> float:
        """The mean power of the covered time; 0 if nothing is covered."""
        return self.joules / self.covered_s if self.covered_s else 0.0

    @property
    def estimated_joules(self) -> float:
        """The energy of the whole span, if the rest of it was like what is covered."""
        return self.joules + self.watts * self.unknown_s

    def __add__(self, other: Energy) -> Energy:
        """Of several GPUs, or of several spans."""
        return Energy(self.joules + other.joules, self.covered_s + other.covered_s, self.unknown_s + other.unknown_s)


def energy(samples: Iterable[PowerSample], start_s: float, end_s: float, longest_gap_s: float) -> Energy:
    """The energy between two moments: the trapezoid rule over samples, each pair cut to the span.

    Two samples further apart than ``longest_gap_s`` say nothing about the time in between: it counts as unknown, since
    a rank that was blocked, or a GPU that was away, would otherwise be billed for power that nobody has seen.

    Raises:
        ValueError: If the span is empty, the gap is not above 0, or samples are not in the order of their times.
    """
    if not start_s < end_s or not longest_gap_s > 0:
        raise ValueError(
            f"energy from {start_s} s to {end_s} s with gaps of at most {longest_gap_s} s: a span must not be empty and"
            " a gap must be above 0"
        )
    joules = covered = 0.0
    for first, second in pairwise(samples):
        length = second.at_s - first.at_s
        if length < 0:
            raise ValueError(f"a sample at {second.at_s} s follows one at {first.at_s} s: sort them by time")
        left, right = max(first.at_s, start_s), min(second.at_s, end_s)
        if not 0 < length <= longest_gap_s or right <= left:
            continue
        slope = (second.watts - first.watts) / length
        middle = first.watts + slope * ((left + right) / 2 - first.at_s)
        joules += middle * (right - left)
        covered += right - left
    return Energy(joules, covered, max(0.0, end_s - start_s - covered))


@dataclass(frozen=True)
class EnergyPerWork:
    """Joules per step and per token, and the mean power of every replica in watts."""

    joules_per_step: float
    joules_per_token: float
    replica_watts: Mapping[int, float]


def energy_per_work(gpus: Mapping[str, Energy], replicas: Mapping[str, int], steps: int, tokens: int) -> EnergyPerWork:
    """What the work of a span cost, the uncovered rest estimated.

    Args:
        gpus: GPU -> its energy over the span.
        replicas: GPU -> its replica.
        steps: Optimizer steps in the span.
        tokens: Tokens of all replicas in the span.

    Raises:
        ValueError: If ``steps`` or ``tokens`` is below 1.
    """
    if steps < 1 or tokens < 1:
        raise ValueError(f"{steps} steps with {tokens} tokens are no work to divide by: wait for a whole step")
    joules = sum(each.estimated_joules for each in gpus.values())
    watts: dict[int, float] = {}
    for gpu, each in gpus.items():
        watts[replicas[gpu]] = watts.get(replicas[gpu], 0.0) + each.watts
    return EnergyPerWork(joules / steps, joules / tokens, watts)


@dataclass(frozen=True)
class OperatingPoint:
    """What was measured at one boost.

    Args:
        watts: Power of the whole job.
        tokens_per_s: Throughput of the whole job.
    """

    watts: float
    tokens_per_s: float

    @property
    def tokens_per_joule(self) -> float:
        """Performance per watt."""
        return self.tokens_per_s / self.watts


@dataclass(frozen=True)
class BoostPrice:
    """What a boost costs, against the point before it.

    Args:
        point: The boost.
        speed: Throughput over that of the first point.
        efficiency: Tokens per joule over those of the first point.
        joules_per_more_token: Energy of every token that was won over the point before; infinite if none was.
    """

    point: OperatingPoint
    speed: float
    efficiency: float
    joules_per_more_token: float


def boost_prices(points: Sequence[OperatingPoint]) -> tuple[BoostPrice, ...]:
    """The price of every boost, in the order of power; the first point is the one without a boost.

    Raises:
        ValueError: If there are no points, or one has no power or no throughput.
    """
    if not points or any(not point.watts > 0 or not point.tokens_per_s > 0 for point in points):
        raise ValueError(f"operating points need watts and tokens per second above 0, got {list(points)}")
    rising = sorted(points, key=lambda point: point.watts)
    first, prices = rising[0], []
    for before, point in zip([first, *rising], rising, strict=False):
        won = point.tokens_per_s - before.tokens_per_s
        price = (point.watts - before.watts) / won if won > 0 else float("inf")
        if point is first:
            price = first.watts / first.tokens_per_s
        prices.append(
            BoostPrice(
                point, point.tokens_per_s / first.tokens_per_s, point.tokens_per_joule / first.tokens_per_joule, price
            )
        )
    return tuple(prices)
