"""The comm floor: process groups of a generation, gradient sync, moving state. torch.distributed, no Lightning."""

from lightning_ntp.comm import runtime
from lightning_ntp.comm.generation import Generation
from lightning_ntp.comm.gradient_sync import GradientSync
from lightning_ntp.comm.runtime import Runtime
from lightning_ntp.comm.state import broadcast_start, gather_full

__all__ = ["Generation", "GradientSync", "Runtime", "broadcast_start", "gather_full", "runtime"]
