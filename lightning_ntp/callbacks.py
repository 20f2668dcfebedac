"""Callbacks for the Trainer, by the path that YAML uses: ``class_path: lightning_ntp.callbacks.FaultInjector``."""

from lightning_ntp.lightning.callbacks.fault_injector import FaultInjector, InjectedFault
from lightning_ntp.lightning.callbacks.fault_schedule import Fault
from lightning_ntp.lightning.callbacks.health_monitor import HealthMonitor
from lightning_ntp.lightning.callbacks.power_manager import PowerManager

__all__ = ["Fault", "FaultInjector", "HealthMonitor", "InjectedFault", "PowerManager"]
