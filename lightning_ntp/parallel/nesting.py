"""Tensors inside of containers: what a block is given and what it returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], above: frozenset[int] = frozenset()) -> Any:
    """Replace the tensors in any nesting of tuples, named tuples, lists, mappings and dataclasses.

    Args:
        value: Anything.
        change: Called with every tensor.
        above: Ids of the containers around ``value``: one that holds itself is left alone.

    Returns:
        The same objects where nothing changes, shallow copies where something does: a container that caller and callee
        share for other reasons stays shared.
    """
    if isinstance(value, Tensor):
        return change(value)
    found = _parts(value)
    if found is None or id(value) in above:
        return value
    above |= {id(value)}
    parts = [(key, part, map_tensors(part, change, above)) for key, part in found]
    if all(after is before for _, before, after in parts):
        return value
    if isinstance(value, tuple):
        mapped = [after for _, _, after in parts]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return {key: after for key, _, after in parts}
    copied = copy.copy(value)
    for key, before, after in parts:
        if after is before:
            continue
        if isinstance(value, list | MutableMapping):
            copied[key] = after
        else:
            object.__setattr__(copied, key, after)  # a dataclass, perhaps a frozen one
    return copied


def tensors_within(value: Any) -> list[Tensor]:
    """The tensors in the same nestings, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def hidden_gradient(value: Any) -> str | None:
    """The attribute of an object which holds a tensor that wants a gradient, out of reach for the functions above."""
    if isinstance(value, Tensor | nn.Module | type) or _parts(value) is not None:
        return None
    attributes = getattr(value, "__dict__", {}).items()
    return next((name for name, held in attributes if isinstance(held, Tensor) and held.requires_grad), None)


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a container with their keys; None if it is none."""
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None
