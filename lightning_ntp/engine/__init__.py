"""The engine floor: what makes a training step. Torch, no Lightning, so that other adapters stay thin."""

from lightning_ntp.engine.clipping import clip_gradients, gradient_norm
from lightning_ntp.engine.consistency import all_equal, differing_copies
from lightning_ntp.engine.events import FILE_NAME, EventLog, describe
from lightning_ntp.engine.first_step import FirstStepCheck, PeerMismatchError, check_same_batch
from lightning_ntp.engine.operations import Operations
from lightning_ntp.engine.recovery import Change, Outcome, PolicyForbids, RecoveryEngine, Released
from lightning_ntp.engine.weights import BatchSizeError, LossWeight, batch_size_of

__all__ = [
    "BatchSizeError",
    "Change",
    "FILE_NAME",
    "EventLog",
    "FirstStepCheck",
    "LossWeight",
    "Operations",
    "Outcome",
    "PeerMismatchError",
    "PolicyForbids",
    "RecoveryEngine",
    "Released",
    "all_equal",
    "batch_size_of",
    "check_same_batch",
    "describe",
    "clip_gradients",
    "differing_copies",
    "gradient_norm",
]
