"""Where the tensor-parallel plan of a module comes from."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import LightningModule
from torch import nn

from lightning_ntp.parallel import Plan, PlanError


def plan_of(module: LightningModule, given: Plan | None) -> Plan:
    """The plan given to the strategy, or the one the module brings by ``configure_tp_plan()``.

    Raises:
        PlanError: If there is none, or it is no mapping.
    """
    if given is not None:
        return _mapping(given, "the strategy's plan")
    configure = getattr(module, "configure_tp_plan", None)
    if configure is not None:
        return _mapping(configure(), f"{type(module).__name__}.configure_tp_plan()")
    linears = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    raise PlanError(
        f"{type(module).__name__} has no tensor-parallel plan. Looked for `plan=` on the strategy and for a method"
        f" `configure_tp_plan()` on the module, which returns module-name patterns and styles, for example"
        f" {{'model.layers.*.attention': 'attention', 'model.layers.*.mlp': 'mlp'}}. Its linear layers are"
        f" {', '.join(linears[:8]) or 'none'}{' ...' if len(linears) > 8 else ''}"
    )


def _mapping(plan: object, source: str) -> Plan:
    if plan is None:
        raise PlanError(
            f"{source} returned None: is its `return` missing? It returns module-name patterns and styles, for example"
            " `return {'model.layers.*.attention': 'attention', 'model.layers.*.mlp': 'mlp'}`"
        )
    if not isinstance(plan, Mapping):
        raise PlanError(f"{source} is a {type(plan).__name__}, not a mapping of module-name patterns to styles")
    return plan
