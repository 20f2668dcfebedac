"""Which state a rank keeps per parameter, so that another one can make room for its shards of it.

Optimizers make their state in their first step, which a newcomer has not had. Before shards can move to it, it needs
tensors of the right names and types to put them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ntp.comm import ShardedState
from lightning_ntp.lightning.arrivals.rebinding import Carrier, Items, names_of


class CannotJoin(RuntimeError):
    """A newcomer differs from the rank whose state it was to take over."""

    __plain_reason__ = True  # no bug: the supervisor prints the message alone


@dataclass(frozen=True)
class Shard:
    """A tensor that is cut like its parameter: its values travel as shards."""

    dtype: torch.dtype
    beside: bool
    """Whether it is on its parameter's device rather than in host memory."""


_shard = cache(Shard)
"""The same object for the same kind: it is written once, however many parameters have it."""


def schema_of(module: nn.Module, states: Iterable[ShardedState]) -> list[dict[str, dict[str, Any]]]:
    """For each mapping, parameter name -> key -> a :class:`Shard`, or the value itself."""

    def described(parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        shape, device = parameter.shape, parameter.device.type
        return {
            key: _shard(value.dtype, value.device.type == device)
            if isinstance(value, Tensor) and value.shape == shape
            else value
            for key, value in values.items()
        }

    return _by_name(module, states, described)


def numbers_of(module: nn.Module, states: Iterable[ShardedState]) -> list[dict[str, dict[str, Any]]]:
    """The same, but only what is no shard: it is the same on all indices."""

    def numbers(parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        shape = parameter.shape
        return {k: v for k, v in values.items() if not isinstance(v, Tensor) or v.shape != shape}

    return _by_name(module, states, numbers)


def _by_name(
    module: nn.Module,
    states: Iterable[ShardedState],
    take: Callable[[Tensor, Mapping[str, Any]], dict[str, Any]],
) -> list[dict[str, dict[str, Any]]]:
    names = names_of(module.named_parameters())
    return [
        {names[parameter]: take(parameter, values) for parameter, values in state.items() if parameter in names}
        for state in states
    ]


def pack_schemas(carrier: Carrier, schemas: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[Items]:
    """Write schemas, or numbers alone."""
    return [carrier.pack_items(label, schema, limit=None) for label, schema in zip(labels, schemas, strict=True)]


def make_state(module: nn.Module, state: ShardedState, schema: Mapping[str, Mapping[str, Any]], label: str) -> None:
    """Give a mapping the keys of a schema: empty tensors where shards will come, the values of everything else.

    What the schema does not have goes: a checkpoint that only this rank has loaded, say. Tensors that fit stay.

    Raises:
        CannotJoin: If the schema names a parameter that the module does not have, or the mapping cannot be changed.
    """
    known = dict(module.named_parameters(remove_duplicate=False))
    strangers = sorted(schema.keys() - known.keys())
    if strangers:
        raise CannotJoin(
            f"{label} has state of {', '.join(map(repr, strangers))} at the peers of this rank, where"
            f" {type(module).__name__} has no such parameter: the script must build the same model whenever it starts"
        )
    try:
        wanted = {known[name] for name in schema}
        for parameter in [p for p in state if p not in wanted]:
            del state[parameter]
        for name, keys in schema.items():
            parameter = known[name]
            if parameter not in state:
                state[parameter] = {}
            values = state[parameter]
            for key in [key for key in values if key not in keys]:
                del values[key]
            for key, described in keys.items():
                values[key] = _room(parameter, values.get(key), described)
    except TypeError as error:
        raise CannotJoin(
            f"{label} has other parameters or keys here than at the peers of this rank, and cannot be changed"
            f" ({error}): make it a dict of dicts, or make the same in it whenever the script starts"
        ) from error


def _room(parameter: Tensor, held: Any, described: Any) -> Any:
    if not isinstance(described, Shard):
        return described
    device = parameter.device if described.beside else torch.device("cpu")
    if isinstance(held, Tensor) and (held.shape, held.dtype, held.device) == (
        parameter.shape,
        described.dtype,
        device,
    ):
        return held
    # as the optimizer would: with the parameter's strides
    return torch.empty_like(parameter, dtype=described.dtype, device=device, requires_grad=False)


def put_numbers(module: nn.Module, state: ShardedState, numbers: Mapping[str, Mapping[str, Any]], label: str) -> None:
    """Put the values of another rank beside the shards that are there.

    Raises:
        CannotJoin: If a parameter has no state here, so that shards are missing.
    """
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, values in numbers.items():
        parameter = known.get(name)
        if parameter is None or parameter not in state:
            raise CannotJoin(
                f"{label} has state of {name!r} at the peers of this rank and none here: it was made after they were"
                " asked which state they keep, and its shards were not moved"
            )
        state[parameter].update(values)
