"""Agreement among ranks: on a number, and on the bits of all copies of all units."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm import Generation
from lightning_ntp.parallel import ShardedModel


def all_equal(number: int, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether all members of a group give the same number. Collective over the group; None means alone."""
    if group is None:
        return True
    both = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return int(both[0]) == -int(both[1])


def largest(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest of the members' numbers. Collective over the group."""
    found = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return int(found)


def differing_copies(model: ShardedModel, generation: Generation) -> list[str]:
    """Names of parameters of which some unit has different bits on two ranks. Collective over all members."""
    own = _digests(model, generation)
    everyone: list[dict[tuple[int, int, int], int]] = [{} for _ in generation.topology.slots]
    dist.all_gather_object(everyone, own, group=generation.world)
    agreed: dict[tuple[int, int, int], int] = {}
    bad: set[int] = set()
    for digests in everyone:
        for key, digest in digests.items():
            if agreed.setdefault(key, digest) != digest:
                bad.add(key[0])
    return [entry.name for entry in model if entry.turn in bad]


def _digests(model: ShardedModel, generation: Generation) -> dict[tuple[int, int, int], int]:
    """(parameter, segment, unit) -> checksum of its bits."""
    digests = {}
    for entry in model:
        data, dim = entry.parameter.detach(), entry.sharding.dim
        offset = 0
        layouts = entry.sharding.layouts(generation.topology.family, generation.degree)
        for number, (layout, size) in enumerate(zip(layouts, entry.sharding.unit_sizes, strict=True)):
            for unit in layout.owned[generation.index]:
                piece = data if dim is None else data.narrow(dim, offset, size)
                digests[entry.turn, number, unit] = _crc(piece)
                offset += size
    return digests


def _crc(tensor: Tensor) -> int:
    flat = tensor.cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
