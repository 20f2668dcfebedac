"""A cut model as it was before it was cut, for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_ntp.parallel.registry import ShardedModel
from lightning_ntp.plan import LayoutFamily


@contextmanager
def unsharded(model: ShardedModel, whole: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Meanwhile the model computes alone, from unsharded parameters, without any communication of its own.

    Gradients are None at the beginning and at the end.

    Args:
        model: The cut model.
        whole: Every sharded parameter's unsharded value.
    """
    place, shards = model.place, {entry.parameter: entry.parameter.data for entry in model if entry.parameter in whole}
    family, degree, index, group = place.family, place.degree, place.index, place.group
    try:
        _clear_gradients(model)
        for parameter in shards:
            _replace(parameter, whole[parameter])
        place.update(LayoutFamily(1), 1, 0, None)
        model.relayout()
        yield
    finally:
        _clear_gradients(model)
        for parameter, shard in shards.items():
            _replace(parameter, shard)
        place.update(family, degree, index, group)
        model.relayout()


def _clear_gradients(model: ShardedModel) -> None:
    for entry in model:
        entry.parameter.grad = None


def _replace(parameter: nn.Parameter, data: Tensor) -> None:
    # While any graph is alive (a loss that the user has kept), torch goes on with the node that accumulates the
    # gradient and expects the shape it was made for. Another dtype makes it forget that node (2.13: `set_data`).
    other = torch.float32 if data.dtype != torch.float32 else torch.float64
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data
