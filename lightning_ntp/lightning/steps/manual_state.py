"""What manual optimization changes inside a training step: parameters, optimizer state, schedulers, frozen flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_ntp.lightning import private
from lightning_ntp.lightning.steps.registered_state import RegisteredState, RegisteredStateCopy


class OptimizerSettings:
    """The options of all parameter groups (learning rates and the like) and the schedulers.

    Args:
        optimizers: The optimizers.
        schedulers: Their learning-rate schedulers.
    """

    def __init__(self, optimizers: Iterable[Optimizer], schedulers: Iterable[Any]) -> None:
        self._options = [(o, [_options(group) for group in o.param_groups]) for o in optimizers]
        self._schedulers = [_attributes(scheduler) for scheduler in schedulers]

    def restore(self) -> None:
        """Put them back. May be called any number of times."""
        for optimizer, groups in self._options:
            # groups that were added since stay as they are
            for group, options in zip(optimizer.param_groups, groups, strict=False):
                group.update(_options(options))
        for scheduler_parts in self._schedulers:
            for scheduler, attributes in scheduler_parts:
                scheduler.__dict__.update({k: _clone(v) for k, v in attributes.items()})


class ManualState:
    """The state before a training step. Parameters and state of an optimizer are copied before its first update only.

    Args:
        module: The module being trained.
        parameters: Its parameters.
        optimizers: Its optimizers.
        schedulers: Its learning-rate schedulers.
        registered: More state per parameter, which may change with it.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizers: Iterable[Optimizer],
        schedulers: Iterable[Any],
        registered: RegisteredState | None = None,
    ) -> None:
        self._registered = registered
        self._registered_copy: RegisteredStateCopy | None = None
        self._requires_grad = [(p, p.requires_grad) for p in parameters]
        self._toggled = private.remember_toggled(module)
        self._settings = OptimizerSettings(optimizers, schedulers)
        self._updated: dict[Optimizer, _OptimizerCopy] = {}

    @property
    def updated(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self._updated)

    def before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to change its parameters."""
        if self._registered is not None and self._registered_copy is None:
            self._registered_copy = self._registered.copy()
        if optimizer not in self._updated:
            self._updated[optimizer] = _OptimizerCopy(optimizer)

    def restore(self) -> None:
        """Put everything back. Call it once: the copies become the state."""
        for optimizer, copy in self._updated.items():
            copy.restore(optimizer)
        self._updated = {}
        if self._registered_copy is not None:
            self._registered_copy.restore()
            self._registered_copy = None
        self._settings.restore()
        for parameter, flag in self._requires_grad:
            parameter.requires_grad = flag
        self._toggled()


class _OptimizerCopy:
    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        values = torch._foreach_clone([p.detach() for p in parameters])
        self.parameters = list(zip(parameters, values, strict=True))
        self.state = {p: {k: _clone(v) for k, v in state.items()} for p, state in optimizer.state.items()}

    @torch.no_grad()
    def restore(self, optimizer: Optimizer) -> None:
        for parameter, value in self.parameters:
            parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(self.state)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {k: _clone(v) for k, v in group.items() if k != "params"}


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _attributes(scheduler: Any) -> list[tuple[Any, dict[str, Any]]]:
    """A scheduler's attributes, and those of the schedulers inside it."""
    own = {k: _clone(v) for k, v in scheduler.__dict__.items()}
    found = [(scheduler, own)]
    for value in own.values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, LRScheduler):
                found += _attributes(inner)
    return found
