"""Processes: a supervisor that owns the ranks of a job and trains nothing itself. No Lightning in here.

``run_script(4)`` re-runs the current script in 4 ranks, ``run_call(4, function, ...)`` calls a function in 4 ranks;
inside a rank :class:`RankIdentity` says who it is and :class:`StopRequest` whether it should stop. A newcomer, started
again while the others work, calls ``report_alone(False)`` when it has become a member, or leaves with ``REFUSED``.
"""

from lightning_ntp.launch.environment import RankIdentity, is_rank
from lightning_ntp.launch.newcomers import REFUSED
from lightning_ntp.launch.outcome import Failure, Outcome, RanksFailedError
from lightning_ntp.launch.report import report_alone
from lightning_ntp.launch.run import run_call, run_script
from lightning_ntp.launch.stop import StopRequest
from lightning_ntp.launch.supervisor import Supervisor

__all__ = [
    "REFUSED",
    "Failure",
    "Outcome",
    "RankIdentity",
    "RanksFailedError",
    "StopRequest",
    "Supervisor",
    "is_rank",
    "report_alone",
    "run_call",
    "run_script",
]
