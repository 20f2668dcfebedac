"""What was read of a device at one moment: numbers by name, and what it does not say."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIGNALS: dict[str, tuple[str, ...]] = {
    "recovery_action": ("recovery_action",),
    "ecc_uncorrected": ("ecc_uncorrected_total", "ecc_uncorrected_dram", "ecc_uncorrected_sram"),
    "sram_threshold": ("sram_threshold_exceeded",),
    "row_remap_pending": ("row_remap_pending",),
    "row_remap_failure": ("row_remap_failure",),
    "nvlink_down": ("nvlink_active",),
    "nvlink_errors": ("nvlink_errors",),
    "fabric": ("fabric_state",),
    "temperature": ("temperature_c",),
    "temperature_margin": ("temperature_margin_c",),
    "thermal_slowdown": ("clocks_event_reasons",),
    "power_brake": ("clocks_event_reasons",),
    "pcie_replays": ("pcie_replays",),
    "power": ("power_w",),
    "power_limit": ("power_limit_w",),
    "energy": ("energy_j",),
    "sm_clock": ("sm_clock_mhz",),
    "memory": ("memory_used_bytes",),
}
"""What can be known of a device, and the values that say it: any one of them will do."""


@dataclass(frozen=True)
class Link:
    """An NVLink. States are those of ``NVML_NVLINK_STATE_*``; errors are those that its counters have seen so far."""

    state: int
    errors: float = 0.0

    @property
    def active(self) -> bool:
        return self.state in (1, 2)  # 2: asleep to save power


@dataclass(frozen=True)
class Reading:
    """What one look has read of a device.

    Args:
        gpu: UUID of the device or MIG instance.
        at: When, in seconds on the machine's monotonic clock.
        values: Numbers by name with unit (``temperature_c``, ``power_w``, ``memory_used_bytes``; a name without one is
            a count, a flag or a code of NVML).
        links: NVLinks by number.
        unsupported: Signals (:data:`SIGNALS`) of which the device says nothing: unknown, which is not healthy.
        kept: Names of values that could not be read this time, and are as they were.
    """

    gpu: str
    at: float
    values: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[int, Link] = field(default_factory=dict)
    unsupported: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()

    @property
    def age(self) -> float:
        """Seconds since."""
        return time.monotonic() - self.at

    def to_message(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            "at": self.at,
            "values": dict(self.values),
            "links": [[number, link.state, link.errors] for number, link in self.links.items()],
            "unsupported": sorted(self.unsupported),
            "kept": sorted(self.kept),
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Reading:
        links = {number: Link(state, errors) for number, state, errors in message["links"]}
        unsupported, kept = frozenset(message["unsupported"]), frozenset(message["kept"])
        return cls(message["gpu"], message["at"], message["values"], links, unsupported, kept)
