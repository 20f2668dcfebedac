"""Do all copies of all units hold the same bits? For tests, and for users who want to be sure."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm import Generation
from lightning_ntp.parallel import ShardedModel


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
