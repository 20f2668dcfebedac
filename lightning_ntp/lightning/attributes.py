"""What a module keeps in plain Python attributes, remembered and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

Restore = Callable[[], None]

COPIED_BYTES = 1 << 24
"""Larger tensors in plain attributes are not copied."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


def remember_attributes(module: nn.Module) -> Restore:
    """Remember the attributes of a module and its children: counters, lists of outputs, tensors that are no buffers.

    Lists, dicts and sets, also inside of each other, get back what they held; other objects only stay where they are.
    """
    parts: list[Restore] = []
    seen: set[int] = set()
    for child in module.modules():
        if not isinstance(child, Metric | MetricCollection):  # :mod:`metric_states` knows them
            parts.append(_names(child))
            for name, value in vars(child).items():
                if name not in _OF_MODULES:
                    _remember(value, parts, seen)

    def restore() -> None:
        for part in parts:
            part()

    return restore


def _names(module: nn.Module) -> Restore:
    own = vars(module)
    saved = {name: value for name, value in own.items() if name not in _OF_MODULES}

    def restore() -> None:
        for name in [name for name in own if name not in _OF_MODULES and name not in saved]:
            del own[name]
        own.update(saved)

    return restore


def _remember(value: Any, parts: list[Restore], seen: set[int]) -> None:
    if id(value) in seen or not isinstance(value, list | dict | set | deque | Tensor):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and not value.requires_grad and value.nbytes <= COPIED_BYTES:
            parts.append(_values(value))
        return
    parts.append(_content(value))
    for each in value.values() if isinstance(value, dict) else value:
        _remember(each, parts, seen)


def _content(value: Any) -> Restore:
    if isinstance(value, dict):
        items = dict(value)

        def restore() -> None:
            # by the class of the builtin: a subclass may do more on assignment
            dict.clear(value)
            dict.update(value, items)
    else:
        elements = list(value)

        def restore() -> None:
            value.clear()
            value.update(elements) if isinstance(value, set) else value.extend(elements)

    return restore


def _values(tensor: Tensor) -> Restore:
    copy = tensor.clone()

    def restore() -> None:
        with torch.no_grad():
            if tensor.shape == copy.shape and not torch.equal(tensor, copy):
                tensor.copy_(copy)

    return restore
