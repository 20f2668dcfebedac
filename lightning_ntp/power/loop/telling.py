"""What an interval has shown: told to people, to rank 0, and to who looks from outside."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_ntp.launch import jobs
from lightning_ntp.power.control import Decision, Measurement
from lightning_ntp.power.loop.domain import Levers
from lightning_ntp.power.loop.energy_meter import EnergyMeter, Spent
from lightning_ntp.power.loop.report import Report

_SAME_TIME = 0.002
"""Relative times that differ by less are not worth a note to rank 0."""


@dataclass(frozen=True)
class Interval:
    """One interval, seen as replicas.

    Args:
        measurement, decision: Of the controller.
        levers: The GPUs.
        gpus: Replica -> its GPUs that work.
        seconds: How long it was.
        steps: Optimizer steps in it, parts of one counted.
        tokens: Of a step; 0 if nobody has said it.
    """

    measurement: Measurement
    decision: Decision
    levers: Levers
    gpus: Mapping[int, list[str]]
    seconds: float
    steps: float
    tokens: int

    def power_w(self, gpu: str) -> float | None:
        """What a GPU drew."""
        reading = self.measurement.gpus.get(gpu)
        return None if reading is None else reading.power_w

    @property
    def watts(self) -> dict[int, float | None]:
        """Replica -> what it drew; None if one of its GPUs could not be read."""
        return {replica: _total(map(self.power_w, gpus)) for replica, gpus in self.gpus.items()}

    @property
    def limits_w(self) -> dict[int, float]:
        """Replica -> the sum of its limits."""
        return {r: sum(self.decision.limits_w[gpu] for gpu in gpus) for r, gpus in self.gpus.items()}

    @property
    def start_w(self) -> dict[int, float]:
        """Replica -> the sum of the limits of the same GPUs without a boost."""
        shares = self.levers.domain.shares_w
        return {r: sum(shares[gpu] for gpu in gpus) for r, gpus in self.gpus.items()}

    def is_boosted(self, replica: int) -> bool:
        """Whether its GPUs have more than at the start."""
        return self.limits_w[replica] > self.start_w[replica] + 0.5


class Telling:
    """Tells.

    Args:
        job_dir: The job's directory.
        report: For people.
    """

    def __init__(self, job_dir: Path, report: Report) -> None:
        self._job_dir, self._report, self._energy = job_dir, report, EnergyMeter()
        self._times: dict[int, float] = {}
        self._serial = 0
        self._base_w: dict[str, float] = {}
        """GPU -> what it draws without a boost, watts."""
        self._told: set[tuple[int, int]] = set()
        """Replica and number of the powers whose price was told."""

    def tell(self, interval: Interval) -> None:
        """One interval."""
        spent = self._energy.take(interval.seconds, interval.watts, interval.steps, interval.tokens)
        notes = interval.decision.notes
        if interval.levers.powered:
            counts = {replica: len(gpus) for replica, gpus in interval.gpus.items()}
            self._report.limits(interval.limits_w, interval.start_w, counts)
            self._learn_prices(interval)
        if interval.levers.writer is None:  # of headroom nobody asks where nothing may be raised
            notes = tuple(note for note in notes if "headroom" not in note)
        self._report.notes(notes, interval.decision.missing_percent)
        self._report.state(_state(interval, spent))

    def times(self, relative: Mapping[int, float]) -> None:
        """Let rank 0 move samples.

        Args:
            relative: Replica -> how slow it is that power does not help, at equal samples.
        """
        now = {replica: time for replica, time in relative.items() if time > 1 + _SAME_TIME}
        before = self._times
        if now.keys() == before.keys() and all(abs(time / before[r] - 1) < _SAME_TIME for r, time in now.items()):
            return
        self._serial += 1
        content = {"serial": self._serial, "relative_time": {str(r): round(time, 4) for r, time in now.items()}}
        with contextlib.suppress(OSError):  # a disk that is full takes no power from anybody; it is tried again
            jobs.write_whole(jobs.paces_note(self._job_dir), json.dumps(content))
            self._times = now

    def _learn_prices(self, interval: Interval) -> None:
        """What a boost costs, from what was measured at the powers that the replica came through."""
        measurement, watts = interval.measurement, interval.watts
        for replica, gpus in interval.gpus.items():
            for gpu in () if interval.is_boosted(replica) else gpus:
                if (power := interval.power_w(gpu)) is not None:
                    self._base_w[gpu] = 0.8 * self._base_w.get(gpu, power) + 0.2 * power
            total, compute_s = watts[replica], measurement.compute_s.get(replica)
            planned = measurement.planned.get(replica)
            if total and compute_s and planned and all(gpu in self._base_w for gpu in gpus):
                sample_s = compute_s / max(1, measurement.samples.get(replica, 1)) / planned
                base_w = sum(self._base_w[gpu] for gpu in gpus) / len(gpus)
                number = self._energy.boosted(replica, interval.seconds, total / len(gpus), sample_s, base_w)
                if interval.is_boosted(replica):
                    self._tell_price(replica, number, base_w)

    def _tell_price(self, replica: int, number: int, base_w: float) -> None:
        """Once for each power, and not again for the next one to it."""
        price = self._energy.price(replica, number)
        if price is None or any((replica, near) in self._told for near in (number - 1, number, number + 1)):
            return
        self._told.add((replica, number))
        power = price.point.watts / base_w
        self._report.event(
            "price",
            f"replica {replica}: {power:.2f} x the power gives {price.speed:.2f} x the speed, and"
            f" {price.efficiency:.2f} x the samples per joule",
            replica,
            power_ratio=round(power, 3),
            speed_ratio=round(price.speed, 3),
            efficiency_ratio=round(price.efficiency, 3),
        )


def _total(watts: Iterable[float | None]) -> float | None:
    """Of all; None if one is not known."""
    total = 0.0
    for each in watts:
        if each is None:
            return None
        total += each
    return total


def _state(interval: Interval, spent: Spent) -> dict[str, object]:
    measurement, decision, powered = interval.measurement, interval.decision, interval.levers.powered
    watts, limits, start = interval.watts, interval.limits_w, interval.start_w
    return {
        "monotonic": measurement.now_s,
        "budget_w": interval.levers.domain.total_w if powered else None,
        "held_w": decision.held_w if powered else None,
        "joules_per_step": spent.joules_per_step,
        "joules_per_token": spent.joules_per_token,
        "notes": list(decision.notes) if powered else [],
        "replicas": {
            str(replica): {
                "gpus": gpus,
                "watts": watts[replica],
                "limit_w": limits[replica] if powered else None,
                "start_w": start[replica] if powered else None,
                "compute_s": measurement.compute_s.get(replica),
                "samples": measurement.samples.get(replica),
                "relative_time": decision.relative_time.get(replica, 1.0),
                "missing_percent": decision.missing_percent.get(replica, 0.0),
            }
            for replica, gpus in interval.gpus.items()
        },
    }
