"""A cut model as it was before it was cut, for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from lightning_ntp.parallel.registry import ShardedModel, replace_data
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
            replace_data(parameter, whole[parameter])
        place.update(LayoutFamily(1), 1, 0, None)
        model.relayout()
        yield
    finally:
        _clear_gradients(model)
        for parameter, shard in shards.items():
            replace_data(parameter, shard)
        place.update(family, degree, index, group)
        model.relayout()


def _clear_gradients(model: ShardedModel) -> None:
    for entry in model:
        entry.parameter.grad = None
