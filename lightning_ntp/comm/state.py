"""Unsharded tensors from shards: for checkpoints and for whoever wants to look at whole values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm.generation import Generation
from lightning_ntp.parallel import ShardedModel, ShardedParameter
from lightning_ntp.plan import copy_exchange


def gather_full(entry: ShardedParameter, local: Tensor, generation: Generation) -> Tensor | None:
    """Gather one tensor that is cut like ``entry``'s parameter, on rank 0, in host memory.

    Collective over replica 0; ranks of other replicas return None at once. One tensor at a time: rank 0 never
    holds more than the tensors it has asked for and one shard.

    Args:
        entry: Says how the tensor is cut.
        local: This rank's shard, shaped like the parameter's.
        generation: The current generation.

    Returns:
        On rank 0 the unsharded tensor on the CPU, a copy; None elsewhere.
    """
    topology = generation.topology
    holder = topology.place(topology.slots[0])[0]  # the replica of rank 0
    if generation.replica != holder:
        return None
    sharding, local = entry.sharding, local.detach()
    root = topology.place(topology.slots[0])[1]
    if sharding.dim is None or generation.degree == 1 and local.shape == entry.shape and _in_order(entry, generation):
        return local.to("cpu", copy=True) if generation.rank == 0 else None
    compute = sharding.layouts(topology.family, generation.degree)
    whole = tuple(type(lay)(lay.count, {root: lay.owned[0]}) for lay in sharding.whole_layouts())
    exchange = copy_exchange(compute, whole, sharding.unit_sizes)
    dim = sharding.dim
    if generation.rank != 0:
        for move in exchange.sent_by(generation.index):
            pieces = [local.narrow(dim, run.source, run.length) for run in move.runs]
            dist.send(torch.cat(pieces, dim=dim).contiguous(), dst=0, group=generation.world)
        return None
    full = torch.empty(entry.shape, dtype=local.dtype)
    for move in exchange.placed_at(root):
        if move.sender == root:
            piece = torch.cat([local.narrow(dim, run.source, run.length) for run in move.runs], dim=dim)
        else:
            shape = list(entry.shape)
            shape[dim] = move.length
            piece = local.new_empty(shape)
            sender = topology.rank(topology.replicas[holder][move.sender])
            dist.recv(piece, src=sender, group=generation.world)
        start = 0
        for run in move.runs:
            full.narrow(dim, run.target, run.length).copy_(piece.narrow(dim, start, run.length))
            start += run.length
    return full


def broadcast_start(model: ShardedModel, generation: Generation) -> None:
    """Give every rank rank 0's unsharded parameters and buffers, one by one, before the model is cut.

    Collective over all members.
    """
    with torch.no_grad():
        for tensor in (*(e.parameter for e in model), *model.module.buffers()):
            data = tensor.detach()
            # NCCL broadcasts device memory only, and a large model is cut on the host before it moves there
            whole = data.to(generation.device).contiguous()
            dist.broadcast(whole, src=0, group=generation.world)
            if whole.data_ptr() != data.data_ptr():
                data.copy_(whole)


def _in_order(entry: ShardedParameter, generation: Generation) -> bool:
    layouts = entry.sharding.layouts(generation.topology.family, generation.degree)
    return all(lay.owned[generation.index] == tuple(range(lay.count)) for lay in layouts)
