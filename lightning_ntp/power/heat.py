"""How far one GPU may be boosted as far as heat, brakes and errors go."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lightning_ntp.power.signals import GpuReading

MOST_BLIND = 3
"""Readings in a row that may fail before a boost ends."""


@dataclass(frozen=True)
class HeatLimits:
    """When a boost is taken back.

    Args:
        guard_c: The temperature margin that a boost shall leave, degrees C.
        free_c: How far above that the margin must be before a boost is tried again, degrees C.
        horizon_s: How far ahead the margin is predicted along its present slope, seconds. About the time constant of
            the cooling: then the prediction is the end value.
        watts_per_c: Watts taken back per degree C that is missing; done again until it suffices. The inverse of a
            cooling's thermal resistance would do it at once (near 12 W per degree C for a 700 W GPU).
        errors: Corrected errors within ``window`` readings that end a boost.
        window: See ``errors``.
        retry_s: How long nothing is tried again after a boost was taken back, seconds; twice as long each time.
        longest_retry_s: The longest such time.

    Raises:
        ValueError: If a number is not above 0.
    """

    guard_c: float = 4.0
    free_c: float = 3.0
    horizon_s: float = 30.0
    watts_per_c: float = 6.0
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

    A boost ends at once for a hardware slowdown, a power brake or rising errors, is halved for a software slowdown, and
    is taken back bit by bit when the margin is about to become too small. The limit never falls below the GPU's own
    share: what the operator has set is not ours to judge.

    Args:
        share_w: The limit without a boost, watts.
        top_w: The highest limit, watts.
        limits: See there.
    """

    def __init__(self, share_w: float, top_w: float, limits: HeatLimits) -> None:
        self._share_w, self._top_w, self._limits = share_w, max(share_w, top_w), limits
        self._margins: deque[tuple[float, float]] = deque(maxlen=4)
        self._errors: deque[int] = deque(maxlen=limits.window + 1)
        self._not_before, self._retry, self._settling = float("-inf"), limits.retry_s / 2, 0
        self._blind, self._last_limit_w = 0, share_w
        self._cap_w, self._why = self._top_w, ""

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
        elif boosted and (missing := self._limits.guard_c - self._predicted(reading.margin_c)) > 0:
            if not self._settling:
                step = max(0.02 * limit_w, self._limits.watts_per_c * missing)
                self._lower(min(limit_w, self.cap_w) - step, f"a margin of {reading.margin_c:.0f} C", now_s)
        else:
            self._raise(reading.margin_c, now_s)

    def refused(self, limit_w: float, now_s: float) -> None:
        """A higher limit was asked for and is not there: it is not asked for again for a while."""
        self._lower(limit_w, "a write that had no effect", now_s)

    def _lower(self, cap_w: float, why: str, now_s: float) -> None:
        cap_w = max(self._share_w, cap_w)
        if cap_w < self._cap_w:
            if now_s >= self._not_before:
                # a new occasion, not the next bit of the same one
                self._retry = min(2 * self._retry, self._limits.longest_retry_s)
            self._cap_w, self._settling = cap_w, 2
        self._why, self._not_before = why, now_s + self._retry

    def _raise(self, margin_c: float, now_s: float) -> None:
        if self._cap_w >= self._top_w:
            self._why = ""
        elif now_s >= self._not_before and self._predicted(margin_c) > self._limits.guard_c + self._limits.free_c:
            self._cap_w = min(self._top_w, self._cap_w + 0.03 * self._top_w)
            self._not_before = now_s + self._limits.horizon_s

    def _predicted(self, margin_c: float) -> float:
        """The margin ahead, if it goes on falling as it did; degrees C. A margin that grows is not counted on."""
        (then, before), (now, last) = self._margins[0], self._margins[-1]
        if now <= then:
            return margin_c
        return margin_c + min(0.0, (last - before) / (now - then)) * self._limits.horizon_s

    def _rising(self) -> bool:
        return len(self._errors) > 1 and self._errors[-1] - self._errors[0] >= self._limits.errors
