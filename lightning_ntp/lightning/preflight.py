"""What can be known to be wrong before any rank starts, told in the supervisor at once."""

from __future__ import annotations

import copy
from typing import Literal, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_ntp.lightning.model_plan import plan_of
from lightning_ntp.parallel import Plan, TensorParallelContext, parallelize
from lightning_ntp.plan import Topology


class Checked(Protocol):
    """What there is to check of a strategy."""

    num_nodes: int
    plan: Plan | None
    start_method: Literal["popen", "spawn", "fork"]

    @property
    def accelerator(self) -> Accelerator | None: ...

    @property
    def degrees(self) -> tuple[int, ...]: ...


def check_trainer(strategy: Checked, layer_sync: LayerSync | None) -> None:
    """Check what the Trainer has put together, while it is being made.

    Raises:
        ValueError: If the sizes do not multiply to the devices, or a Trainer setting is not supported.
    """
    accelerator = strategy.accelerator
    if accelerator is not None and not isinstance(accelerator, CPUAccelerator | CUDAAccelerator):
        raise ValueError(
            f"strategy='ntp' runs on CUDA devices and on CPUs, not on {type(accelerator).__name__}: set"
            " accelerator='gpu' or accelerator='cpu'"
        )
    if strategy.num_nodes != 1:
        raise ValueError(f"strategy='ntp' runs on one node for now, got num_nodes={strategy.num_nodes}")
    if layer_sync is not None:
        raise ValueError(
            "sync_batchnorm=True is not supported by strategy='ntp': statistics over ranks would count a replica once"
            " per tensor-parallel index; use a norm without batch statistics, or leave it off"
        )
    Topology.start(strategy.degrees)


def check_model(strategy: Checked, module: LightningModule) -> None:
    """Check that the plan fits the model, as far as the model exists before the ranks start.

    A module that builds its layers in ``configure_model`` is checked in the ranks, where all fail alike.

    Args:
        strategy: Knows the degrees and the plan.
        module: The user's module. With ``start_method="popen"`` it is used up: this process trains nothing.

    Raises:
        PlanError: If there is no plan, or it does not fit.
    """
    topology = Topology.start(strategy.degrees)
    if topology.full_degree == 1 or is_overridden("configure_model", module):
        return
    plan = plan_of(module, strategy.plan)
    place = TensorParallelContext(topology.family, topology.full_degree, 0, None)
    if strategy.start_method == "popen":
        parallelize(module, plan, place)
        return
    try:
        copied = _without_values(module)
    except Exception:  # a lock, say: whoever pickles it tells more, and a fork does not mind
        return
    parallelize(copied, plan, place)


def _without_values(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers take no memory."""
    with torch.no_grad():
        memo: dict[int, object] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in module.parameters()
        }
        memo.update({id(b): torch.empty_like(b, device="meta") for b in module.buffers()})
        return copy.deepcopy(module, memo)
