"""Tensors that a user keeps per parameter outside of optimizers, such as moving averages: cut and moved like them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_ntp.comm import Generation, ShardedState, gather_full
from lightning_ntp.parallel import ShardedModel, ShardedParameter


class RegisteredState:
    """The mappings that :meth:`NTPStrategy.register_state` was given."""

    def __init__(self) -> None:
        self._states: list[ShardedState] = []

    def __iter__(self) -> Iterator[ShardedState]:
        return iter(self._states)

    def add(self, model: ShardedModel, state: ShardedState) -> None:
        """See :meth:`NTPStrategy.register_state`."""
        known = model.by_parameter()
        for parameter, values in state.items():
            if parameter not in known:
                raise ValueError(
                    f"the state to register has a tensor of shape {tuple(parameter.shape)} as a key, which is no"
                    f" parameter of {type(model.module).__name__}: use the parameters themselves as keys"
                )
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    raise ValueError(
                        f"the state to register has {key!r} of shape {tuple(value.shape)} for the parameter"
                        f" {known[parameter].name!r}, whose shard has the shape {tuple(parameter.shape)} here: only"
                        " tensors of the shard's shape and single numbers can be resharded"
                    )
        if all(state is not other for other in self._states):
            self._states.append(state)

    def remove(self, state: ShardedState) -> None:
        self._states = [other for other in self._states if other is not state]

    def clear(self) -> None:
        self._states = []

    def copy(self) -> RegisteredStateCopy:
        """Remember the values of now."""
        return RegisteredStateCopy(self._states)


class RegisteredStateCopy:
    """The values of one moment."""

    def __init__(self, states: list[ShardedState]) -> None:
        self._values = [
            (values, {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in values.items()})
            for state in states
            for values in state.values()
        ]

    def restore(self) -> None:
        """Put them back. Call it once: the copies become the state."""
        for values, copy in self._values:
            values.clear()
            values.update(copy)


def full_state(
    model: ShardedModel, state: Mapping[Tensor, Mapping[str, Any]], generation: Generation
) -> dict[str, dict[str, Any]]:
    """The state by parameter name, unsharded, on rank 0; empty elsewhere. Collective over replica 0."""
    full: dict[str, dict[str, Any]] = {}
    for entry in model:
        values = state.get(entry.parameter)
        if values is not None:
            full[entry.name] = {
                k: gather_full(entry, v, generation)
                if isinstance(v, Tensor) and v.shape == entry.parameter.shape
                else v
                for k, v in sorted(values.items())
            }
    return full if generation.rank == 0 else {}


def local_state(model: ShardedModel, full: Mapping[str, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Cut what :func:`full_state` has put together to this rank's shards, on its device."""
    known = model.by_name()
    local: dict[Tensor, dict[str, Any]] = {}
    for name, values in full.items():
        if name not in known:
            raise ValueError(f"the state has {name!r}, which is no parameter of {type(model.module).__name__}")
        entry = known[name]
        local[entry.parameter] = {
            key: _cut(model, entry, value) if isinstance(value, Tensor) and value.shape == entry.shape else value
            for key, value in values.items()
        }
    return local


def _cut(model: ShardedModel, entry: ShardedParameter, value: Tensor) -> Tensor:
    shard = value if entry.sharding.replicated else entry.cut(value, model.layouts(entry), model.place.index)
    return shard.to(entry.parameter.device, copy=True)
