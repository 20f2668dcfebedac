"""Styles by the names a plan or YAML may use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from lightning_ntp.parallel.blocks import MLP, Attention
from lightning_ntp.parallel.registry import PlanError
from lightning_ntp.parallel.styles import (
    Colwise,
    EmbeddingRowwise,
    ParallelStyle,
    Replicated,
    ReplicatedWithGradAllReduce,
    Rowwise,
)

STYLES: Mapping[str, Callable[..., ParallelStyle]] = {
    "colwise": Colwise,
    "colwise_gather_output": lambda **settings: Colwise(gather_output=True, **settings),
    "colwise_rep": lambda **settings: Colwise(gather_output=True, **settings),
    "rowwise": Rowwise,
    "embedding_rowwise": EmbeddingRowwise,
    "replicated": Replicated,
    "replicated_with_grad_allreduce": ReplicatedWithGradAllReduce,
    "attention": Attention,
    "mlp": MLP,
}
"""Styles by the names a plan may use."""


def as_style(pattern: str, given: object) -> ParallelStyle:
    """A style from what a plan or YAML gives: a style, a name, or a mapping with ``style`` and its settings.

    Raises:
        PlanError: If the name or a setting is unknown.
    """
    if isinstance(given, ParallelStyle):
        return given
    settings: dict[str, Any] = {}
    name = given
    if type(given).__module__.startswith("torch.distributed.tensor"):
        kind = type(given).__name__
        instead = {"ColwiseParallel": "write 'colwise'", "RowwiseParallel": "write 'rowwise'"}.get(
            kind, f"there is no such style here; known are {', '.join(sorted(STYLES))}"
        )
        raise PlanError(f"plan entry {pattern!r} is torch's own {kind}, which cuts evenly into DTensors: {instead}")
    if isinstance(given, Mapping):
        settings = {str(k): tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        name = settings.pop("style", None)
    if not isinstance(name, str) or name not in STYLES:
        close = get_close_matches(str(name), STYLES, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else "."
        raise PlanError(f"plan entry {pattern!r}: unknown style {name!r}{meant} Known are {', '.join(sorted(STYLES))}")
    try:
        return STYLES[name](**settings)
    except TypeError:
        known = [f.name for f in dataclasses.fields(STYLES[name]())]  # type: ignore[arg-type]
        raise PlanError(
            f"plan entry {pattern!r}: style {name!r} has no settings {sorted(set(settings) - set(known))};"
            f" it has {known or 'none'}"
        ) from None
