"""The sharded modules: each replaces the class of an ordinary module and leaves its parameters in place.

Names, parameter objects and forward hooks of the module stay; only ``forward`` and the local sizes change.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ntp.parallel.collectives import enter_region, gather_last, leave_region
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.registry import PlanError
from lightning_ntp.plan import Segment


class ColwiseLinear(nn.Linear):
    """A linear layer whose output features are sharded; its weight is cut in dim 0 and so is its bias.

    Shapes: input ``(..., in_features)``, equal on all indices; output ``(..., local out_features)``, or the
    unsharded output if it is gathered.
    """

    place: TensorParallelContext
    segments: tuple[Segment, ...]
    enters: bool
    gathers: bool

    def forward(self, input: Tensor) -> Tensor:
        if self.enters:
            input = enter_region(input, self.place)
        output = F.linear(input, self.weight, self.bias)
        return gather_last(output, self.place, self.segments[0].space) if self.gathers else output

    def relayout(self) -> None:
        self.out_features = self.weight.shape[0]


class KeyValueLinear(ColwiseLinear):
    """Delivers key/value heads to the query heads of this index.

    Where the local query heads do not share the local key/value heads evenly, the output has one key/value
    head per query head, so that the attention function sees equal counts; else the fused grouped path works.
    With several segments (a packed QKV weight) the query segment passes through.
    """

    expand: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output if self.expand is None else output.index_select(-1, self.expand)

    def relayout(self) -> None:
        super().relayout()
        wanted: list[int] = []
        offset, ragged = 0, False
        for segment in self.segments:
            space, size = segment.space, segment.unit_size
            held = self.place.units(space)
            heads = list(range(len(held)))
            if space.shared_by is not None:
                heads, uneven = key_value_heads(self.place, segment)
                ragged |= uneven
            wanted += [offset + h * size + k for h in heads for k in range(size)]
            offset += len(held) * size
        self.expand = torch.tensor(wanted, device=self.weight.device) if ragged else None


def key_value_heads(place: TensorParallelContext, segment: Segment) -> tuple[list[int], bool]:
    """The local key/value heads in the order the attention needs them, and whether that repeats any.

    Returns:
        Positions in the local key/value heads, and True if there is one per local query head because the local
        query heads do not share them evenly.
    """
    space = segment.space
    assert space.shared_by is not None
    ratio = space.shared_by // space.count
    held = place.units(space)
    queries = place.layout(type(space)(space.shared_by)).owned[place.index]
    position = {unit: k for k, unit in enumerate(held)}
    needed = [position[q // ratio] for q in queries]
    each, rest = divmod(len(queries), len(held))
    if rest == 0 and needed == [k for k in range(len(held)) for _ in range(each)]:
        return list(range(len(held))), False
    return needed, True


class RowwiseLinear(nn.Linear):
    """A linear layer whose input features are sharded; its weight is cut in dim 1.

    Shapes: input ``(..., local in_features)``; output ``(..., out_features)``, summed over the replica. The
    bias is whole on every index and added once, after the sum: its gradient class is ``full``.
    """

    place: TensorParallelContext
    plan_name: str

    def forward(self, input: Tensor) -> Tensor:
        if self.place.degree > 1 and input.shape[-1] != self.in_features:
            raise PlanError(
                f"{self.plan_name!r} is 'rowwise' in the plan and holds {self.in_features} of its input features, but"
                f" is given {input.shape[-1]}: its input must come from a 'colwise' layer dealt out in the same units."
                " Add that layer to the plan, or take this one out"
            )
        output = leave_region(F.linear(input, self.weight), self.place)
        return output if self.bias is None else output + self.bias

    def relayout(self) -> None:
        self.in_features = self.weight.shape[1]


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows are sharded.

    Shapes: input ``(...)`` of unsharded row numbers, equal on all indices; output ``(..., embedding_dim)``.
    """

    place: TensorParallelContext
    segments: tuple[Segment, ...]
    rows: Tensor | None
    local_padding: int | None

    def forward(self, input: Tensor) -> Tensor:
        if self.rows is None:
            return super().forward(input)
        # not self.rows[input]: a lookup refuses what is no row, as the dense one does, and a negative number too
        local = F.embedding(input, self.rows.unsqueeze(-1)).squeeze(-1)
        elsewhere = local < 0
        output = F.embedding(local.clamp(min=0), self.weight, self.local_padding)
        return leave_region(output.masked_fill(elsewhere.unsqueeze(-1), 0), self.place)

    def relayout(self) -> None:
        (segment,) = self.segments
        units, size = self.place.units(segment.space), segment.unit_size
        self.num_embeddings = self.weight.shape[0]
        if len(units) == segment.space.count and units == tuple(range(len(units))):
            self.rows = None
            return
        held = [unit * size + k for unit in units for k in range(size)]
        self.local_padding = held.index(self.padding_idx) if self.padding_idx in held else None
        rows = torch.full((segment.size,), -1, dtype=torch.long)
        rows[held] = torch.arange(len(held))
        self.rows = rows.to(self.weight.device)
