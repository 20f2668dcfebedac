"""What makes a rank that was started again equal to its peers, besides the shards of parameters and states.

A newcomer has run the user's script up to its first training batch, so it has the same objects; what has happened to
them since is in the bytes that a *giver* captures, a healthy tensor-parallel peer in the middle of the run.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_ntp.comm import ShardedState
from lightning_ntp.lightning import private_loops
from lightning_ntp.lightning.arrivals.rebinding import Carrier, Items, Name, References, names_of, put_attributes
from lightning_ntp.lightning.arrivals.state_schema import (
    CannotJoin,
    make_state,
    numbers_of,
    pack_schemas,
    put_numbers,
    schema_of,
)
from lightning_ntp.lightning.metric_states import metric_kinds, metric_states, put_metric_states
from lightning_ntp.lightning.rank_zero import put_remembered_rows, remembered_rows, stand_ins
from lightning_ntp.lightning.steps.attribute_copies import own_attributes
from lightning_ntp.lightning.steps.deferred_rows import DeferredRows

Content = dict[str, Any]

_OF_DATAMODULES = frozenset(vars(LightningDataModule()))
# hooks and the like, and what is carried otherwise; learning-rate schedulers put a `step` of their own there
_OF_OPTIMIZERS = frozenset(vars(SGD([torch.zeros(1)]))) | {"step"}


@dataclass(frozen=True)
class Joined:
    """What came of a capture besides the state that is installed."""

    result: Any
    """Of the giver's forward and backward, if it was captured with one: detached, on this rank's device."""
    skipped: tuple[str, ...]
    """What is not as on the giver, and why: attributes that cannot be pickled or are too large."""


class JoinedState:
    """Captures the state of a rank, or installs that of another one.

    Order of calls: the giver's :meth:`schema` between two steps, the newcomer's :meth:`make_states` with it; then
    shards may move. The giver's :meth:`capture` at any moment of a step, and the newcomer's :meth:`install` at the
    same moment: once it has its loaders in position, for iterating over them draws random numbers.

    Attributes of the module, a callback or the datamodule that mean one rank alone, such as its slot, stay as they are
    if their owner lists their names in ``ntp_own_attributes``.

    One object per fit: who has joined gives on only what it knows itself.

    Args:
        trainer: In a fit, set up.
        device: This rank's own.
        registered: The mappings given to :meth:`NTPStrategy.register_state`, in order; looked at in every call.
        rows: Holds rows back in a step.
    """

    def __init__(
        self,
        trainer: Trainer,
        device: torch.device,
        registered: Iterable[ShardedState] = (),
        rows: DeferredRows | None = None,
    ) -> None:
        self._trainer, self._device, self._rows = trainer, device, rows
        self._registered_in = registered
        self._constant: frozenset[str] | None = None
        """Of a rank that has joined: the buffers that were constant before it did."""

    @property
    def _module(self) -> Any:
        return self._trainer.lightning_module

    @property
    def _datamodule(self) -> LightningDataModule | None:
        found: LightningDataModule | None = self._trainer.datamodule  # type: ignore[attr-defined]
        return found

    @property
    def _registered(self) -> list[ShardedState]:
        return list(self._registered_in)

    @property
    def _states(self) -> list[ShardedState]:
        return [*(optimizer.state for optimizer in self._trainer.optimizers), *self._registered]

    @property
    def _labels(self) -> list[str]:
        optimizers = [f"optimizer {n} ({type(o).__name__})" for n, o in enumerate(self._trainer.optimizers)]
        return optimizers + [f"registered state {n}" for n in range(len(self._registered))]

    def _carrier(self) -> Carrier:
        more: dict[Name, Any] = {("registered state", n): state for n, state in enumerate(self._registered)}
        more |= {("rows", n): rows for n, rows in enumerate(stand_ins(self._trainer))}
        return Carrier(References(self._trainer, more), self._device)

    # ---- state per parameter ------------------------------------------------------------------------------------

    def schema(self) -> bytes:
        """Which state per parameter there is, of optimizers and registered mappings. Call it between two steps.

        Raises:
            CannotJoin: If some of it cannot be pickled. The giver itself can go on.
        """
        carrier = self._carrier()
        schemas = pack_schemas(carrier, schema_of(self._module, self._states), self._labels)
        if carrier.skipped:
            raise CannotJoin(f"state of parameters cannot be carried to another rank: {'; '.join(carrier.skipped)}")
        return pickle.dumps({"kinds": self._kinds(), "states": schemas})

    def make_states(self, schema: bytes) -> None:
        """Make the states that another rank has: empty where shards will come.

        Raises:
            CannotJoin: If this rank differs in a way that cannot be made right.
        """
        content: Content = pickle.loads(schema)  # from the job's own store
        self._refuse_differences(content["kinds"])
        carrier = self._carrier()
        with torch.inference_mode(False), torch.no_grad():
            for state, packed, label in zip(self._states, content["states"], self._labels, strict=True):
                make_state(self._module, state, _all_of(carrier, packed, label), label)

    # ---- everything else ----------------------------------------------------------------------------------------

    def loops(self) -> bytes:
        """Where the loops are, for a :meth:`capture` that comes later."""
        return self._carrier().pack(private_loops.where_loops_are(self._trainer))

    def capture(self, result: Any = None, constant: Collection[str] = (), loops: bytes = b"") -> bytes:
        """Everything that a peer needs to be equal to this rank, as it is now.

        Args:
            result: What the forward and backward of the present step have given: anything with tensors in it.
            constant: Names of buffers that are as every rank has made them, and need not be carried: see
                :meth:`SnapshotRecorder.constant_buffers`.
            loops: Where the loops were, if that is not where they are.
        """
        carrier, trainer, module = self._carrier(), self._trainer, self._module
        drawn = carrier.pack(random_states(self._device))
        constant = frozenset(constant) if self._constant is None else self._constant & frozenset(constant)
        orders, entries = private_loops.logged_entries(trainer)
        states, others = metric_states(module)
        buffers = {k: b.detach() for k, b in module.named_buffers() if k not in constant}
        owners = {k: o for k, o in self._owners().items() if hasattr(o, "ntp_snapshot")}
        content: Content = {
            "kinds": self._kinds(),
            "random": drawn,
            "loops": loops or carrier.pack(private_loops.where_loops_are(trainer)),
            "orders": orders,
            "logged": carrier.pack_items("what was logged", _without_groups(carrier, entries)),
            "shown": carrier.pack_items("logged values", private_loops.logged_values(trainer)),
            "rows": carrier.pack_items("rows for loggers", self._rows_now()),
            "metrics": carrier.pack_items("metrics", states, limit=None),
            "metric attributes": carrier.pack_items("metrics", others, plain=True),
            "buffers": carrier.pack_items("buffers", buffers, limit=None),
            "constant": constant,
            "flags": {name: p.requires_grad for name, p in module.named_parameters()},
            "attributes": carrier.pack_items(
                type(module).__name__, _without_own(module, own_attributes(module)), plain=True
            ),
            "owned": {k: _packed_call(carrier, f"{k}.ntp_snapshot()", o.ntp_snapshot) for k, o in owners.items()},
            "callbacks": [_packed_callback(carrier, callback) for callback in self._callbacks()],
            "schedulers": [
                carrier.pack_items(type(config.scheduler).__name__, config.scheduler.state_dict())
                for config in trainer.lr_scheduler_configs
            ],
            "optimizers": [self._packed_optimizer(carrier, optimizer) for optimizer in trainer.optimizers],
            "numbers": pack_schemas(carrier, numbers_of(module, self._states), self._labels),
            "scaler": carrier.pack(private_loops.scaler_state(trainer.precision_plugin)),
            "datamodule": self._packed_datamodule(carrier),
            "result": _packed_result(carrier, result),
        }
        content["skipped"] = carrier.skipped
        return pickle.dumps(content)

    def install(self, content: bytes, *, fresh_replica: bool = False, loops: bool = True) -> Joined:
        """Become equal to the rank that has captured this.

        Args:
            content: See :meth:`capture`.
            fresh_replica: Whether the giver is of another replica: what its metrics and ``self.log`` have gathered for
                sums over replicas is counted there, and begins at zero here.
            loops: Whether the loops go on where the giver's were.

        Raises:
            CannotJoin: If this rank's trainer is made of other parts than the giver's. Nothing has changed then.
        """
        captured: Content = pickle.loads(content)  # from the job's own store
        self._refuse_differences(captured["kinds"])
        carrier = self._carrier()
        with torch.inference_mode(False), torch.no_grad():
            self._install(captured, carrier, fresh_replica)
            if loops:
                private_loops.put_loops(self._trainer, carrier.unpack(captured["loops"]))
            result = carrier.unpack(captured["result"])
        self._constant = captured["constant"]
        # last: anything above may have drawn numbers
        put_random_states(carrier.unpack(captured["random"]), self._device)
        return Joined(result, (*captured["skipped"], *carrier.skipped))

    def _install(self, captured: Content, carrier: Carrier, fresh: bool) -> None:
        trainer, module = self._trainer, self._module
        named = dict(module.named_parameters())
        for name, flag in captured["flags"].items():
            named[name].requires_grad_(flag)
        self._put_buffers(carrier, carrier.unpack_items("buffers", captured["buffers"]))
        put_attributes(vars(module), carrier.unpack_items(type(module).__name__, captured["attributes"]))
        states = carrier.unpack_items("metrics", captured["metrics"])
        put_metric_states(module, states, carrier.unpack_items("metrics", captured["metric attributes"]), fresh)
        self._put_optimizers(captured, carrier)
        private_loops.put_scaler_state(trainer.precision_plugin, carrier.unpack(captured["scaler"]))
        self._put_datamodule(carrier, captured["datamodule"])
        for callback, packed in zip(self._callbacks(), captured["callbacks"], strict=True):
            _put_callback(carrier, callback, packed)
        owners = self._owners()
        for name, packed in captured["owned"].items():
            if packed is not None:
                owners[name].ntp_restore(carrier.unpack(packed))
        private_loops.put_logged_values(trainer, carrier.unpack_items("logged values", captured["shown"]))
        entries = carrier.unpack_items("what was logged", captured["logged"])
        private_loops.put_logged_entries(trainer, captured["orders"], entries, fresh)
        rows = carrier.unpack_items("rows for loggers", captured["rows"])
        put_remembered_rows(trainer, rows.get("remembered", [None] * len(trainer.loggers)))
        if self._rows is not None:
            self._rows.waiting = rows.get("waiting", ())

    # ---- parts --------------------------------------------------------------------------------------------------

    def _kinds(self) -> dict[str, list[str]]:
        """What the trainer is made of: must be the same on all ranks."""
        trainer, module = self._trainer, self._module
        parts: dict[str, Iterable[Any]] = {
            "callbacks": self._callbacks(),
            "optimizers": trainer.optimizers,
            "learning-rate schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loggers": trainer.loggers,
            "registered states": self._registered,
        }
        kinds = {what: [type(each).__name__ for each in found] for what, found in parts.items()}
        return {
            "modules": [type(module).__name__],
            "parameters": [name for name, _ in module.named_parameters()],
            **kinds,
            "metrics": metric_kinds(module),
        }

    def _refuse_differences(self, there: Mapping[str, list[str]]) -> None:
        for what, here in self._kinds().items():
            for number in range(max(len(here), len(there[what]))):
                own, other = (kinds[number] if number < len(kinds) else "nothing" for kinds in (here, there[what]))
                if own != other:
                    raise CannotJoin(
                        f"the {what} of this rank are not those of its peers, whose state it was to take over: number"
                        f" {number} is {own} here and {other} there (of {len(here)} here and {len(there[what])} there)."
                        " The script must build the same trainer and model on all ranks whenever it starts"
                    )

    def _callbacks(self) -> list[Callback]:
        # what is shown is shown by rank 0 alone, which goes on with it in `rank_zero`
        found = self._trainer.callbacks  # type: ignore[attr-defined]
        return [each for each in found if not isinstance(each, ProgressBar | ModelSummary)]

    def _owners(self) -> dict[str, Any]:
        """Whoever may have ``ntp_snapshot``."""
        callbacks = {f"callback {number}": callback for number, callback in enumerate(self._callbacks())}
        return {"the module": self._module, **callbacks}

    def _rows_now(self) -> dict[str, Any]:
        waiting = self._rows.waiting if self._rows is not None else ()
        return {"remembered": remembered_rows(self._trainer), "waiting": waiting}

    def _put_buffers(self, carrier: Carrier, buffers: Mapping[str, Tensor]) -> None:
        module: nn.Module = self._module
        for name, value in buffers.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            held = dict(owner.named_buffers(recurse=False, remove_duplicate=False)).get(leaf)
            if held is None and not hasattr(owner, leaf):
                carrier.skip("buffers", name, "there is none here")
            elif held is None or held.shape == value.shape and held.dtype != value.dtype:
                setattr(owner, leaf, value)
            elif held.shape == value.shape:
                held.copy_(value)
            else:  # one that a layout makes
                carrier.skip("buffers", name, f"of shape {tuple(value.shape)} there and {tuple(held.shape)} here")

    def _packed_optimizer(self, carrier: Carrier, optimizer: Optimizer) -> Content:
        label, names = type(optimizer).__name__, names_of(self._module.named_parameters())
        own = {k: v for k, v in vars(optimizer).items() if k not in _OF_OPTIMIZERS and not callable(v)}
        return {
            "names": [[names[p] for p in group["params"]] for group in optimizer.param_groups],
            "groups": [
                carrier.pack_items(f"{label} group {n}", {k: v for k, v in group.items() if k != "params"})
                for n, group in enumerate(optimizer.param_groups)
            ],
            "attributes": carrier.pack_items(label, own, plain=True),
        }

    def _put_optimizers(self, captured: Content, carrier: Carrier) -> None:
        trainer, known = self._trainer, dict(self._module.named_parameters())
        for optimizer, packed in zip(trainer.optimizers, captured["optimizers"], strict=True):
            label = type(optimizer).__name__
            held = list(optimizer.param_groups)
            for number, (names, items) in enumerate(zip(packed["names"], packed["groups"], strict=True)):
                # others than here if parameters were unfrozen meanwhile
                group = held[number] if number < len(held) else dict(optimizer.defaults)
                group.update(carrier.unpack_items(f"{label} group {number}", items))
                group["params"] = [known[name] for name in names]
                held[number : number + 1] = [group]
            optimizer.param_groups[:] = held[: len(packed["names"])]
            put_attributes(vars(optimizer), carrier.unpack_items(label, packed["attributes"]))
        for state, packed, label in zip(self._states, captured["numbers"], self._labels, strict=True):
            put_numbers(self._module, state, _all_of(carrier, packed, label), label)
        for config, packed in zip(trainer.lr_scheduler_configs, captured["schedulers"], strict=True):
            scheduler: Any = config.scheduler
            values = carrier.unpack_items(type(scheduler).__name__, packed)
            scheduler.load_state_dict({**scheduler.state_dict(), **values})

    def _packed_datamodule(self, carrier: Carrier) -> Content | None:
        datamodule = self._datamodule
        if datamodule is None:
            return None
        label, own = type(datamodule).__name__, vars(datamodule)
        plain = {k: v for k, v in own.items() if k not in _OF_DATAMODULES and _may_be_plain(v)}
        overrides = type(datamodule).state_dict is not LightningDataModule.state_dict
        return {
            "attributes": carrier.pack_items(label, _without_own(datamodule, plain), plain=True),
            "state": _packed_call(carrier, f"{label}.state_dict()", datamodule.state_dict) if overrides else None,
        }

    def _put_datamodule(self, carrier: Carrier, packed: Content | None) -> None:
        datamodule = self._datamodule
        if datamodule is None or packed is None:
            return
        label = type(datamodule).__name__
        if packed["state"] is not None:
            datamodule.load_state_dict(carrier.unpack(packed["state"]))
        put_attributes(vars(datamodule), carrier.unpack_items(label, packed["attributes"]))


def _all_of(carrier: Carrier, items: Items, label: str) -> dict[str, Any]:
    """Values none of which may be missing."""
    before = len(carrier.skipped)
    values = carrier.unpack_items(label, items)
    if len(carrier.skipped) > before:
        raise CannotJoin(f"state of another rank cannot be read here: {'; '.join(carrier.skipped[before:])}")
    return values


def _without_own(owner: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    own = getattr(owner, "ntp_own_attributes", ())
    return {name: value for name, value in attributes.items() if name not in own}


def _packed_call(carrier: Carrier, label: str, call: Callable[[], Any]) -> bytes | None:
    """What a user's method gives; None if it gives nothing that can be carried: the giver has to go on."""
    try:
        return carrier.pack(call())
    except Exception as error:
        carrier.skip(label, "", error)
        return None


def random_states(device: torch.device) -> dict[str, Any]:
    """Of this process: Python's, numpy's and torch's."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def put_random_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _without_groups(carrier: Carrier, entries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    grouped = [name for name, entry in entries.items() if entry["sync"]["_group"] is not None]
    for name in grouped:
        carrier.skip("what was logged", name, "it has a sync_dist_group, which each rank has its own of")
    return {name: entry for name, entry in entries.items() if name not in grouped}


def _may_be_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | str | bytes | list | tuple | dict | set | Tensor | None)


# ---- callbacks ------------------------------------------------------------------------------------------------------


def _packed_callback(carrier: Carrier, callback: Callback) -> Content:
    label, before = type(callback).__name__, len(carrier.skipped)
    attributes = carrier.pack_items(label, _attributes_of(callback))
    state = None
    if len(carrier.skipped) > before and type(callback).state_dict is not Callback.state_dict:
        # what it would keep in a checkpoint may hold what could not be pickled as it is
        state = _packed_call(carrier, f"{label}.state_dict()", callback.state_dict)
    return {"attributes": attributes, "state": state}


def _attributes_of(callback: Callback) -> dict[str, Any]:
    kind = type(callback)
    # a method that was replaced on the instance is replaced on the other rank too
    found = {k: v for k, v in vars(callback).items() if not (callable(v) and hasattr(kind, k))}
    return _without_own(callback, found)


def _put_callback(carrier: Carrier, callback: Callback, packed: Content) -> None:
    label = type(callback).__name__
    if packed["state"] is not None:
        callback.load_state_dict(carrier.unpack(packed["state"]))
    # after it: what could be carried as it is, is right
    put_attributes(vars(callback), carrier.unpack_items(label, packed["attributes"]))


# ---- the result of a step -------------------------------------------------------------------------------------------


def _packed_result(carrier: Carrier, result: Any) -> bytes:
    """All of it, or what of it can be carried."""
    try:
        return carrier.pack(result)
    except Exception as error:  # a user's object may raise anything
        kept: Any = None
        if isinstance(result, ClosureResult):
            kept = copy.copy(result)
            kept.extra = _carriable(carrier, result.extra)
        elif isinstance(result, dict):
            kept = _carriable(carrier, result)
        else:
            carrier.skip("the result of the step", "", error)
        return carrier.pack(kept)


def _carriable(carrier: Carrier, values: Mapping[str, Any]) -> dict[str, Any]:
    packed = carrier.pack_items("the result of the step", values, limit=None)
    return {k: v for k, v in values.items() if not packed.each or k in packed.each}
