"""The model summary of the unsharded model, whatever this rank holds of it."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary
from torch import nn
from typing_extensions import override

from lightning_ntp.parallel import ShardedModel


class UnshardedSummary(ModelSummary):
    """Counts whole parameters. Sizes of inputs and outputs, and operations, are those of this rank.

    Args:
        module: The user's module.
        sharded: The same module, cut.
        max_depth: As for Lightning's own.
    """

    def __init__(self, module: LightningModule, sharded: ShardedModel, max_depth: int) -> None:
        self._module = module
        self._whole = {parameter: entry.shape.numel() for parameter, entry in sharded.by_parameter().items()}
        super().__init__(module, max_depth=max_depth)

    @property
    @override
    def param_nums(self) -> list[int]:
        return [self._size(self._module.get_submodule(name)) for name in self.layer_names]

    @property
    @override
    def total_parameters(self) -> int:
        return self._size(self._module)

    @property
    @override
    def trainable_parameters(self) -> int:
        return self._size(self._module, trainable=True)

    def _size(self, module: nn.Module, trainable: bool = False) -> int:
        return sum(self._whole.get(p, p.numel()) for p in module.parameters() if p.requires_grad or not trainable)
