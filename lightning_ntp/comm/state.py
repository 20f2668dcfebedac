"""Unsharded tensors from shards: for checkpoints and for whoever wants to look at whole values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm.generation import Generation
from lightning_ntp.comm.wire import Wire, WireEntry, element_width
from lightning_ntp.parallel import ShardedModel, ShardedParameter
from lightning_ntp.plan import copy_exchange, reduce_exchange


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


@torch.no_grad()
def gather_whole(model: ShardedModel, generation: Generation) -> dict[Tensor, Tensor]:
    """Every sharded parameter's unsharded value, on every rank, on its device. Collective over the replica.

    One broadcast per index and dtype: beside the result, a rank holds no more than one index's shards twice.
    """
    topology, whole = generation.topology, dict[Tensor, Tensor]()
    for entries in _by_dtype(entry for entry in model if not entry.sharding.replicated):
        layouts = [e.sharding.layouts(topology.family, generation.degree) for e in entries]
        like = entries[0].parameter.detach()
        whole.update({e.parameter: like.new_empty(e.shape) for e in entries})
        for position, index in enumerate(topology.family.indices(generation.degree)):
            shapes = [e.local_shape(lay, index) for e, lay in zip(entries, layouts, strict=True)]
            if index == generation.index:
                shards = torch.cat([e.parameter.detach().reshape(-1) for e in entries])
            else:
                shards = like.new_empty(sum(shape.numel() for shape in shapes))
            if generation.tensor_parallel is not None:
                dist.broadcast(shards, group=generation.tensor_parallel, group_src=position)
            pieces = torch.split(shards, [shape.numel() for shape in shapes])
            for entry, lay, shape, piece in zip(entries, layouts, shapes, pieces, strict=True):
                entry.fill(whole[entry.parameter], piece.view(shape), lay, index)
    return whole


@torch.no_grad()
def sum_over_owners(
    entries: Sequence[ShardedParameter], gradients: Sequence[Tensor | None], generation: Generation
) -> list[Tensor]:
    """Local gradients of one replica, units with several ``partial`` owners summed over them.

    Collective over the replica.

    Args:
        entries: The same parameters on all ranks.
        gradients: Shaped like their shards; None counts as zeros.
        generation: The current generation.
    """
    topology, sums = generation.topology, list(gradients)
    group = generation.tensor_parallel
    layouts = [e.sharding.layouts(topology.family, generation.degree) for e in entries]
    shared = [
        k
        for k, (entry, lays) in enumerate(zip(entries, layouts, strict=True))
        if entry.sharding.gradient == "partial" and any(lay.overlapping for lay in lays)
    ]
    for few in _by_dtype(entries[k] for k in shared) if group is not None else ():
        assert group is not None
        turns = {entry.turn for entry in few}
        chosen = [k for k in shared if entries[k].turn in turns]
        exchanges = [reduce_exchange(layouts[k], layouts[k], entries[k].sharding.unit_sizes) for k in chosen]
        wire = Wire(
            [
                WireEntry(x, e.sharding.dim, element_width(e.shape, e.sharding.dim), True)
                for x, e in zip(exchanges, few, strict=True)
            ],
            topology.family.indices(generation.degree),
            generation.index,
        )
        results = [torch.zeros_like(e.parameter) for e in few]
        wire.run([gradients[k] for k in chosen], results, group, results[0])
        for k, result in zip(chosen, results, strict=True):
            sums[k] = result
    return [torch.zeros_like(e.parameter) if g is None else g for e, g in zip(entries, sums, strict=True)]


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


def _by_dtype(entries: Iterable[ShardedParameter]) -> list[list[ShardedParameter]]:
    groups: dict[torch.dtype, list[ShardedParameter]] = {}
    for entry in entries:
        groups.setdefault(entry.parameter.dtype, []).append(entry)
    # by name: the same order on all ranks
    return [groups[dtype] for dtype in sorted(groups, key=str)]
