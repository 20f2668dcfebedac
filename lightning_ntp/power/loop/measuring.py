"""What the controller is told of an interval, from the driver's readings and the ranks' progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_ntp.nvml.readings import Reading
from lightning_ntp.power.control import GpuReading, Measurement
from lightning_ntp.power.loop.domain import Levers
from lightning_ntp.power.loop.paces import PaceMeter
from lightning_ntp.power.loop.places import Work
from lightning_ntp.power.readings import GpuReadings

_STALE_INTERVALS = 3.0


class Measurer:
    """Takes intervals.

    Args:
        paces: Measures what replicas compute.
        readings: Gives the driver's newest readings, by UUID.
        interval: Seconds between two intervals.
        max_temperature: Degrees C that a GPU shall not pass; None: its own margin alone counts.
    """

    def __init__(
        self,
        paces: PaceMeter,
        readings: Callable[[], Mapping[str, Reading]],
        interval: float,
        max_temperature: float | None,
    ) -> None:
        self._paces, self._readings, self._max_c = paces, readings, max_temperature
        self._kept = GpuReadings(_STALE_INTERVALS * max(1.0, interval))
        self._written_at: dict[str, float] = {}
        self._replicas: dict[int, tuple[int, ...]] = {}
        self._samples: dict[int, int] = {}

    def written(self, gpu: str, now: float) -> None:
        """Its limit was written: readings of before say nothing of it."""
        self._written_at[gpu] = now
        self._paces.begin_anew()

    def changed(self, replicas: Mapping[int, tuple[int, ...]]) -> None:
        """Begin anew if others work than in the interval before."""
        if replicas != self._replicas:
            self._paces.begin_anew()
            self._replicas = dict(replicas)

    def measure(
        self, levers: Levers, replicas: Mapping[int, tuple[int, ...]], idle: set[int], work: Work, now: float
    ) -> Measurement:
        """One interval.

        Args:
            levers: The GPUs.
            replicas: Replica -> its slots that work.
            idle: Slots that do not work yet, and may begin at any moment: spares, ranks that have not joined.
            work: What rank 0 has said.
            now: Seconds on the monotonic clock.
        """
        of_slot = levers.of_slot
        live = {replica: tuple(of_slot[slot] for slot in slots) for replica, slots in replicas.items()}
        # who works there is known before rank 0 has said what that takes: until then the controller counts GPUs
        said = [r for r, slots in replicas.items() if r in work.planned and work.degrees.get(r, 0) == len(slots)]
        planned = {replica: work.planned[replica] for replica in said}
        for slot in idle:
            # each a replica by itself, as fast as the fastest: it keeps its power, and nobody is measured by it
            live[-1 - slot] = (of_slot[slot],)
            planned[-1 - slot] = min(planned.values(), default=1.0)
        samples = {replica: count for replica, count in work.samples.items() if replica in replicas}
        if samples != self._samples:  # what was measured so far is of another number of them, in part
            self._paces.begin_anew()
            self._samples = samples
        readings = self._gpu_readings(levers, now)
        return Measurement(now, readings, live, self._paces.measure(replicas), samples, {}, planned)

    def _gpu_readings(self, levers: Levers, now: float) -> dict[str, GpuReading]:
        newest, writer = self._readings(), levers.writer
        mine = {gpu: newest[gpu] for gpu in levers.of_slot.values() if gpu in newest}
        found = self._kept.take(mine, {} if writer is None else writer.clocks_mhz, now)
        for gpu, each in found.items():
            if writer is not None and mine[gpu].at <= self._written_at.get(gpu, 0.0):
                each = replace(each, limit_w=writer.limits_w.get(gpu))
            found[gpu] = self._bounded(each, mine[gpu])
        return found

    def _bounded(self, each: GpuReading, reading: Reading) -> GpuReading:
        """What is left to the user's temperature, if that is less."""
        if self._max_c is None or "temperature_c" not in reading.values:
            return each
        left = self._max_c - reading.values["temperature_c"]
        return replace(each, margin_c=left if each.margin_c is None else min(left, each.margin_c))
