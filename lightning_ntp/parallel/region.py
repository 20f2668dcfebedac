"""What happens at the border of a block that computes on shards.

Inputs enter once for the whole block (one backward all-reduce instead of one per projection), and random
numbers drawn inside do not disturb those drawn outside: indices hold different amounts of units, so they
draw different amounts, and tensor-parallel peers must agree again on the first mask after the block.

The all-reduce sums gradients of which every index has a part. One that reaches the input around the output
projection (a residual inside of the block) is whole on every index and would count once per index: the first
training forwards look for such a path in the autograd graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_ntp.parallel.collectives import bypasses, enter_region
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.nesting import hidden_gradient, map_tensors, tensors_within
from lightning_ntp.parallel.registry import PlanError


class Region:
    """Forward hooks of one block. Attach with :meth:`attach`.

    Args:
        name: The block's name in the model.
        module: The block.
        place: This rank's place.
    """

    # one more than needed, for a first forward that takes another branch
    CHECKS = 2

    def __init__(self, name: str, module: nn.Module, place: TensorParallelContext) -> None:
        self.name, self.place = name, place
        self.draws = _may_draw(module)
        self._checks = self.CHECKS
        self._entered: set[Node] = set()
        self._outer: list[tuple[torch.Generator, Tensor]] = []

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        # always_call: an exception inside must not leave the inner random state behind
        module.register_forward_hook(self._leave, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        copied = object.__new__(Region)
        copied.name, copied.place, copied.draws = self.name, self.place, self.draws
        copied._checks, copied._entered, copied._outer = self._checks, set(), []
        memo[id(self)] = copied
        return copied

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.place.degree == 1:
            return None
        # a compiled forward has no graph of its operations to look at
        checked = self._checks > 0 and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if checked:
            self._refuse_hidden((*args, *kwargs.values()))

        def enter(tensor: Tensor) -> Tensor:
            entered = enter_region(tensor, self.place)
            if checked and entered is not tensor and entered.grad_fn is not None:
                self._entered.add(entered.grad_fn)
            return entered

        args, kwargs = map_tensors(args, enter), map_tensors(kwargs, enter)
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
        entered, self._entered = self._entered, set()  # not kept: a node keeps its whole graph alive
        if not entered or output is None:
            return
        self._checks -= 1
        if bypasses(tensors_within(output), entered):
            raise PlanError(
                f"the output of the block {self.name!r} ({type(module).__qualname__}) depends on its input past the"
                " output projection also: by a residual inside, a hook on it, or a further output. Its gradient would"
                " count once per tensor-parallel index. Give the style to an inner module without that, or name the"
                " projections one by one ('colwise', then 'rowwise'); what nobody trains on, return detached"
            )

    def _refuse_hidden(self, values: tuple[Any, ...]) -> None:
        for value in values:
            attribute = hidden_gradient(value)
            if attribute is not None:
                raise PlanError(
                    f"the block {self.name!r} is given a {type(value).__qualname__} whose {attribute!r} is a tensor"
                    " with a gradient: hand tensors to a block as arguments, or in a tuple, list, mapping or dataclass"
                )


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
