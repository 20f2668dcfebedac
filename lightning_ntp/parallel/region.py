"""What happens at the border of a block that computes on shards.

Inputs enter once for the whole block (one backward all-reduce instead of one per projection), and random
numbers drawn inside do not disturb those drawn outside: indices hold different amounts of units, so they
draw different amounts, and tensor-parallel peers must agree again on the first mask after the block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_ntp.parallel.collectives import enter_region
from lightning_ntp.parallel.context import TensorParallelContext


class Region:
    """Forward hooks of one block. Attach with :meth:`attach`."""

    def __init__(self, module: nn.Module, place: TensorParallelContext) -> None:
        self.place = place
        self.draws = _may_draw(module)
        self._outer: list[tuple[torch.Generator, Tensor]] = []

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        # always_call: an exception inside must not leave the inner random state behind
        module.register_forward_hook(self._leave, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        copied = object.__new__(Region)
        copied.place, copied.draws, copied._outer = self.place, self.draws, []
        memo[id(self)] = copied
        return copied

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.place.degree == 1:
            return None
        args = tuple(_entered(a, self.place) for a in args)
        kwargs = {k: _entered(v, self.place) for k, v in kwargs.items()}
        if self.draws and module.training:
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            for generator in _generators(device):
                # drawn from the outer stream: equal on all peers, other in every block and step
                seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
                self._outer.append((generator, generator.get_state()))
                generator.manual_seed((seed + 0x9E3779B97F4A7C15 * (self.place.index + 1)) % 2**63)
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._outer:
            generator, state = self._outer.pop()
            generator.set_state(state)


def _entered(value: Any, place: TensorParallelContext) -> Any:
    if isinstance(value, Tensor):
        return enter_region(value, place)
    if type(value) in (tuple, list):  # rotary (cos, sin) pairs and the like
        return type(value)(_entered(v, place) for v in value)
    return value


def _may_draw(module: nn.Module) -> bool:
    """Whether the block may draw random numbers in training: a dropout module or a dropout probability."""
    for child in module.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            return True
        for name, value in vars(child).items():
            if "drop" in name.lower() and isinstance(value, float) and value > 0:
                return True
    return False


def _generators(device: torch.device) -> list[torch.Generator]:
    found = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[device.index or 0])
    return found
