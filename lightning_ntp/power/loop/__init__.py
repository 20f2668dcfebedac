"""The power loop: measures, decides and writes, in the launching process."""

from lightning_ntp.power.loop.settings import PowerSettings
from lightning_ntp.power.loop.watch import PowerWatch

__all__ = ["PowerSettings", "PowerWatch"]
