"""NVIDIA's driver, asked in a process of its own: whether devices are healthy, and which there are.

Importing it brings in no pynvml: only the process that asks needs it.
"""

from lightning_ntp.nvml.bounds import PowerBounds, power_bounds
from lightning_ntp.nvml.inventory import Gpu, Inventory, find, inventory
from lightning_ntp.nvml.profiles import Profile, Profiles
from lightning_ntp.nvml.readings import Link, Reading
from lightning_ntp.nvml.source import NvmlSource

__all__ = [
    "Gpu",
    "Inventory",
    "Link",
    "NvmlSource",
    "PowerBounds",
    "Profile",
    "Profiles",
    "Reading",
    "find",
    "inventory",
    "power_bounds",
]
