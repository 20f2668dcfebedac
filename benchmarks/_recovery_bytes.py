"""What a loss must move at least, from the shapes alone, and what the plan moves for every pair of losses."""

from __future__ import annotations

from dataclasses import dataclass

from _recovery_model import SIZES

from examples.gpt.model import LanguageModel
from lightning_ntp.parallel import TensorParallelContext, parallelize
from lightning_ntp.plan import LayoutFamily, Topology
from lightning_ntp.plan.cost import CutTensor, reshard_cost

ELEMENT_BYTES = 12
"""A float32 with its two moments."""


@dataclass(frozen=True)
class Bounds:
    """Bytes.

    Args:
        first: The first loss: the lost units, N/n of everything that is cut.
        later: A loss at another index: (2 - 1/(n - 1)) N/n.
    """

    first: float
    later: float


def cut_tensors(full_degree: int, **sizes: int) -> list[CutTensor]:
    """The parameters and AdamW's moments of the benchmark's model; ``sizes`` replace some of its own."""
    model = LanguageModel(**{**SIZES, **sizes})
    entries = parallelize(
        model, model.configure_tp_plan(), TensorParallelContext(LayoutFamily(full_degree), full_degree)
    )
    return [CutTensor(e.name, tuple(e.shape), e.sharding, ELEMENT_BYTES) for e in entries]


def bounds(tensors: list[CutTensor], full_degree: int) -> Bounds:
    """The two bounds of a job in which every replica starts with ``full_degree`` ranks."""
    share = sum(t.bytes for t in tensors if not t.sharding.replicated) / full_degree
    return Bounds(share, (2 - 1 / (full_degree - 1)) * share)


def shard_bytes(tensors: list[CutTensor], degree: int) -> float:
    """What a rank of a replica of ``degree`` holds, if everything that is cut is cut evenly."""
    whole = sum(t.bytes for t in tensors if t.sharding.replicated)
    return whole + sum(t.bytes for t in tensors if not t.sharding.replicated) / degree


def planned(tensors: list[CutTensor], degree: int) -> tuple[list[float], list[float]]:
    """Bytes over the bound of two replicas of ``degree``: for every first loss, every later one at another index."""
    least, start = bounds(tensors, degree), Topology.start([degree, degree])
    first_ratios, later_ratios = [], []
    for index in range(degree):
        once, _ = start.lose([index])
        first_ratios.append(reshard_cost(start, once, tensors, [index]).bytes_moved / least.first)
        for slot in range(degree, 2 * degree):
            if slot - degree != index:
                twice, _ = once.lose([slot])
                later_ratios.append(reshard_cost(once, twice, tensors, [slot]).bytes_moved / least.later)
    return first_ratios, later_ratios
