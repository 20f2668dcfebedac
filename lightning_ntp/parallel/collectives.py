"""The four autograd collectives of tensor parallelism, for shards of any size.

``enter_region`` and ``leave_region`` are the conjugate pair of Megatron-LM (arXiv 1909.08053, section 3,
there called f and g). The backward of each is the other one, as an autograd function again: a whole gradient is to a
second backward what a whole activation is to the first, so gradient penalties come out right.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.plan import Layout, UnitSpace


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: TensorParallelContext) -> Tensor:
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # a copy, for it is summed in place: autograd may hand the same tensor to others
        return leave_region(grad.clone(memory_format=torch.contiguous_format), ctx.place), None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: TensorParallelContext) -> Tensor:
        # in place: all callers hand over a fresh tensor that no backward formula needs
        ctx.place = place
        x = x.contiguous()
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=place.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return enter_region(grad, ctx.place), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: TensorParallelContext, space: UnitSpace) -> Tensor:
        ctx.place, ctx.space = place, space
        layout = place.layout(space)
        unit = x.shape[-1] // len(layout.owned[place.index])
        shards = _all_gathered(x, max(len(units) for units in layout.owned.values()) * unit, place)
        pieces = [shards[run.holder][..., run.start * unit : run.stop * unit] for run in _runs(layout)]
        return torch.cat(pieces, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # the gathered tensor is used alike on every index, so its gradient is whole: take the own part
        return _OwnOfLast.apply(grad, ctx.place, ctx.space), None, None  # type: ignore[no-untyped-call]


class _OwnOfLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: TensorParallelContext, space: UnitSpace) -> Tensor:
        ctx.place, ctx.space = place, space
        layout = place.layout(space)
        unit = x.shape[-1] // layout.count
        own = sorted((r for r in _runs(layout) if place.indices[r.holder] == place.index), key=lambda r: r.start)
        return torch.cat([x[..., r.first * unit : (r.first + r.stop - r.start) * unit] for r in own], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_last(grad, ctx.place, ctx.space), None, None


def bypasses(outputs: Iterable[Tensor], entered: Set[Node]) -> bool:
    """Whether autograd leads from outputs of a region to what entered it around every ``leave_region``.

    Args:
        outputs: What the region delivers.
        entered: The autograd nodes of what ``enter_region`` made of its inputs.
    """
    ahead, seen = [output.grad_fn for output in outputs], set[Node]()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen or node.name() == f"{_LeaveRegion.__name__}Backward":
            continue
        if node in entered:
            return True
        seen.add(node)
        ahead += [before for before, _ in node.next_functions]
    return False


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


def _all_gathered(x: Tensor, widest: int, place: TensorParallelContext) -> list[Tensor]:
    """The shards of all indices. The collective wants them equally wide, so narrower ones are padded."""
    if place.degree == 1:
        return [x]
    # F.pad copies even if there is nothing to add
    padded = x.contiguous() if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])).contiguous()
    shards = [torch.empty_like(padded) for _ in range(place.degree)]
    dist.all_gather(shards, padded, group=place.group)
    return shards


class _Run(NamedTuple):
    """Units that lie side by side in the unsharded order and on one index."""

    holder: int
    """Position of the index in the replica."""
    start: int
    """First of them in the index's local order."""
    stop: int
    first: int
    """First of them in the unsharded order."""


@lru_cache(maxsize=256)
def _runs(layout: Layout) -> tuple[_Run, ...]:
    """A layout without shared units as runs, in the unsharded order."""
    runs: list[_Run] = []
    for holder, index in enumerate(layout.indices):
        units, start = layout.owned[index], 0
        for k in range(1, len(units) + 1):
            if k == len(units) or units[k] != units[k - 1] + 1:
                runs.append(_Run(holder, start, k, units[start]))
                start = k
    return tuple(sorted(runs, key=lambda run: run.first))
