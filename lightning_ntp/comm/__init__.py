"""The comm floor: membership, interruptible groups, gradient sync, moving state. torch.distributed, no Lightning."""

from lightning_ntp.comm import runtime
from lightning_ntp.comm.generation import Generation
from lightning_ntp.comm.gradient_sync import GradientSync
from lightning_ntp.comm.interruption import Interrupted, JobLost, StaleGroupError
from lightning_ntp.comm.neighbour_copies import NeighbourCopies, Restoring
from lightning_ntp.comm.reshard import Resharding, ShardedState
from lightning_ntp.comm.runtime import Recovery, Runtime
from lightning_ntp.comm.state import broadcast_start, gather_full, gather_whole, sum_over_owners

__all__ = [
    "Generation",
    "GradientSync",
    "Interrupted",
    "JobLost",
    "NeighbourCopies",
    "Recovery",
    "Resharding",
    "Restoring",
    "Runtime",
    "ShardedState",
    "StaleGroupError",
    "broadcast_start",
    "gather_full",
    "gather_whole",
    "runtime",
    "sum_over_owners",
]
