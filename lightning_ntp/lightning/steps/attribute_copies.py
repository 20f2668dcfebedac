"""What user code keeps in attributes of its module, counters and lists of outputs: put back when a step is undone."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

Restore = Callable[[], None]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
LONG = 4096
"""From this length on a list is taken to grow only: it is cut back, rather than copied in every step."""


class AttributeRecorder:
    """Remembers a module's own plain attributes: numbers, texts, lists, deques, dictionaries and sets.

    Not those of its submodules, and nothing else that they may hold, such as tensors: ``ntp_snapshot`` is for them.
    Containers are remembered shallowly.
    """

    def __init__(self) -> None:
        self._module: LightningModule | None = None

    def look_around(self, module: LightningModule) -> None:
        """Remember attributes of this module."""
        self._module = module

    def take(self) -> Callable[[], None]:
        """Remember the attributes as they are now; the result puts them back."""
        assert self._module is not None
        own = self._module.__dict__
        plain = {k: v for k, v in own.items() if type(v) in _PLAIN and k not in _OF_LIGHTNING}
        held = [_held(v) for k, v in own.items() if isinstance(v, _CONTAINERS) and k not in _OF_LIGHTNING]

        def restore() -> None:
            own.update(plain)
            for put_back in held:
                put_back()

        return restore


def own_attributes(module: LightningModule) -> dict[str, Any]:
    """The attributes that :class:`AttributeRecorder` would remember, tensors too."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_LIGHTNING and (type(value) in _PLAIN or isinstance(value, (*_CONTAINERS, tuple, Tensor)))
    }


def _held(container: Any) -> Callable[[], None]:
    length = len(container)
    if isinstance(container, list) and length > LONG:

        def cut() -> None:
            del container[length:]

        return cut
    copy = dict(container) if isinstance(container, dict) else list(container)

    def put_back() -> None:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(copy)

    return put_back


_CONTAINERS = (list, deque, dict, set)

# Lightning 2.6.6 and torch 2.13 keep their own there; what of it a step changes is put back elsewhere
_OF_LIGHTNING = frozenset(vars(LightningModule()))


def remember_containers(value: Any) -> Restore:
    """Remember what lists and dictionaries hold, also inside of each other: a batch, whose labels a step may pop."""
    parts: list[Restore] = []
    _remember_containers(value, parts)

    def restore() -> None:
        for part in parts:
            part()

    return restore


def _remember_containers(value: Any, parts: list[Restore]) -> None:
    if isinstance(value, UserDict):
        value = value.data
    if isinstance(value, list | dict):
        parts.append(_content(value))
    if isinstance(value, list | dict | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _remember_containers(each, parts)


# ---- all attributes, of all modules: for a step that is only tried out ----------------------------------------------

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
            parts.append(_all_names(child))
            for name, value in vars(child).items():
                if name not in _OF_MODULES:
                    _remember(value, parts, seen)

    def restore() -> None:
        for part in parts:
            part()

    return restore


def _all_names(module: nn.Module) -> Restore:
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
