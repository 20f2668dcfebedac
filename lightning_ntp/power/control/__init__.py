"""Power and pace: how much power each GPU gets when a replica has lost one. No torch, no Lightning."""

from lightning_ntp.power.control.boost import BoostSettings
from lightning_ntp.power.control.budget import BudgetError, Domain, GpuBounds, Write, allocate, next_write, ordered
from lightning_ntp.power.control.controller import Controller
from lightning_ntp.power.control.energy import (
    BoostPrice,
    Energy,
    EnergyPerWork,
    OperatingPoint,
    PowerSample,
    boost_prices,
    energy,
    energy_per_work,
)
from lightning_ntp.power.control.heat import HeatLimits
from lightning_ntp.power.control.shares import Pace, slowest, split
from lightning_ntp.power.control.signals import Decision, GpuReading, Lever, Measurement, Reason
from lightning_ntp.power.control.workload import Block, relative_compute_time

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
