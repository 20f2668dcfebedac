"""The parallel floor: tensor-parallel modules for any degree, and plans that apply them. Torch, no Lightning."""

from lightning_ntp.parallel.apply import Plan, match_plan, parallelize
from lightning_ntp.parallel.blocks import MLP, Attention
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.dropout import without_dropout
from lightning_ntp.parallel.named_styles import STYLES
from lightning_ntp.parallel.registry import PlanError, ShardedModel, ShardedParameter, end_graphs, replace_data
from lightning_ntp.parallel.styles import (
    Colwise,
    EmbeddingRowwise,
    ParallelStyle,
    Replicated,
    ReplicatedWithGradAllReduce,
    Rowwise,
)
from lightning_ntp.parallel.unsharded import unsharded

__all__ = [
    "MLP",
    "STYLES",
    "Attention",
    "Colwise",
    "EmbeddingRowwise",
    "ParallelStyle",
    "Plan",
    "PlanError",
    "Replicated",
    "ReplicatedWithGradAllReduce",
    "Rowwise",
    "ShardedModel",
    "ShardedParameter",
    "TensorParallelContext",
    "end_graphs",
    "match_plan",
    "parallelize",
    "replace_data",
    "unsharded",
    "without_dropout",
]
