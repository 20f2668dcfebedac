"""How far one GPU may be boosted as far as heat, brakes and errors go."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lightning_ntp.power.control.signals import GpuReading

MOST_BLIND = 3
"""Readings in a row that may fail before a boost ends."""
WATTS_PER_C = 8.0
"""What a cooling takes away per degree C if nothing is known of it: that of a 700 W GPU takes 10 or more."""
MOST_COOLED_C = 10.0
"""No GPU at work is believed to be nearer to its air than this, degrees C."""


@dataclass(frozen=True)
class HeatLimits:
    """When a boost is taken back.

    Args:
        guard_c: The temperature margin that a boost shall leave, degrees C.
        free_c: How far above that the margin must be before a limit that was held for heat is raised, degrees C.
        hot_c: The temperature at which the margin is 0, about, degrees C.
        air_c: The coolest air or water that cools, degrees C. What a GPU is above it, at the power it draws, bounds how
            much hotter more power makes it; cooler than it is means careful.
        steady_s: How long the margin must not have fallen before such a limit is raised, seconds.
        errors: Corrected errors within ``window`` readings that end a boost.
        window: See ``errors``.
        retry_s: How long nothing is tried again after a boost was taken back, seconds; twice as long each time.
        longest_retry_s: The longest such time.

    Raises:
        ValueError: If a number is not above 0.
    """

    guard_c: float = 4.0
    free_c: float = 2.0
    hot_c: float = 87.0
    air_c: float = 20.0
    steady_s: float = 60.0
    errors: int = 3
    window: int = 10
    retry_s: float = 300.0
    longest_retry_s: float = 7200.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value!r} must be above 0")


class HeatGuard:
    """Says, reading by reading, up to which power limit one GPU may be boosted.

    The first limit is one at which the GPU stays cool enough for sure, reckoned from its temperature without a boost;
    it is raised step by step while there is margin. A boost ends at once for a hardware slowdown, a power brake or
    rising errors, is halved for a software slowdown, and is taken back bit by bit when the margin becomes small. The
    limit never falls below the GPU's own share: what the operator has set is not ours to judge.

    Args:
        share_w: The limit without a boost, watts.
        top_w: The highest limit, watts.
        limits: See there.
        rest: The margin in degrees C and the power in watts without a boost; None if not known.
    """

    def __init__(
        self, share_w: float, top_w: float, limits: HeatLimits, rest: tuple[float, float] | None = None
    ) -> None:
        self._share_w, self._top_w, self._limits = share_w, max(share_w, top_w), limits
        self._margins: deque[tuple[float, float]] = deque()
        self._errors: deque[int] = deque(maxlen=limits.window + 1)
        self._not_before = self._next_raise = float("-inf")
        self._retry, self._settling = limits.retry_s / 2, 0
        self._blind, self._last_limit_w = 0, share_w
        self._cap_w, self._why = self._top_w, ""
        self._watts_per_c = WATTS_PER_C
        if rest is not None:
            margin_c, power_w = rest
            self._watts_per_c = power_w / max(MOST_COOLED_C, limits.hot_c - margin_c - limits.air_c)
            sure_w = power_w + (margin_c - limits.guard_c) * self._watts_per_c
            if sure_w < self._top_w:
                self._cap_w = max(share_w, sure_w)
                self._why = f"heat: {margin_c:.0f} C of margin at {power_w:.0f} W"

    @property
    def cap_w(self) -> float:
        """The highest limit now, watts."""
        if not self._blind:
            return self._cap_w
        # one reading may fail; whoever fails for long is not trusted to be cool
        seen = self._share_w if self._blind >= MOST_BLIND else max(self._share_w, self._last_limit_w)
        return min(self._cap_w, seen)

    @property
    def why(self) -> str:
        """What the cap is for; empty if it is the ceiling."""
        return "a temperature that cannot be read" if self._blind else self._why

    def watch(self, reading: GpuReading | None, limit_w: float, now_s: float) -> None:
        """Take a reading in.

        Args:
            reading: What the GPU said; None if nothing.
            limit_w: Its limit during the interval, watts.
            now_s: Seconds.
        """
        self._settling = max(0, self._settling - 1)
        if reading is None or reading.margin_c is None:
            self._blind += 1
            return
        self._blind, self._last_limit_w = 0, limit_w
        self._margins.append((now_s, reading.margin_c))
        while len(self._margins) > 2 and self._margins[1][0] <= now_s - self._limits.steady_s:
            self._margins.popleft()  # one is left that is at least so old
        if reading.errors is not None:
            self._errors.append(reading.errors)
        boosted = limit_w > self._share_w
        if reading.reasons & {"hw_thermal", "power_brake"}:
            brake = "power_brake" in reading.reasons
            self._lower(self._share_w, "a power brake" if brake else "a slowdown by the hardware's heat", now_s)
        elif boosted and self._rising():
            self._lower(self._share_w, "corrected errors that become more", now_s)
        elif "sw_thermal" in reading.reasons:
            if not self._settling:
                self._lower((self._share_w + min(limit_w, self.cap_w)) / 2, "a slowdown by heat", now_s)
        elif boosted and (missing := self._limits.guard_c - self._predicted()) > 0:
            if not self._settling:
                step = max(0.02 * limit_w, self._watts_per_c * missing)
                self._lower(min(limit_w, self._cap_w) - step, f"a margin of {reading.margin_c:.0f} C", now_s)
        else:
            self._raise(limit_w, now_s)

    def _lower(self, cap_w: float, why: str, now_s: float) -> None:
        cap_w = max(self._share_w, cap_w)
        if cap_w < self._cap_w:
            if now_s >= self._not_before:
                # a new occasion, not the next bit of the same one
                self._retry = min(2 * self._retry, self._limits.longest_retry_s)
            self._cap_w, self._settling = cap_w, 2
        self._why, self._not_before = why, now_s + self._retry

    def _raise(self, limit_w: float, now_s: float) -> None:
        if self._cap_w >= self._top_w:
            self._why = ""
        steady = self._margins[0][0] <= now_s - self._limits.steady_s
        free = self._margins[-1][1] - self._limits.guard_c - self._limits.free_c
        # a cap that does not bind says nothing about what it allows
        binds = limit_w > 0.97 * self._cap_w or self._cap_w <= self._share_w
        if (
            self._cap_w >= self._top_w
            or not binds
            or now_s < max(self._not_before, self._next_raise)
            or not steady
            or free <= 0
        ):
            return
        if self._margins[-1][1] >= self._margins[0][1]:
            step = max(0.02 * self._top_w, 0.5 * free * self._watts_per_c)
            self._cap_w = min(self._top_w, self._cap_w + step)
            self._next_raise = now_s + self._limits.steady_s

    def _predicted(self) -> float:
        """The margin two intervals ahead, if it goes on falling as it does, degrees C. A rise is not counted on."""
        if len(self._margins) < 2:
            return self._margins[-1][1]
        before, last = self._margins[-2][1], self._margins[-1][1]
        return last + 2 * min(0.0, last - before)

    def _rising(self) -> bool:
        return len(self._errors) > 1 and self._errors[-1] - self._errors[0] >= self._limits.errors
