"""The engine floor: what makes a training step. Torch, no Lightning, so that other adapters stay thin."""

from lightning_ntp.engine.clipping import clip_gradients, gradient_norm
from lightning_ntp.engine.compute_time import ComputeTime
from lightning_ntp.engine.consistency import all_equal, differing_copies
from lightning_ntp.engine.events import FILE_NAME, EventLog, describe
from lightning_ntp.engine.first_step import FirstStepCheck, PeerMismatchError, check_same_batch
from lightning_ntp.engine.operations import Operations
from lightning_ntp.engine.planned import PlannedChange, PlannedEntry
from lightning_ntp.engine.recovery import Change, Outcome, PolicyForbids, RecoveryEngine, Released
from lightning_ntp.engine.verification import (
    CopiesDifferError,
    Pass,
    VerificationError,
    agree,
    check_copies,
    check_deviations,
    deviations,
    sharded_pass,
    tolerance,
    unsharded_pass,
)
from lightning_ntp.engine.weights import BatchSizeError, LossWeight, batch_size_of

__all__ = [
    "BatchSizeError",
    "Change",
    "ComputeTime",
    "CopiesDifferError",
    "FILE_NAME",
    "EventLog",
    "FirstStepCheck",
    "LossWeight",
    "Operations",
    "Outcome",
    "Pass",
    "PlannedChange",
    "PlannedEntry",
    "PeerMismatchError",
    "PolicyForbids",
    "RecoveryEngine",
    "Released",
    "VerificationError",
    "agree",
    "all_equal",
    "batch_size_of",
    "check_copies",
    "check_deviations",
    "check_same_batch",
    "describe",
    "clip_gradients",
    "deviations",
    "differing_copies",
    "gradient_norm",
    "sharded_pass",
    "tolerance",
    "unsharded_pass",
]
