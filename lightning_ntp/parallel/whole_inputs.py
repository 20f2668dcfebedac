"""A layer that the plan leaves out is whole, and so must be what it is given: the first forward looks.

torch would refuse the shapes too, in numbers that say nothing of the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ntp.parallel.modules import ColwiseLinear
from lightning_ntp.parallel.registry import PlanError


def expect_whole_inputs(root: nn.Module) -> None:
    """Check the first input of every linear layer that is not parallel."""
    shards = {name: m for name, m in root.named_modules() if isinstance(m, ColwiseLinear) and not m.gathers}
    if shards:
        for name, module in root.named_modules():
            if type(module) is nn.Linear:
                _FirstInput(name, shards).attach(module)


class _FirstInput:
    """A forward hook that takes itself off."""

    def __init__(self, name: str, shards: dict[str, ColwiseLinear]) -> None:
        self.name, self.shards = name, shards
        self._handle: RemovableHandle | None = None

    def attach(self, module: nn.Linear) -> None:
        self._handle = module.register_forward_pre_hook(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _FirstInput:
        return self  # what a copied module is given needs no look

    def __call__(self, module: nn.Linear, args: tuple[Any, ...]) -> None:
        # a compiler cannot trace the removal; the look itself costs a traced forward nothing
        if self._handle is not None and not torch.compiler.is_compiling():
            self._handle.remove()
        given = args[0].shape[-1] if args and isinstance(args[0], Tensor) and args[0].dim() else module.in_features
        if given == module.in_features:
            return
        sources = [name for name, shard in self.shards.items() if shard.out_features == given]
        if sources:
            raise PlanError(
                f"{self.name!r} is not in the plan, so it takes {module.in_features} whole features, but it is given"
                f" {given}: as many as this rank has of the 'colwise' output of {', '.join(map(repr, sources[:4]))}."
                f" Add {self.name!r}: 'rowwise' to the plan, or make the layer before it 'colwise_gather_output'"
            )
