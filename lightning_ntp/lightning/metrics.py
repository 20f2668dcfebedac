"""Gathering over replicas: one voice per replica, never one per rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torchmetrics.metric
from torch import Tensor
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_ntp.comm import Generation, runtime


def gather_from_replicas(tensor: Tensor, generation: Generation) -> list[Tensor]:
    """The tensors of all live replicas, in order; shapes may differ. Collective over all members."""
    everyone = gather_all_tensors(tensor, group=generation.world)
    return [everyone[rank] for rank in generation.first_ranks]


def count_replicas_once() -> None:
    """Let all metrics in this process gather from replicas, whoever holds them: a rank each would count peers again.

    torchmetrics 1.9: ``Metric.sync`` takes ``gather_all_tensors`` from its module unless it was given a function.
    """
    torchmetrics.metric.gather_all_tensors = _gather_metric_state  # type: ignore[attr-defined,assignment]


def _gather_metric_state(state: Tensor, group: Any | None = None) -> list[Tensor]:
    """In place of ``gather_all_tensors``.

    Args:
        state: A state of a metric; replicas may hold different shapes.
        group: A process group that the user has given.
    """
    current = runtime.current()
    if current is None or group is not None:
        return gather_all_tensors(state, group)
    gathered: list[Tensor] = current.repeat("a metric's sync", lambda: gather_from_replicas(state, current.generation))
    return gathered


def gather_with_gradient(tensor: Tensor, generation: Generation) -> Tensor:
    """As :func:`gather_from_replicas`, stacked in a new first dimension, with gradients to the own tensor."""
    return _Gather.apply(tensor, generation)  # type: ignore[no-any-return,no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, generation: Generation) -> Tensor:
        ctx.generation = generation
        return torch.stack(gather_from_replicas(tensor, generation))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        generation: Generation = ctx.generation
        # peers of a replica hold the same gradient of the same rows: it counts once
        total = grad.contiguous().clone() if generation.is_first_of_replica else torch.zeros_like(grad)
        dist.all_reduce(total, group=generation.world)
        return total[generation.topology.live_replicas.index(generation.replica)], None
