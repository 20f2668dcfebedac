"""What limit or clock makes a GPU so much faster than at the start: learned while it is not boosted.

A clock f takes ``idle + (base - idle) * f**3`` watts, with f = 1 and ``base`` at the start: power goes with the clock
and the square of the voltage, which goes with the clock. It need not be exact, as the loop measures what comes of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from lightning_ntp.power.control.budget import GpuBounds
from lightning_ntp.power.control.signals import GpuReading, Lever

SLACK = 1.05
"""What a GPU that its locked clocks hold gets more than its mean power, so that the limit does not hold it next."""
USEFUL = 1.08
"""The same for a GPU at its highest clock."""
FOR_SURE = 3
"""Readings in a row that say the same before it is believed."""


class SpeedCurve:
    """Speeds of one GPU: 1 is the speed at the start.

    Args:
        bounds: The GPU.
        share_w: Its limit without a boost, watts.
        idle_w: What it draws without work, watts.
        levers: What may be turned.
    """

    def __init__(self, bounds: GpuBounds, share_w: float, idle_w: float, levers: Collection[Lever]) -> None:
        self._bounds, self._share_w, self._levers = bounds, share_w, levers
        self._idle_w = min(idle_w, 0.5 * share_w)
        self._power_w: float | None = None
        self._clock_mhz: float | None = None
        self._capped: deque[bool] = deque(maxlen=20)
        self._rests: deque[tuple[float, float]] = deque(maxlen=20)
        self._at_top = 0
        self._useful_w = math.inf

    # ---- learning ---------------------------------------------------------------------------------------------

    def learn(self, reading: GpuReading) -> None:
        """A reading without a boost."""
        self._at_top, self._useful_w = 0, math.inf
        if reading.power_w is None:
            return
        limit_w = self._share_w if reading.limit_w is None else reading.limit_w
        self._capped.append("power_cap" in reading.reasons or reading.power_w > 0.95 * limit_w)
        self._power_w = _smooth(self._power_w, reading.power_w)
        if reading.margin_c is not None:
            self._rests.append((reading.margin_c, self._power_w))
        if reading.clock_mhz is not None:
            self._clock_mhz = _smooth(self._clock_mhz, reading.clock_mhz)

    def watch(self, reading: GpuReading) -> None:
        """A reading with a boost: at its highest clock, a GPU makes nothing of more power."""
        top = self._bounds.max_clock_mhz
        if top is None or reading.clock_mhz is None or reading.power_w is None:
            return
        step = 1 if reading.clock_mhz > 0.995 * top else -1
        self._at_top = step if step * self._at_top < 0 else self._at_top + step
        if self._at_top == FOR_SURE:
            self._useful_w = max(self._share_w, USEFUL * reading.power_w)
        elif self._at_top == -FOR_SURE:
            self._useful_w = math.inf

    @property
    def rest(self) -> tuple[float, float] | None:
        """The smallest temperature margin without a boost, degrees C, and the power then, watts; None if not known."""
        return min(self._rests, default=None)

    @property
    def _is_capped(self) -> bool:
        """Whether the power limit holds the clock at the start. Believed until it is known better."""
        return not self._capped or any(self._capped)

    # ---- reckoning --------------------------------------------------------------------------------------------

    def limit_w(self, speed: float) -> float:
        """The power limit for a speed, watts; never below the GPU's share."""
        if "power_limit" not in self._levers:
            return self._share_w
        return max(self._share_w, self._slack * (self._idle_w + (self._base_w - self._idle_w) * speed**3))

    def clocks_mhz(self, speed: float) -> int | None:
        """The upper end of the locked clocks for a speed; None if they were not locked at the start."""
        start = self._bounds.start_clock_mhz
        if start is None or "clocks" not in self._levers:
            return start
        wanted = max(start, math.ceil(self._reference_mhz * speed))
        return wanted if self._bounds.max_clock_mhz is None else min(wanted, self._bounds.max_clock_mhz)

    def speed(self, limit_w: float, locked_mhz: int | None) -> float:
        """The speed under a power limit and locked clocks (None: as at the start)."""
        room = max(0.0, limit_w / self._slack - self._idle_w)
        powered = math.pow(room / (self._base_w - self._idle_w), 1 / 3)
        start = self._bounds.start_clock_mhz
        if start is not None:
            return min(powered, (start if locked_mhz is None else locked_mhz) / self._reference_mhz)
        return powered if self._is_capped else min(powered, 1.0)

    def top_speed(self, cap_w: float) -> float:
        """The highest speed with at most ``cap_w`` watts; at least 1."""
        limit_w = min(cap_w, self._useful_w) if "power_limit" in self._levers else self._share_w
        return max(1.0, self.speed(limit_w, self._top_clock()))

    def bound(self, cap_w: float) -> str:
        """What holds the highest speed, for people."""
        start, top = self._bounds.start_clock_mhz, self._bounds.max_clock_mhz
        if min(cap_w, self._useful_w) == self._useful_w:
            return f"the clock is at its maximum of {top} MHz"
        limit_w = cap_w if "power_limit" in self._levers else self._share_w
        clock = self._top_clock()
        if start is not None and clock is not None and self.speed(limit_w, clock) >= clock / self._reference_mhz:
            return f"the clocks are {'locked at' if clock == start else 'at their maximum of'} {clock} MHz"
        if start is None and not self._is_capped:
            return "the power limit does not hold the clock"
        if "power_limit" not in self._levers:
            return f"the limit of {self._share_w:g} W may not be raised"
        return f"the ceiling is {cap_w:g} W" + (", the limit at start" if cap_w <= self._bounds.start_w else "")

    def _top_clock(self) -> int | None:
        start = self._bounds.start_clock_mhz
        if start is None or "clocks" not in self._levers:
            return start
        return self._bounds.max_clock_mhz or start

    @property
    def _base_w(self) -> float:
        if self._is_capped or self._power_w is None:
            return self._share_w
        return min(self._share_w, max(self._power_w, self._idle_w + 0.1 * self._share_w))

    @property
    def _slack(self) -> float:
        return 1.0 if self._is_capped else SLACK

    @property
    def _reference_mhz(self) -> float:
        """The clock at speed 1: the locked one, unless power holds it lower."""
        start = self._bounds.start_clock_mhz
        assert start is not None
        return min(start, self._clock_mhz) if self._is_capped and self._clock_mhz else start


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else before + 0.2 * (value - before)
