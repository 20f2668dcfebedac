"""Checkpoints with the unsharded model's names and shapes, from shards and to shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_ntp.comm import Generation, gather_full
from lightning_ntp.parallel import ShardedModel, ShardedParameter


def full_state_dict(model: ShardedModel, generation: Generation) -> dict[str, Any]:
    """The model's state dict, unsharded, on rank 0; empty elsewhere. Collective over replica 0.

    Tensors are gathered one at a time, into host memory; tied weights once. In a job without tensor parallelism they
    are the module's own, as in Lightning's strategies: a copy would be a second one.
    """
    if never_cut(model):
        return model.module.state_dict() if generation.rank == 0 else {}
    known = model.by_name()
    gathered: dict[int, Tensor | None] = {}
    state: dict[str, Any] = {}
    for name, value in model.module.state_dict().items():
        entry = known.get(name)
        if entry is None:
            _refuse_copy_of_shard(model, name, value)
            state[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            continue
        if entry.turn not in gathered:
            gathered[entry.turn] = gather_full(entry, value, generation)
        state[name] = gathered[entry.turn]
    return state if generation.rank == 0 else {}


def _refuse_copy_of_shard(model: ShardedModel, name: str, value: Any) -> None:
    """A tensor that was made from a shard would be written as if it were the whole."""
    if name in model.names or not isinstance(value, Tensor):
        return
    for entry in model:
        if not entry.sharding.replicated and value.shape == entry.parameter.shape != entry.shape:
            raise RuntimeError(
                f"{name!r} came to {type(model.module).__name__} after it was cut, and has the shape"
                f" {tuple(value.shape)} of a shard of {entry.name!r}: the checkpoint would hold a part as if it were"
                " the whole. Make copies in __init__ or configure_model, before the model is cut, or keep them outside"
                " of the module with trainer.strategy.register_state()"
            )


def check_still_fits(model: ShardedModel, generation: Generation) -> None:
    """A module that an earlier trainer call has cut: are its shards what this one needs?

    Raises:
        RuntimeError: If it was cut for another place, or parameters were added or replaced since.
    """
    place = (generation.topology.family, generation.degree, generation.index)
    if (model.place.family, model.place.degree, model.place.index) != place:
        raise RuntimeError(
            f"{type(model.module).__name__} was cut for tensor-parallel degree {model.place.degree} (index"
            f" {model.place.index}) by an earlier trainer; this rank now has degree {generation.degree} (index"
            f" {generation.index}): save a checkpoint, make a new module and continue with `fit(ckpt_path=...)`"
        )
    known = model.by_parameter()
    for name, parameter in model.module.named_parameters():
        if parameter not in known:
            raise RuntimeError(
                f"the parameter {name!r} of shape {tuple(parameter.shape)} came to {type(model.module).__name__} after"
                " it was cut: make a new module with it, and load the other weights from a checkpoint"
            )


def local_state_dict(model: ShardedModel, state: Mapping[str, Any]) -> dict[str, Any]:
    """Cut an unsharded state dict to this rank's shards.

    Raises:
        ValueError: If a tensor has another shape than the unsharded parameter.
    """
    known = model.by_name()
    return {name: _cut(model, known[name], value) if name in known else value for name, value in state.items()}


def full_optimizer_state(model: ShardedModel, optimizer: Optimizer, generation: Generation) -> dict[str, Any]:
    """The optimizer's state dict, unsharded, on rank 0; empty elsewhere. Collective over replica 0.

    Raises:
        TypeError: If a tensor of the state is neither shaped like its parameter nor a single number: nobody can
            know how to put its shards together.
    """
    local = optimizer.state_dict()
    if never_cut(model):
        return local if generation.rank == 0 else {}
    state: dict[int, dict[str, Any]] = {}
    for number, entry in _numbered(model, optimizer, local):
        values = local["state"].get(number)
        if values is None:
            continue
        state[number] = {
            key: gather_full(entry, value, generation) if _is_shard(entry, key, value, optimizer) else _copied(value)
            for key, value in values.items()
        }
    return {**local, "state": state} if generation.rank == 0 else {}


def local_optimizer_state(model: ShardedModel, optimizer: Optimizer, full: Mapping[str, Any]) -> dict[str, Any]:
    """Cut an unsharded optimizer state dict to this rank's shards."""
    if never_cut(model):
        return dict(full)
    state = dict(full["state"])
    for number, entry in _numbered(model, optimizer, full):
        if number in state:
            state[number] = {
                key: _cut(model, entry, value) if isinstance(value, Tensor) and value.shape == entry.shape else value
                for key, value in state[number].items()
            }
    return {**full, "state": state}


def check_optimizer_state(model: ShardedModel, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state cannot be put together again, as soon as it has state.

    Raises:
        TypeError: As :func:`full_optimizer_state` would.
    """
    if never_cut(model):
        return
    known = model.by_parameter()
    for parameter, values in optimizer.state.items():
        if parameter in known:
            for key, value in values.items():
                _is_shard(known[parameter], key, value, optimizer)


def never_cut(model: ShardedModel) -> bool:
    """Whether no replica of the job ever has a degree above 1."""
    return model.place.family.full_degree == 1


def _numbered(
    model: ShardedModel, optimizer: Optimizer, state: Mapping[str, Any]
) -> list[tuple[int, ShardedParameter]]:
    """The numbers by which a state dict names parameters, with the parameters."""
    known = model.by_parameter()
    numbered = []
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            if parameter not in known:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not the"
                    " module's: only parameters of the LightningModule can be trained"
                )
            numbered.append((number, known[parameter]))
    return numbered


def _is_shard(entry: ShardedParameter, key: str, value: Any, optimizer: Optimizer) -> bool:
    if not isinstance(value, Tensor) or value.dim() == 0 and entry.parameter.dim() > 0:
        return False
    if value.shape == entry.parameter.shape:
        return True
    raise TypeError(
        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for the parameter {entry.name!r},"
        f" whose shard has the shape {tuple(entry.parameter.shape)}: only state of the parameter's shape or single"
        " numbers can be resharded. Use an optimizer such as SGD, Adam, AdamW, Adagrad or RMSprop"
    )


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _cut(model: ShardedModel, entry: ShardedParameter, value: Any) -> Any:
    if not isinstance(value, Tensor) or entry.sharding.replicated:
        return value
    if value.shape != entry.shape:
        raise ValueError(
            f"the checkpoint has {entry.name!r} with shape {tuple(value.shape)}; the unsharded parameter has"
            f" {tuple(entry.shape)}"
        )
    return entry.cut(value, model.layouts(entry), model.place.index)
