"""Switching off what a model drops at random, so that two layouts of it can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_ntp.parallel.region import Region


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Meanwhile nothing is dropped: dropout modules, and probabilities in attributes such as ``dropout``, are 0.

    Blocks draw no seeds for their own random numbers either, so numbers drawn elsewhere are the same at every degree.
    """
    before: list[tuple[Any, str, Any]] = []
    for child in module.modules():
        for name, value in vars(child).items():
            drops = "drop" in name.lower() or (name == "p" and isinstance(child, nn.modules.dropout._DropoutNd))
            if drops and isinstance(value, float) and 0 < value <= 1:
                before.append((child, name, value))
        for hook in child._forward_pre_hooks.values():
            region = getattr(hook, "__self__", None)
            if isinstance(region, Region):
                before.append((region, "draws", region.draws))
    try:
        for owner, name, value in before:
            vars(owner)[name] = type(value)(0)
        yield
    finally:
        for owner, name, value in before:
            vars(owner)[name] = value
