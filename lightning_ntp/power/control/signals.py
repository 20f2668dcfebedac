"""What the control loop is told and what it answers: values that can be printed, recorded and played back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_ntp.power.control.budget import Write

Lever = Literal["power_limit", "clocks"]
"""What may be turned: the power limit, or the upper end of locked graphics clocks (only where they were locked)."""

Reason = Literal["power_cap", "sw_thermal", "hw_thermal", "power_brake"]
"""Why a clock is below its maximum: NVML's clock event reasons SwPowerCap, SwThermalSlowdown, HwThermalSlowdown and
HwPowerBrakeSlowdown."""


@dataclass(frozen=True)
class GpuReading:
    """What a GPU said. None is what could not be read.

    Args:
        limit_w: Its power limit now, watts.
        power_w: Its mean draw since the last reading, watts.
        margin_c: Degrees C to the temperature at which the driver slows it down.
        clock_mhz: Its graphics clock while it computed.
        locked_mhz: The upper end of its locked clocks, as last written; None if they are as at the start.
        reasons: Why its clock is below the maximum.
        errors: Errors so far that were corrected (memory, links): any count that only grows.
    """

    limit_w: float | None = None
    power_w: float | None = None
    margin_c: float | None = None
    clock_mhz: float | None = None
    locked_mhz: int | None = None
    reasons: frozenset[Reason] = frozenset()
    errors: int | None = None


@dataclass(frozen=True)
class Measurement:
    """One interval of a job.

    Args:
        now_s: When it ends, seconds on a clock that never goes back.
        gpus: GPU -> reading, of every GPU that could be read, also of those that do not work.
        live: Replica -> the GPUs that work in it; a replica that is gone is empty or missing. Say that a GPU comes back
            *before* it does: what it has lent must be back first.
        compute_s: Replica -> compute time per step over the interval, seconds, without waiting for others. Replicas
            that made no step are missing.
        samples: Replica -> samples per step. Missing ones have as many as everybody.
        fixed_s: Replica -> the part of its compute time that does not depend on samples, seconds.
        planned: Replica -> compute time over that at full degree, planned from the largest shares
            (:func:`~lightning_ntp.power.control.workload.relative_compute_time`). Missing: as many times as GPUs are
            missing.
    """

    now_s: float
    gpus: Mapping[str, GpuReading]
    live: Mapping[int, tuple[str, ...]]
    compute_s: Mapping[int, float]
    samples: Mapping[int, int] = field(default_factory=dict)
    fixed_s: Mapping[int, float] = field(default_factory=dict)
    planned: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What shall be.

    Args:
        limits_w: GPU that works -> power limit, watts; the limits at start where nothing is boosted.
        clocks_mhz: GPU that works and whose clocks were locked -> upper end of the locked clocks. To be written after
            the limits; the limits bound the power in any order.
        writes: The limits that differ from those read, in an order in which the budget holds at every moment. After
            a failed write ask :func:`~lightning_ntp.power.control.budget.next_write` for the rest.
        held_w: What GPUs that do not work hold of the budget, watts.
        relative_time: Replica -> its compute time at equal samples over that of the replicas that set the pace,
            filtered, as far as power has shown that it cannot make it up. What
            :func:`~lightning_ntp.power.control.shares.split` wants to know.
        missing_percent: Replica -> by how many per cent its step takes longer at equal samples, where no headroom is
            left: work for samples to move.
        notes: What a person should know of the state now, in order of replicas; the same as before if nothing changes.
    """

    limits_w: Mapping[str, float]
    clocks_mhz: Mapping[str, int]
    writes: tuple[Write, ...]
    held_w: float
    relative_time: Mapping[int, float]
    missing_percent: Mapping[int, float]
    notes: tuple[str, ...]
