"""Power and pace: how much power each GPU gets when a replica has lost one. No torch, no Lightning."""

from lightning_ntp.power.boost import BoostSettings
from lightning_ntp.power.budget import BudgetError, Domain, GpuBounds, Write, allocate, next_write, ordered
from lightning_ntp.power.control import Controller
from lightning_ntp.power.energy import (
    BoostPrice,
    Energy,
    EnergyPerWork,
    OperatingPoint,
    PowerSample,
    boost_prices,
    energy,
    energy_per_work,
)
from lightning_ntp.power.heat import HeatLimits
from lightning_ntp.power.shares import Pace, slowest, split
from lightning_ntp.power.signals import Decision, GpuReading, Lever, Measurement, Reason
from lightning_ntp.power.workload import Block, relative_compute_time

__all__ = [
    "Block",
    "BoostPrice",
    "BoostSettings",
    "BudgetError",
    "Controller",
    "Decision",
    "Domain",
    "Energy",
    "EnergyPerWork",
    "GpuBounds",
    "GpuReading",
    "HeatLimits",
    "Lever",
    "Measurement",
    "OperatingPoint",
    "Pace",
    "PowerSample",
    "Reason",
    "Write",
    "allocate",
    "boost_prices",
    "energy",
    "energy_per_work",
    "next_write",
    "ordered",
    "relative_compute_time",
    "slowest",
    "split",
]
