"""Runs of the control loop over the simulated machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_ntp.power.control import BoostSettings, Controller, Decision, Pace, split
from tests.power.plant import Machine, Plant

LOST = "GPU-13"
"""The GPU that is lost where nothing else is said: index 3 of replica 1."""


@dataclass(frozen=True)
class Run:
    """A run, interval by interval."""

    plant: Plant
    decisions: list[Decision]
    lost_at: int

    @property
    def gaps(self) -> list[float]:
        """By how much replica 1 was really slower than replica 0 at equal samples, as a fraction."""
        return [record.per_sample_s[1] / record.per_sample_s[0] - 1 for record in self.plant.records]

    def intervals_to(self, width: float) -> int | None:
        """Intervals from the loss until the gap is within ``width`` and stays there; None if it is not at the end."""
        last = max((k for k, gap in enumerate(self.gaps) if abs(gap) > width), default=self.lost_at)
        return None if last == len(self.gaps) - 1 else max(0, last + 1 - self.lost_at)

    def writes(self, first: int, last: int | None = None) -> int:
        """Writes from interval ``first`` after the loss on."""
        end = None if last is None else self.lost_at + last
        return sum(record.writes for record in self.plant.records[self.lost_at + first : end])


def simulate(
    machine: Machine,
    intervals: int = 60,
    lost_at: int = 5,
    settings: BoostSettings | None = None,
    events: Mapping[int, Callable[[Plant], None]] | None = None,
    shares: bool = False,
    readable: bool = True,
) -> Run:
    """Run the loop; :data:`LOST` is lost in interval ``lost_at``.

    Args:
        machine: The plant.
        intervals: How many.
        lost_at: When.
        settings: Of the controller.
        events: Interval -> what happens before it.
        shares: Whether samples move.
        readable: Whether the lost GPU can still be asked.
    """
    plant, decisions = Plant(machine), []
    controller = Controller(plant.domain, settings)
    for interval in range(intervals):
        if interval == lost_at:
            plant.lose(LOST, readable)
        if events and interval in events:
            events[interval](plant)
        decision = controller.step(plant.interval())
        plant.obey(decision)
        decisions.append(decision)
        if shares:
            paces = {replica: Pace(time) for replica, time in decision.relative_time.items()}
            plant.samples = split(machine.batch, paces, plant.samples, gain=0.005)
    return Run(plant, decisions, lost_at)
