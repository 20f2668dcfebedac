"""The four autograd collectives of tensor parallelism, for shards of any size.

``enter_region`` and ``leave_region`` are the conjugate pair of Megatron-LM (arXiv 1909.08053, section 3,
there called f and g).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.plan import UnitSpace


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: TensorParallelContext) -> Tensor:
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may hand the same tensor to others
        dist.all_reduce(grad, group=ctx.place.group)
        return grad, None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: TensorParallelContext) -> Tensor:
        # in place: both callers hand over a fresh product that no backward formula needs
        x = x.contiguous()
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=place.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: TensorParallelContext, space: UnitSpace) -> Tensor:
        ctx.place, ctx.space = place, space
        layout = place.layout(space)
        unit = x.shape[-1] // len(layout.owned[place.index])
        full = torch.cat(_all_gathered(x, [len(layout.owned[i]) * unit for i in place.indices], place), dim=-1)
        order = [u for i in place.indices for u in layout.owned[i]]
        if order == list(range(layout.count)):
            return full
        target = _elements(order, unit, x.device)
        return torch.empty_like(full).index_copy_(full.dim() - 1, target, full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # the gathered tensor is used alike on every index, so its gradient is whole: take the own part
        units = ctx.place.units(ctx.space)
        unit = grad.shape[-1] // ctx.space.count
        if units == tuple(range(units[0], units[-1] + 1)):
            return grad[..., units[0] * unit : (units[-1] + 1) * unit].contiguous(), None, None
        return grad.index_select(-1, _elements(list(units), unit, grad.device)), None, None


def enter_region(x: Tensor, place: TensorParallelContext) -> Tensor:
    """Replicated activations enter a sharded region: identity forward, sum over the replica backward.

    Args:
        x: Any shape, equal on all indices.
        place: This rank's place.
    """
    if place.degree == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _EnterRegion.apply(x, place)  # type: ignore[no-any-return,no-untyped-call]


def leave_region(x: Tensor, place: TensorParallelContext) -> Tensor:
    """Partial sums leave a sharded region: sum over the replica forward, identity backward.

    Args:
        x: Any shape; this index's part of a sum.
        place: This rank's place.
    """
    if place.degree == 1:
        return x
    return _LeaveRegion.apply(x, place)  # type: ignore[no-any-return,no-untyped-call]


def gather_last(x: Tensor, place: TensorParallelContext, space: UnitSpace) -> Tensor:
    """Gather a tensor whose last dimension is sharded, into the unsharded order.

    Args:
        x: Shape ``(..., units held here * unit size)``.
        place: This rank's place.
        space: What the last dimension is counted in.

    Returns:
        Shape ``(..., space.count * unit size)``, equal on all indices.
    """
    if place.degree == 1 and place.units(space) == tuple(range(space.count)):
        return x
    return _GatherLast.apply(x, place, space)  # type: ignore[no-any-return,no-untyped-call]


def _all_gathered(x: Tensor, widths: list[int], place: TensorParallelContext) -> list[Tensor]:
    """The shards of all indices. Widths differ by at most one unit; the collective wants them equal, so pad."""
    if place.degree == 1:
        return [x]
    widest = max(widths)
    # F.pad copies even if there is nothing to add
    padded = x.contiguous() if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])).contiguous()
    shards = [torch.empty_like(padded) for _ in widths]
    dist.all_gather(shards, padded, group=place.group)
    return [shard[..., :width] for shard, width in zip(shards, widths, strict=True)]


def _elements(units: list[int], unit: int, device: torch.device) -> Tensor:
    index = torch.tensor(units, device=device)
    if unit == 1:
        return index
    return (index[:, None] * unit + torch.arange(unit, device=device)).flatten()
