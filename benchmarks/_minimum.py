"""What a rank must send per step, from the layouts alone: no code of the comm floor is asked.

All-reduces count as rings: each of n ranks sends 2 (n - 1) / n of the payload; an all-gather sends (n - 1) / n of what
is gathered. With one micro-batch per step, R replicas, n = the degree of a rank's replica, d = the smallest degree,
X = samples x tokens x width x 4 bytes of activations, V the same for logits, L layers:

activations  (4 L + 2) x 2 (n - 1) / n X + (n - 1) V / n
             per layer attention and feed-forward, each once forward and once backward; the embedding forward; the
             language-model head backward, whose logits are gathered (padded to the widest shard) since a module's
             output is whole
gradients    2 (R - 1) / R S + E + B
             S = bytes of the units this rank owns at degree d (nothing for an index that does not exist there), E =
             bytes of the units it holds and another index owns at degree d, B = bytes of the units it owns at degree d,
             once for every other index of its replica that holds them. In a uniform world E = B = 0 without shared
             key/value heads. Of a replicated parameter of class ``full`` every index of degree d owns the whole, E = 0,
             and the first one sends it to the indices above.

For (4, 3) and a matrix of N bytes without shared units: 7 ranks together send 2 x 1/2 x 2 N in the rings, N / 4 to the
owners at degree 3 and N / 4 back, so 2.5 N. Whatever the scheme, two replicas cannot agree with less than 2 N.
"""

from __future__ import annotations

from dataclasses import dataclass

from _gpt import BenchmarkModel, Size

from lightning_ntp.parallel import ShardedParameter, TensorParallelContext, parallelize
from lightning_ntp.plan import LayoutFamily

_ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Minimum:
    """Bytes that each rank sends per step, in order of the ranks."""

    gradients: tuple[float, ...]
    activations: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        return tuple(g + a for g, a in zip(self.gradients, self.activations, strict=True))


def minimum(size: Size, degrees: tuple[int, ...]) -> Minimum:
    """The least that ranks at ``degrees`` send."""
    family = LayoutFamily(max(degrees))
    model = BenchmarkModel(size)
    plan = model.configure_tp_plan() if max(degrees) > 1 else {}
    entries = tuple(parallelize(model, plan, TensorParallelContext(family, max(degrees))))
    gradients, activations = [], []
    for degree in degrees:
        for index in family.indices(degree):
            gradients.append(sum(_gradient(entry, family, degrees, degree, index) for entry in entries) * _ITEM)
            activations.append(_activations(size, degree, len(degrees)) * _ITEM)
    return Minimum(tuple(gradients), tuple(activations))


def parameter_bytes(size: Size) -> int:
    """Of the unsharded model."""
    return sum(p.numel() for p in BenchmarkModel(size).parameters()) * _ITEM


def _activations(size: Size, degree: int, replicas: int) -> float:
    tokens = size.samples // replicas * size.tokens
    widest = -(-size.vocab // degree)
    all_reduces = (4 * size.layers + 2) * 2 * (degree - 1) / degree * tokens * size.dim
    return all_reduces + (degree - 1) * widest * tokens


def _gradient(
    entry: ShardedParameter, family: LayoutFamily, degrees: tuple[int, ...], degree: int, index: int
) -> float:
    replicas, smallest, sharding = len(degrees), min(degrees), entry.sharding
    ring = 2 * (replicas - 1) / replicas
    numel = entry.shape.numel()
    if sharding.replicated:
        extras = degree - smallest if index == 0 else 0
        return (ring + extras) * numel if index in family.indices(smallest) else 0.0
    sent = 0.0
    width = numel // sharding.size
    for compute, sync, unit in zip(
        sharding.layouts(family, degree), sharding.layouts(family, smallest), sharding.unit_sizes, strict=True
    ):
        for number, owners in enumerate(compute.owners):
            owner = sync.owners[number][0]
            if owner == index:
                sent += width * unit * (ring + sum(other != index for other in owners))
            elif index in owners:
                sent += width * unit
    return sent
