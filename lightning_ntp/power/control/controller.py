"""The closed loop: a replica that has lost a GPU is given power until it keeps pace with the others.

A pure state machine: no driver, no clock, no thread. Somebody measures, calls :meth:`Controller.step` once per
interval, and writes what it says. A loop in which :meth:`Controller.step` is not called holds what was written last.

1. The plan says how much slower the replica will be; the first limits follow from it at once (feed-forward).
2. Measured compute times, at equal samples, against the median of the replicas that set the pace correct it. A filter
   whose gain falls with what it knows, a deadband and a test of significance keep noise from becoming writes.
3. Heat, brakes and errors lower what a GPU may get (:mod:`~lightning_ntp.power.control.heat`); the budget bounds the
   sum (:mod:`~lightning_ntp.power.control.budget`).
4. What is missing then is said in per cent of the step time, so that samples can move.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from lightning_ntp.power.control.boost import Boost, BoostSettings
from lightning_ntp.power.control.budget import BudgetError, Domain, allocate, ordered
from lightning_ntp.power.control.curve import SpeedCurve
from lightning_ntp.power.control.heat import HeatGuard
from lightning_ntp.power.control.pace import NoiseMeter
from lightning_ntp.power.control.signals import Decision, Measurement

SAME_PACE = 1.001
"""Planned compute times that differ by less than this factor are equal."""
DRAW_READINGS = 2
"""So many readings in a row make the draw of a GPU that does not work known."""
DRAW_MARGIN_W = 10.0
"""What such a GPU holds above its highest recent draw, watts."""
DRAW_STEP_W = 20.0
"""A lower draw than before frees power only beyond this, watts, so that noise moves no limits."""


class Controller:
    """Decides the power of the GPUs of one domain.

    Replicas with the shortest planned compute time set the pace and are left alone; every other one that lives is
    boosted. If all replicas have lost equally many GPUs nobody waits for anybody, and nothing is boosted.

    Args:
        domain: The GPUs, their bounds and their budget.
        settings: See there.
    """

    def __init__(self, domain: Domain, settings: BoostSettings | None = None) -> None:
        self._domain, self._settings = domain, settings or BoostSettings()
        self._curves = {
            each.gpu: SpeedCurve(each, domain.shares_w[each.gpu], self._settings.idle_w, self._settings.levers)
            for each in domain.gpus
        }
        self._homes: dict[int, int] = {}
        for each in domain.gpus:
            self._homes[each.replica] = self._homes.get(each.replica, 0) + 1
        self._guards: dict[str, HeatGuard] = {}
        self._boosts: dict[int, Boost] = {}
        self._draws: dict[str, _Draw] = {}
        self._before: dict[int, NoiseMeter] = {}
        self._asked: dict[str, float] = {}
        # a budget below the sum of the limits at start is ours to bring about; other limits are the operator's until
        # they are changed here
        self._ours = {each.gpu for each in domain.gpus if domain.shares_w[each.gpu] < each.start_w}

    def step(self, measurement: Measurement) -> Decision:
        """Take one interval in and say what shall be.

        Raises:
            BudgetError: If a GPU is not in the domain.
        """
        live = {replica: gpus for replica, gpus in measurement.live.items() if gpus}
        working = {gpu for gpus in live.values() for gpu in gpus}
        if unknown := sorted(working - self._domain.by_gpu.keys()):
            raise BudgetError(f"{', '.join(unknown)}: not in the domain of {len(self._domain.gpus)} GPUs")
        away = self._away(measurement, working)
        relative = self._relative(measurement, live)
        self._place(live, relative)
        self._learn(measurement, live)
        times = _equal_times(measurement, live)
        for replica in times.keys() & relative.keys():
            ratio = _ratio(times, [r for r, planned in relative.items() if planned == 1.0 and r != replica], replica)
            if ratio is not None and replica not in self._boosts:
                self._before.setdefault(replica, NoiseMeter()).hear(math.log(ratio))
        for replica, boost in self._boosts.items():
            ratio = _ratio(times, [r for r, planned in relative.items() if planned == 1.0], replica)
            boost.hear(measurement.gpus, ratio, measurement.now_s)
        wanted = {replica: boost.want(measurement.gpus) for replica, boost in self._boosts.items()}
        limits, speeds = self._level(wanted, away)
        reach = {replica: self._reach(replica, wanted, away) for replica in self._boosts}
        for replica, boost in self._boosts.items():
            boost.take(speeds[replica], limits, limited=speeds[replica] < wanted[replica] - 1e-4)
        missing = {
            replica: 100 * math.expm1(boost.pace.value)
            for replica, boost in self._boosts.items()
            if boost.is_short(reach[replica])
        }
        return self._decision(measurement, limits, away, missing, reach)

    # ---- who is what ------------------------------------------------------------------------------------------

    def _away(self, measurement: Measurement, working: set[str]) -> dict[str, float | None]:
        """GPU that does not work -> the draw that is counted, watts."""
        away: dict[str, float | None] = {}
        for each in self._domain.gpus:
            if each.gpu in working:
                self._draws.pop(each.gpu, None)
                continue
            reading = measurement.gpus.get(each.gpu)
            draw = self._draws.setdefault(each.gpu, _Draw())
            away[each.gpu] = draw.hear(None if reading is None else reading.power_w)
        return away

    def _relative(self, measurement: Measurement, live: Mapping[int, tuple[str, ...]]) -> dict[int, float]:
        """Replica -> planned compute time over that of those who set the pace."""
        planned = {
            replica: measurement.planned.get(replica, max(1.0, self._homes.get(replica, 0) / len(gpus)))
            for replica, gpus in live.items()
        }
        fastest = min(planned.values(), default=1.0)
        return {replica: time / fastest if time > SAME_PACE * fastest else 1.0 for replica, time in planned.items()}

    def _place(self, live: Mapping[int, tuple[str, ...]], relative: Mapping[int, float]) -> None:
        """Who is boosted from now on."""
        for replica in [r for r in self._boosts if relative.get(r, 1.0) == 1.0]:
            for gpu in self._boosts.pop(replica).gpus:
                self._guards.pop(gpu)
        for replica, times in relative.items():
            if times == 1.0:
                continue
            curves = {gpu: self._curves[gpu] for gpu in live[replica]}
            for gpu in curves:
                if gpu not in self._guards:
                    share_w, top_w = self._domain.shares_w[gpu], self._domain.by_gpu[gpu].top_w
                    self._guards[gpu] = HeatGuard(share_w, top_w, self._settings.heat, self._curves[gpu].rest)
            guards = {gpu: self._guards[gpu] for gpu in curves}
            if replica in self._boosts:
                self._boosts[replica].replan(curves, guards, times)
            else:
                self._boosts[replica] = Boost(
                    curves, guards, times, self._before.pop(replica, NoiseMeter()), self._settings
                )

    def _learn(self, measurement: Measurement, live: Mapping[int, tuple[str, ...]]) -> None:
        """What the GPUs of replicas without a boost draw at their own limits."""
        for replica, gpus in live.items():
            if replica in self._boosts:
                continue
            for gpu in gpus:
                reading = measurement.gpus.get(gpu)
                # at another limit, one that somebody else has set for instance, it shows another speed
                share_w = self._domain.shares_w[gpu]
                if reading is not None and abs((reading.limit_w or share_w) - share_w) < 1:
                    self._curves[gpu].learn(reading)

    # ---- what they get ----------------------------------------------------------------------------------------

    def _level(
        self, wanted: Mapping[int, float], away: Mapping[str, float | None]
    ) -> tuple[dict[str, float], dict[int, float]]:
        """Limits for all, and the speed of every boosted replica: that of its GPU that gets least."""
        speeds = dict(wanted)
        for _ in range(2):  # the second time nobody is given more than its slowest fellow makes use of
            wishes = {g: w for r, speed in speeds.items() for g, w in self._boosts[r].wishes_w(speed).items()}
            limits = allocate(self._domain, wishes, away)
            speeds = {r: self._boosts[r].granted(limits, speed) for r, speed in speeds.items()}
        return limits, speeds

    def _reach(self, replica: int, wanted: Mapping[int, float], away: Mapping[str, float | None]) -> float:
        """The speed that a replica could have now if it asked for all it may."""
        return self._level({**wanted, replica: self._boosts[replica].top()}, away)[1][replica]

    def _decision(
        self,
        measurement: Measurement,
        limits: dict[str, float],
        away: Mapping[str, float | None],
        missing: Mapping[int, float],
        reach: Mapping[int, float],
    ) -> Decision:
        present = {}
        for gpu, limit in limits.items():
            reading = measurement.gpus.get(gpu)
            now = None if reading is None else reading.limit_w
            present[gpu] = self._asked.get(gpu, self._domain.by_gpu[gpu].start_w) if now is None else now
            if limit != self._domain.shares_w[gpu]:
                self._ours.add(gpu)
            elif self._domain.shares_w[gpu] == self._domain.by_gpu[gpu].start_w and abs(present[gpu] - limit) < 0.001:
                self._ours.discard(gpu)
        wanted = {gpu: limit for gpu, limit in limits.items() if gpu in self._ours}
        self._asked = dict(wanted)
        held = sum(self._domain.held_w(gpu, draw) for gpu, draw in away.items())
        clocks = {}
        boosted = {gpu: boost for boost in self._boosts.values() for gpu in boost.gpus}
        for gpu in limits:
            speed = math.exp(boosted[gpu].speed) if gpu in boosted else 1.0
            clock = self._curves[gpu].clocks_mhz(speed)
            if clock is not None:
                clocks[gpu] = clock
        return Decision(
            limits_w=limits,
            clocks_mhz=clocks,
            writes=ordered(present, wanted, self._domain.total_w, held),
            held_w=held,
            relative_time={
                replica: self._boosts[replica].relative_time if replica in self._boosts else 1.0
                for replica, gpus in measurement.live.items()
                if gpus
            },
            missing_percent=missing,
            notes=self._notes(away, missing, reach),
        )

    def _notes(
        self, away: Mapping[str, float | None], missing: Mapping[int, float], reach: Mapping[int, float]
    ) -> tuple[str, ...]:
        notes = []
        for replica, boost in sorted(self._boosts.items()):
            share_w = min(self._domain.shares_w[gpu] for gpu in boost.gpus)
            top_w = min(self._curves[gpu].limit_w(math.exp(reach[replica])) for gpu in boost.gpus)
            why = boost.why() if reach[replica] > boost.top() - 1e-4 else "what may be lent is used up"
            if reach[replica] <= 1e-4:
                notes.append(f"replica {replica}: headroom 0 W: {why}")
            elif replica in missing:
                notes.append(f"replica {replica}: headroom used up, {top_w - share_w:.0f} W per GPU: {why}")
            if replica in missing:
                notes.append(f"replica {replica}: at equal samples its step takes {missing[replica]:.0f} % longer")
        for gpu, draw in sorted(away.items()):
            if draw is None and self._domain.lost_draw_w is None and self._boosts:
                share = self._domain.shares_w[gpu]
                notes.append(f"GPU {gpu}: its draw is not known, so its {share:.0f} W are not lent")
        return tuple(notes)


def _equal_times(measurement: Measurement, live: Mapping[int, tuple[str, ...]]) -> dict[int, float]:
    """Replica -> compute time per step if all had equally many samples, seconds."""
    samples = [measurement.samples[r] for r in live if r in measurement.samples]
    equal = statistics.fmean(samples) if samples else 1.0
    times = {}
    for replica, seconds in measurement.compute_s.items():
        if replica in live and 0 < seconds < math.inf:
            fixed = min(measurement.fixed_s.get(replica, 0.0), seconds)
            times[replica] = fixed + (seconds - fixed) * equal / max(1.0, measurement.samples.get(replica, equal))
    return times


def _ratio(times: Mapping[int, float], others: list[int], replica: int) -> float | None:
    """Compute time of a replica over the median of others, as far as measured."""
    measured = [times[each] for each in others if each in times]
    return times[replica] / statistics.median(measured) if measured and replica in times else None


class _Draw:
    """What a GPU that does not work draws: known after some readings, quick to rise, slow to fall."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=DRAW_READINGS)
        self._counted: float | None = None

    def hear(self, power_w: float | None) -> float | None:
        if power_w is None or not power_w >= 0:
            self._recent.clear()
            self._counted = None
            return None
        self._recent.append(power_w)
        if len(self._recent) < DRAW_READINGS:
            return math.inf  # it can be read, and is soon known: until then it may draw all that it has
        highest = max(self._recent)
        if self._counted is None or not self._counted - DRAW_MARGIN_W - DRAW_STEP_W <= highest <= self._counted:
            self._counted = highest + DRAW_MARGIN_W
        return self._counted
