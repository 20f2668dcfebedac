"""How much slower a replica is than those that set the pace: one number out of noise.

A scalar Kalman filter with a known input. The number is the logarithm of the ratio of two compute times; a change of
speed shifts it by a known amount, so that what was learned before a write stays learned after it. Its gain falls as
measurements come in: quick at first, quiet later. (R. E. Kalman, "A New Approach to Linear Filtering and Prediction
Problems", 1960.)
"""

from __future__ import annotations

import math

DRIFT = 0.0004
"""Standard deviation by which the ratio wanders per interval: heat, data."""
INPUT_DOUBT = 0.3
"""Standard deviation of what a change of speed does, over what it should do: a part of a step follows no clock."""
FIRST_NOISE = 0.03
"""Standard deviation of a measurement of which nothing is known."""
LEAST_NOISE = 0.001
"""Standard deviation below which no measurement is believed to be."""
SURE = 2.0
"""Standard deviations that a value must be away from 0 to be acted on."""
SURPRISE = 4.5
"""Standard deviations of the mean innovation above which the load must have changed."""
OUTLIER = 4.0
"""Standard deviations to which an innovation is cut."""
RECENT = 0.1
"""Weight of the newest innovation in their mean."""


class NoiseMeter:
    """The noise of measurements whose true value hardly moves: of two in a row only noise is left in the difference.

    Args:
        deviation: Standard deviation that is assumed at first.
    """

    def __init__(self, deviation: float = FIRST_NOISE) -> None:
        self._variance = deviation * deviation
        self._last: float | None = None
        self._count = self._heard = 0
        self.level = 0.0
        """The mean of the measurements, recent ones weigh more; 0 if there were none."""

    @property
    def deviation(self) -> float:
        """Standard deviation of one measurement."""
        return math.sqrt(max(self._variance, LEAST_NOISE * LEAST_NOISE))

    def hear(self, measured: float) -> None:
        """One measurement, following the one before."""
        self._heard += 1
        self.level += (measured - self.level) * max(0.02, 1 / self._heard)
        if self._last is not None:
            self._count += 1
            # an outlier is news of another kind; the first ones are averaged, with the assumption counting as four
            square = min((measured - self._last) ** 2 / 2, 25 * self._variance + LEAST_NOISE)
            self._variance += (square - self._variance) * max(0.04, 1 / (self._count + 4))
        self._last = measured

    def interrupt(self) -> None:
        """The true value moves: the next difference would say nothing."""
        self._last = None


class PaceFilter:
    """The filtered logarithm of (compute time / compute time of those that set the pace).

    Args:
        expected: The planned value.
        spread: Standard deviation of the plan.
        noise: What is known of the noise of measurements; it learns on.
    """

    def __init__(self, expected: float, spread: float, noise: NoiseMeter | None = None) -> None:
        self.value = expected
        self._spread, self._variance = spread, spread * spread
        self._noise = NoiseMeter() if noise is None else noise
        self._noise.interrupt()
        self._surprise = 0.0

    @property
    def error(self) -> float:
        """Standard deviation of ``value``."""
        return math.sqrt(self._variance)

    def expect(self, change: float) -> None:
        """The plan says that the value has changed, for instance because another GPU was lost."""
        self.value += change
        self._variance += self._spread * self._spread
        self._forget()

    def move(self, speed: float, doubt: float = INPUT_DOUBT) -> None:
        """The logarithm of the replica's speed was changed by so much."""
        if speed:
            self.value -= speed
            self._variance += (doubt * speed) ** 2
            self._forget()

    def update(self, measured: float) -> None:
        """Take one measurement in."""
        self._noise.hear(measured)
        self._variance += DRIFT * DRIFT
        noise = self._noise.deviation**2
        total = self._variance + noise
        # one outlier, a step with a checkpoint for instance, must not look like another load
        most = OUTLIER * math.sqrt(total)
        innovation = min(max(measured - self.value, -most), most)
        self._surprise += RECENT * (innovation / math.sqrt(total) - self._surprise)
        if abs(self._surprise) > SURPRISE * math.sqrt(RECENT / (2 - RECENT)):
            self._variance, self._surprise = self._variance + self._spread**2, 0.0
            total = self._variance + noise
        gain = self._variance / total
        self.value += gain * innovation
        self._variance *= 1 - gain

    def significant(self, deadband: float) -> bool:
        """Whether the value is far enough from 0 to act: beyond the deadband and beyond its own error."""
        return abs(self.value) > max(deadband, SURE * self.error)

    def _forget(self) -> None:
        self._noise.interrupt()
        self._surprise = 0.0
