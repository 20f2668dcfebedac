"""Gradient norms over a sharded model: every unit counted once, the same bits on every rank.

Replicas of one degree hold equal shards of equal gradients, so each measures for itself and gets the same bits. As
soon as degrees differ, only replica 0 measures and tells the others its number: sums over other shards would differ
in the last bit and let the replicas drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm import Generation
from lightning_ntp.parallel import ShardedModel, ShardedParameter


def gradient_norm(
    model: ShardedModel, parameters: Iterable[Tensor], generation: Generation, norm_type: float = 2.0
) -> Tensor:
    """The norm of the unsharded gradients of ``parameters``. Collective over all members.

    Args:
        model: The cut model.
        parameters: Its parameters, or some of them; those without gradient count as zero.
        generation: The current generation.
        norm_type: The p of the norm; ``float("inf")`` for the largest absolute value.

    Returns:
        A float64 tensor without dimensions, equal on all ranks.
    """
    topology, infinite = generation.topology, norm_type == float("inf")
    uniform = len(set(topology.live_degrees)) == 1
    total = torch.zeros((), dtype=torch.float64, device=generation.device)
    if uniform or generation.replica == topology.live_replicas[0]:
        known = model.by_parameter()
        pieces = [piece for p in parameters if p.grad is not None for piece in _counted_here(p, known[p], generation)]
        if pieces:
            norms = torch.stack(torch._foreach_norm(pieces, norm_type)).double()
            total = norms.max() if infinite else norms.pow(norm_type).sum()
    if uniform and generation.tensor_parallel is not None:
        # gathered and not reduced: added in one order everywhere, whatever algorithm a replica's group would choose
        parts = [torch.empty_like(total) for _ in range(generation.degree)]
        dist.all_gather(parts, total, group=generation.tensor_parallel)
        total = torch.stack(parts).max() if infinite else torch.stack(parts).sum()
    elif not uniform:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=generation.world)
    return total if infinite else total.pow(1.0 / norm_type)


def clip_gradients(
    model: ShardedModel, parameters: Iterable[Tensor], generation: Generation, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``, as :func:`torch.nn.utils.clip_grad_norm_` does.

    Returns:
        The norm before clipping.
    """
    parameters = list(parameters)
    norm = gradient_norm(model, parameters, generation, norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _counted_here(p: Tensor, entry: ShardedParameter, generation: Generation) -> list[Tensor]:
    """The parts of a gradient that this rank counts: each unit at its lowest owner."""
    grad, sharding = p.grad, entry.sharding
    assert grad is not None
    if sharding.dim is None:
        return [grad] if generation.is_first_of_replica else []
    pieces, offset = [], 0
    layouts = sharding.layouts(generation.topology.family, generation.degree)
    for layout, size in zip(layouts, sharding.unit_sizes, strict=True):
        held = layout.owned[generation.index]
        if not layout.overlapping:
            pieces.append(grad.narrow(sharding.dim, offset, len(held) * size))
        else:
            for k, unit in enumerate(held):
                if layout.owners[unit][0] == generation.index:
                    pieces.append(grad.narrow(sharding.dim, offset + k * size, size))
        offset += len(held) * size
    return pieces
