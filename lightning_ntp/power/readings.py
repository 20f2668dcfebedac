"""From what the driver's process has read to what the control loop is told."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from lightning_ntp.nvml.readings import Reading
from lightning_ntp.power.control.signals import GpuReading, Reason

_SW_POWER_CAP, _HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80
"""NVML's clock event reasons. That of a slowdown by hardware is set with each of the last two, and alone by devices
that do not say which."""
_CORRECTED = ("ecc_corrected_total", "row_remap_correctable", "pcie_replays")
"""Counts of errors that were put right. Not those of NVLinks: some of them may grow on links that are well."""


def gpu_reading(reading: Reading, before: Reading | None, locked_mhz: int | None) -> GpuReading:
    """What a device has said, for the control loop.

    Values that could not be read this time, and are only kept from a former look, are None; counts of errors are as
    they were, since one that is missing for once would look like errors by the next time.

    Args:
        reading: The newest.
        before: The one since which the mean draw is wanted; None if there is none.
        locked_mhz: The upper end of its locked clocks, as last written; None if they are as at the start.
    """
    now = {name: value for name, value in reading.values.items() if name not in reading.kept}
    counts = [reading.values[name] for name in _CORRECTED if name in reading.values]
    return GpuReading(
        limit_w=now.get("power_limit_set_w"),
        power_w=_mean_w(reading, before, now),
        margin_c=now.get("temperature_margin_c"),
        clock_mhz=now.get("sm_clock_mhz"),
        locked_mhz=locked_mhz,
        reasons=_reasons(int(now.get("clocks_event_reasons", 0))),
        errors=int(sum(counts)) if counts else None,
    )


class GpuReadings:
    """Keeps former readings of devices, so that a mean draw is one since the last call, and counts of errors only grow:
    those of a device begin at 0 with its first reading, and neither a reset nor a counter that can be read from now on
    looks like errors.

    Args:
        oldest_s: A reading that is older says nothing of now; some intervals between two looks at a device, in seconds.

    Raises:
        ValueError: If ``oldest_s`` is not above 0.
    """

    def __init__(self, oldest_s: float) -> None:
        if not oldest_s > 0:
            raise ValueError(f"oldest_s={oldest_s!r} must be a number of seconds above 0: some intervals between looks")
        self._oldest_s = oldest_s
        self._last: dict[str, Reading] = {}
        self._before: dict[str, Reading] = {}
        self._errors: dict[str, int] = {}

    def take(
        self, readings: Mapping[str, Reading], locked_mhz: Mapping[str, int], now_s: float | None = None
    ) -> dict[str, GpuReading]:
        """What devices have said since the last call.

        Args:
            readings: The newest of every device (:attr:`lightning_ntp.nvml.NvmlSource.readings`).
            locked_mhz: The upper ends of locked clocks, of those that were written.
            now_s: On the machine's monotonic clock; now, if it is not given.

        Returns:
            By UUID, of the devices whose reading is not too old.
        """
        now_s = time.monotonic() if now_s is None else now_s
        found = {}
        for gpu, reading in readings.items():
            if now_s - reading.at > self._oldest_s:
                continue
            last = self._last.get(gpu)
            if last is not None and last.at < reading.at:  # otherwise nobody has looked since: the same is said again
                self._before[gpu] = last
            self._last[gpu] = reading
            self._errors[gpu] = self._errors.get(gpu, 0) + _new_errors(reading, last)
            told = gpu_reading(reading, self._before.get(gpu), locked_mhz.get(gpu))
            found[gpu] = told if told.errors is None else replace(told, errors=self._errors[gpu])
        return found


def _mean_w(reading: Reading, before: Reading | None, now: Mapping[str, float]) -> float | None:
    """The mean draw since a former reading by its energy counter; else what the device says of about now, in W."""
    if before is not None and "energy_j" in now and "energy_j" in before.values and "energy_j" not in before.kept:
        seconds, joules = reading.at - before.at, now["energy_j"] - before.values["energy_j"]
        if seconds > 0 and joules > 0:  # a counter that stands still counts nothing, one that fell has begun anew
            return joules / seconds
    return now.get("power_average_w", now.get("power_w"))


def _new_errors(reading: Reading, last: Reading | None) -> int:
    former = last.values if last is not None else {}
    counts = [(reading.values[name], former[name]) for name in _CORRECTED if name in reading.values and name in former]
    return int(sum(max(0.0, now - then) for now, then in counts))


def _reasons(mask: int) -> frozenset[Reason]:
    brake, thermal = bool(mask & _POWER_BRAKE), bool(mask & _HW_THERMAL)
    holds: dict[Reason, bool] = {
        "power_cap": bool(mask & _SW_POWER_CAP),
        "sw_thermal": bool(mask & _SW_THERMAL),
        "hw_thermal": thermal or bool(mask & _HW_SLOWDOWN) and not brake,
        "power_brake": brake,
    }
    return frozenset(reason for reason, held in holds.items() if held)
