"""Applying a plan: module-name patterns to styles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.modules import ColwiseLinear, RowwiseLinear
from lightning_ntp.parallel.named_styles import as_style
from lightning_ntp.parallel.registry import PlanError, ShardedModel
from lightning_ntp.parallel.styles import ParallelStyle
from lightning_ntp.parallel.whole_inputs import expect_whole_inputs
from lightning_ntp.plan import Segment

Plan = Mapping[str, object]
"""Module-name patterns to styles. A ``*`` stands for anything within one dotted part of a name."""


def match_plan(module: nn.Module, plan: Plan) -> list[tuple[str, nn.Module, ParallelStyle]]:
    """Which module gets which style.

    Returns:
        (name, module, style) for every matched module, inner modules before the blocks around them, so that
        what a plan says of an inner module is known when its block decides about the rest.

    Raises:
        PlanError: If a key is no string, a pattern matches nothing, or two patterns match one module with different
            styles.
    """
    modules = [(name, m) for name, m in module.named_modules() if name]
    chosen: dict[str, tuple[nn.Module, ParallelStyle, str]] = {}
    for pattern, given in plan.items():
        if not isinstance(pattern, str):
            raise PlanError(
                f"the plan has the key {pattern!r}, a {type(pattern).__name__}: keys are patterns of module names, such"
                " as 'model.layers.*.mlp'"
            )
        style = as_style(pattern, given)
        hits = [(name, m) for name, m in modules if _matches(name, pattern)]
        if not hits:
            raise PlanError(
                f"plan pattern {pattern!r} matches no module of {type(module).__qualname__}{_nearest(pattern, modules)}"
                f" Its modules are {_sample([name for name, _ in modules])}"
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
    _check_pairs(model)
    for each in module.modules():
        # their inference takes the weights of their children, which are shards, past the children's own forward
        if isinstance(each, nn.TransformerEncoderLayer) and _is_sharded_within(each):
            each.activation_relu_or_gelu = 0
        if isinstance(each, nn.TransformerEncoder) and _is_sharded_within(each):
            each.use_nested_tensor = False
    if place.family.full_degree > 1:
        expect_whole_inputs(module)
    return model


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(p, w) for p, w in zip(parts, wanted, strict=True))


def _check_pairs(model: ShardedModel) -> None:
    """A rowwise layer must be dealt out as the colwise layer before it: at some degrees other units give equal sizes in
    another order, which no shape tells."""
    delivered: dict[int, dict[Segment, str]] = {}
    for name, module in model.module.named_modules():
        if isinstance(module, ColwiseLinear) and not module.gathers:
            for segment in module.segments:
                delivered.setdefault(segment.size, {}).setdefault(segment, name)
    for name, module in model.module.named_modules():
        if isinstance(module, RowwiseLinear):
            (segment,) = model.by_parameter()[module.weight].sharding.segments
            sources = delivered.get(segment.size, {})
            if sources and segment not in sources:
                other, source = next(iter(sources.items()))
                raise PlanError(
                    f"{name!r} takes {segment.size} features in {segment.space.count} units, but {source!r} delivers"
                    f" them in {other.space.count}: give both the same `units`"
                )


def _nearest(pattern: str, modules: list[tuple[str, nn.Module]]) -> str:
    """What a pattern that matches nothing may have meant, for a message."""
    names = [name for name, _ in modules]
    starred = [re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names]
    found = get_close_matches(pattern, dict.fromkeys(starred if "*" in pattern else names), n=1)
    return f"; did you mean {found[0]!r}?" if found else "."


def _is_sharded_within(module: nn.Module) -> bool:
    return any(isinstance(child, ColwiseLinear | RowwiseLinear) for child in module.modules())


def _sample(names: list[str]) -> str:
    shown = ", ".join(names[:12])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 12 else shown or "none"
