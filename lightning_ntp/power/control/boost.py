"""The boost of one replica: how much faster its GPUs shall run than at the start.

All GPUs of a replica get one speed, that of the one which can do least: the slowest sets the pace, and what the others
would run faster is heat for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_ntp.power.control.curve import SpeedCurve
from lightning_ntp.power.control.heat import HeatGuard, HeatLimits
from lightning_ntp.power.control.pace import NoiseMeter, PaceFilter
from lightning_ntp.power.control.signals import GpuReading, Lever

KEEP = 0.004
"""Changes of speed below this are not worth a write."""
PLAN_SPREAD = 0.06
"""Standard deviation of the planned compute time, as a fraction."""
LONGEST_STEP = 0.15
"""The most that the logarithm of the speed changes per interval, whatever the slew limit in watts."""


@dataclass(frozen=True)
class BoostSettings:
    """How the loop behaves.

    Args:
        levers: What may be turned.
        deadband: How much slower or faster than the others a replica may be before anything is done, as a fraction.
        slew_w: The most that a limit is raised per interval, watts. It is lowered at once.
        settle: Intervals after a write whose measurements are not used, because they show the time before.
        idle_w: What a GPU draws without work, watts.
        heat: When a boost is taken back.

    Raises:
        ValueError: If a number is out of range, or there is no lever.
    """

    levers: frozenset[Lever] = frozenset({"power_limit"})
    deadband: float = 0.01
    slew_w: float = 100.0
    settle: int = 1
    idle_w: float = 70.0
    heat: HeatLimits = field(default_factory=HeatLimits)

    def __post_init__(self) -> None:
        if not self.levers or not self.levers <= {"power_limit", "clocks"}:
            raise ValueError(f"levers={sorted(self.levers)} must be some of ['clocks', 'power_limit']")
        if not 0 < self.deadband < 1 or not self.slew_w > 0 or not self.idle_w >= 0 or self.settle < 0:
            raise ValueError(
                f"deadband={self.deadband!r} must be between 0 and 1, slew_w={self.slew_w!r} above 0,"
                f" idle_w={self.idle_w!r} and settle={self.settle!r} at least 0"
            )


class Boost:
    """The state machine of one replica that is slower than planned for the others.

    Speeds are logarithms of the speed over that at the start: 0 is no boost.

    Args:
        gpus: GPU -> its curve, for those that work.
        guards: GPU -> its guard.
        relative: Planned compute time over that of the replicas that set the pace.
        before: The logarithm of its measured compute time over that of the others before the loss, and the noise.
        settings: See there.
    """

    def __init__(
        self,
        gpus: Mapping[str, SpeedCurve],
        guards: Mapping[str, HeatGuard],
        relative: float,
        before: NoiseMeter,
        settings: BoostSettings,
    ) -> None:
        self._settings = settings
        self.gpus, self._guards = gpus, guards
        self._relative = relative
        # GPUs are not alike: what the replica was slower or faster before, it is after
        expected = math.log(relative) + before.level
        self.pace = PaceFilter(expected, PLAN_SPREAD, before)
        self.speed = 0.0
        """What was asked for last."""
        # the interval of the loss shows a mixture
        self._target, self._settling = expected, settings.settle
        self._slewing = self._moved = False
        self._commanded: dict[str, float] = {}
        self._refused, self._refused_until, self._now_s = 0.0, -math.inf, -math.inf
        self._retry = settings.heat.retry_s
        self.relative_time = 1.0
        """Compute time over that of those who set the pace, as far as power cannot make it up. It changes only when a
        change of speed has shown what it does: samples shall not move for what may come to nothing."""

    def replan(self, gpus: Mapping[str, SpeedCurve], guards: Mapping[str, HeatGuard], relative: float) -> None:
        """Who works in the replica, or the plan, has changed: start from the new plan."""
        if gpus.keys() == self.gpus.keys() and relative == self._relative:
            return
        self.pace.expect(math.log(relative / self._relative))
        self.gpus, self._guards, self._relative = gpus, guards, relative
        self._target, self._settling = self.speed + self.pace.value, self._settings.settle
        self._commanded = {gpu: watts for gpu, watts in self._commanded.items() if gpu in gpus}

    # ---- one interval -----------------------------------------------------------------------------------------

    def hear(self, readings: Mapping[str, GpuReading], ratio: float | None, now_s: float) -> None:
        """Take an interval in.

        Args:
            readings: GPU -> reading.
            ratio: Compute time over that of the replicas that set the pace, at equal samples; None if not measured.
            now_s: Seconds.
        """
        self._now_s, settled = now_s, self._settling == 0
        self._settling = max(0, self._settling - 1)
        speeds = []
        for gpu, curve in self.gpus.items():
            reading = readings.get(gpu)
            asked = self._commanded.get(gpu)
            limit_w = curve.limit_w(math.exp(self.speed)) if asked is None else asked
            if reading is not None:
                curve.watch(reading)
                limit_w = limit_w if reading.limit_w is None else reading.limit_w
            self._guards[gpu].watch(reading, limit_w, now_s)
            locked = curve.clocks_mhz(math.exp(self.speed)) if reading is None else reading.locked_mhz
            speeds.append(curve.speed(limit_w, locked))
        if not settled:
            return
        there = math.log(max(0.1, min(speeds)))
        if abs(there - self.speed) > KEEP:
            # a write failed, or somebody else has written: what the loop thinks of follows what is
            if there < self.speed:
                self._refused, self._refused_until = max(0.0, there), now_s + self._retry
                self._retry = min(2 * self._retry, self._settings.heat.longest_retry_s)
            self.pace.move(there - self.speed, doubt=0.5)
            self.speed = self._target = there
            self._commanded = {}
        if ratio is not None:
            self.pace.update(math.log(ratio))

    def want(self, readings: Mapping[str, GpuReading]) -> float:
        """The speed to ask for next, before anybody else's wishes."""
        if abs(self._target - self.speed) <= KEEP and not self._settling:
            if self.pace.significant(self._settings.deadband):
                self._target = self.speed + self.pace.value
        self._target = max(0.0, self._target)
        want = reachable = min(self._target, self.top())
        if want > self.speed:
            want = min(want, max(self.speed, self._within_slew(readings)))
        self._slewing = want < reachable - KEEP
        return self.speed if abs(want - self.speed) <= KEEP and self.speed <= self.top() + 1e-9 else want

    def wishes_w(self, speed: float) -> dict[str, float]:
        """GPU -> the power limit for a speed, watts. What is there already is not changed for nothing."""
        if speed == self.speed and self._commanded.keys() == self.gpus.keys():
            return dict(self._commanded)
        return {gpu: curve.limit_w(math.exp(speed)) for gpu, curve in self.gpus.items()}

    def granted(self, limits_w: Mapping[str, float], asked: float) -> float:
        """The speed that granted limits give if ``asked`` was wished for."""
        speeds = [curve.speed(limits_w[gpu], curve.clocks_mhz(math.exp(asked))) for gpu, curve in self.gpus.items()]
        reached = math.log(max(0.1, min(speeds)))
        return asked if reached >= asked - 1e-5 else reached

    def take(self, speed: float, limits_w: Mapping[str, float], limited: bool) -> None:
        """This is what is asked for from now on.

        Args:
            speed: What the limits give.
            limits_w: GPU -> power limit, watts.
            limited: Whether the budget gave less than was wished for.
        """
        self._moved = speed != self.speed
        if self._moved:
            self.pace.move(speed - self.speed)
            self.speed, self._settling = speed, self._settings.settle
        if limited or not self._slewing:
            self._target = speed  # what cannot be had is not waited for: no wind-up
        self._commanded = {gpu: limits_w[gpu] for gpu in self.gpus}

    def is_short(self, reach: float) -> bool:
        """Whether the replica is too slow and ``reach``, the highest speed that it could be given, is used up."""
        slow = self.pace.value > self._settings.deadband
        short = slow and self.speed >= reach - KEEP
        if not self._settling and not self._moved and (short or not slow):
            self.relative_time = math.exp(self.pace.value) if short else 1.0
        return short

    # ---- what there is ----------------------------------------------------------------------------------------

    def top(self) -> float:
        """The highest speed that ceilings, heat, clocks and refused writes allow."""
        top = math.log(min(curve.top_speed(self._guards[gpu].cap_w) for gpu, curve in self.gpus.items()))
        return min(top, self._refused) if self._now_s < self._refused_until else top

    def why(self) -> str:
        """What holds the highest speed, for people."""
        if self._now_s < self._refused_until:
            return "a write had no effect, or somebody else has lowered a limit"
        slowest = min(self.gpus, key=lambda gpu: self.gpus[gpu].top_speed(self._guards[gpu].cap_w))
        guard = self._guards[slowest]
        if guard.why:
            return f"GPU {slowest} is held at {guard.cap_w:.0f} W by {guard.why}"
        return f"{self.gpus[slowest].bound(guard.cap_w)} (GPU {slowest})"

    def _within_slew(self, readings: Mapping[str, GpuReading]) -> float:
        most = self.speed + LONGEST_STEP
        if "power_limit" not in self._settings.levers:
            return most
        reach = []
        for gpu, curve in self.gpus.items():
            reading = readings.get(gpu)
            now_w = reading.limit_w if reading is not None else None
            if now_w is None:
                now_w = self._commanded.get(gpu, curve.limit_w(1.0))
            clocks = curve.clocks_mhz(math.exp(most))
            reach.append(curve.speed(now_w + self._settings.slew_w, clocks))
        return min(most, math.log(max(0.1, min(reach))))
