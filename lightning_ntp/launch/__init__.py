"""Processes: a supervisor that owns the ranks of a job and trains nothing itself. No Lightning in here.

``run_script(4)`` re-runs the current script in 4 ranks, ``run_call(4, function, ...)`` calls a function in 4 ranks;
inside a rank :class:`RankIdentity` says who it is and :class:`StopRequest` whether it should stop.
"""

from lightning_ntp.launch.environment import RankIdentity, is_rank
from lightning_ntp.launch.outcome import Failure, Outcome, RanksFailedError
from lightning_ntp.launch.stop import StopRequest
from lightning_ntp.launch.supervisor import Supervisor, run_call, run_script

__all__ = [
    "Failure",
    "Outcome",
    "RankIdentity",
    "RanksFailedError",
    "StopRequest",
    "Supervisor",
    "is_rank",
    "run_call",
    "run_script",
]
