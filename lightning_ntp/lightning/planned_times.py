"""How much longer a replica computes at a smaller degree, from the parameters of the model."""

from __future__ import annotations

from lightning_ntp.parallel import ShardedModel
from lightning_ntp.plan import Topology
from lightning_ntp.plan.layout import UnitSpace
from lightning_ntp.power.control import Block, relative_compute_time


def planned_times(model: ShardedModel, topology: Topology) -> dict[int, float]:
    """Replica -> compute time per step at its degree over that at the full one, from the largest share of each block.

    Floating-point operations are taken to go with the elements of parameters, as in matrix products.
    """
    flops: dict[UnitSpace | None, float] = {}
    for entry in model:
        elements = entry.shape.numel()
        for segment in entry.sharding.segments:
            flops[segment.space] = flops.get(segment.space, 0.0) + elements * segment.size / entry.sharding.size
        if entry.sharding.replicated:
            flops[None] = flops.get(None, 0.0) + elements
    blocks = [Block(str(space), space, each) for space, each in flops.items() if each > 0]
    return {
        replica: relative_compute_time(topology.family, blocks, topology.degrees[replica])
        for replica in topology.live_replicas
    }
