"""Applying a plan: module-name patterns to styles."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.named_styles import as_style
from lightning_ntp.parallel.registry import PlanError, ShardedModel
from lightning_ntp.parallel.styles import ParallelStyle

Plan = Mapping[str, object]
"""Module-name patterns to styles. A ``*`` stands for anything within one dotted part of a name."""


def match_plan(module: nn.Module, plan: Plan) -> list[tuple[str, nn.Module, ParallelStyle]]:
    """Which module gets which style.

    Returns:
        (name, module, style) for every matched module, inner modules before the blocks around them, so that
        what a plan says of an inner module is known when its block decides about the rest.

    Raises:
        PlanError: If a pattern matches nothing, or two patterns match one module with different styles.
    """
    modules = [(name, m) for name, m in module.named_modules() if name]
    chosen: dict[str, tuple[nn.Module, ParallelStyle, str]] = {}
    for pattern, given in plan.items():
        style = as_style(pattern, given)
        hits = [(name, m) for name, m in modules if _matches(name, pattern)]
        if not hits:
            raise PlanError(
                f"plan pattern {pattern!r} matches no module of {type(module).__qualname__}; its modules are"
                f" {_sample([name for name, _ in modules])}"
            )
        for name, m in hits:
            other = chosen.get(name)
            if other is not None and other[1] != style:
                raise PlanError(
                    f"plan patterns {other[2]!r} and {pattern!r} both match {name!r} but give it different styles"
                    f" ({other[1]} and {style}): make one of them narrower"
                )
            chosen.setdefault(name, (m, style, pattern))
    return [(n, m, s) for n, (m, s, _) in sorted(chosen.items(), key=lambda item: -item[0].count("."))]


def parallelize(module: nn.Module, plan: Plan, place: TensorParallelContext) -> ShardedModel:
    """Make a model tensor-parallel by a plan and register all its parameters. Nothing is cut yet.

    Args:
        module: The root module, with unsharded parameters, also on the meta device.
        plan: Patterns to styles; may be empty.
        place: This rank's place.

    Raises:
        PlanError: If the plan does not fit the model.
    """
    model = ShardedModel(module, place)
    for name, matched, style in match_plan(module, plan):
        style.apply(name, matched, model)
    model.freeze()
    return model


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(p, w) for p, w in zip(parts, wanted, strict=True))


def _sample(names: list[str]) -> str:
    shown = ", ".join(names[:12])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 12 else shown or "none"
