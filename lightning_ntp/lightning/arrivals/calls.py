"""The trainer's calls of a script, numbered: a process that is started again passes over those that are over.

A newcomer re-runs the script. A call that the members have finished returns at once what it returned there; in the one
that is running it joins them, if that is a fit, and waits for its end otherwise.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerState
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_ntp.comm import runtime
from lightning_ntp.launch.environment import JOINS, SLOT, STORE
from lightning_ntp.lightning.arrivals.joined_state import put_random_states, random_states
from lightning_ntp.lightning.private import is_tuner_exit

log = logging.getLogger("lightning_ntp")

_LARGEST = 1 << 20
"""Bytes of a result that is kept; of a larger one a newcomer gets None."""
_TICK = 0.05
_PATIENCE = timedelta(seconds=30)
_FIT = "_fit_impl"
"""What ``Trainer.fit`` launches (2.6.6)."""

_FOUND = ("optimal_lr", "optimal_batch_size")
"""Of ``LearningRateFinder`` and ``BatchSizeFinder`` (2.6.6)."""
_SETTINGS = ("lr", "learning_rate", "batch_size")
"""The names under which they look for what to set."""

_number = 0


@dataclass
class Record:
    """What is left of a call.

    Args:
        result: What it has returned.
        state: The trainer's.
        metrics: ``trainer.callback_metrics``.
        callbacks: State of the checkpoint callbacks.
        tuned: What finders have found: attributes of callbacks, by their place.
        settings: Numbers that they may have set, of the module or its hyperparameters.
        random: The random states after it, pickled: what the script draws next, data perhaps, must be the same.
    """

    result: Any
    state: TrainerState
    metrics: dict[str, Any]
    callbacks: dict[str, Any] = field(default_factory=dict)
    tuned: dict[int, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    random: bytes = b""


def current() -> int:
    """The number of the running call, or of the last one."""
    return _number


def key(number: int, what: str = "over") -> str:
    """Where the members leave a note on a call."""
    return f"call/{number}/{what}"


def run(function: Callable[..., Any], call: Callable[[], Any], trainer: Trainer | None) -> Any:
    """Run a call of the trainer in this rank; in a newcomer, pass over it if the others have finished it.

    Args:
        function: What Lightning calls.
        call: Calls it.
        trainer: The trainer.
    """
    global _number
    _number += 1
    number = _number
    if _joins():
        found = _wait_for_turn(number, function)
        if found is not None:
            return _pass_over(found, trainer)
    try:
        result = call()
    except BaseException as error:
        if is_tuner_exit(error):
            if not _joins():
                _leave_record(number, None, trainer)  # a learning-rate finder's fit ends so
            elif (found := _find(number)) is not None:
                _pass_over(found, trainer)  # it came too late to join
        raise
    _leave_record(number, result, trainer)
    return result


def _joins() -> bool:
    running = runtime.current()
    return os.environ.get(JOINS) == "1" if running is None else running.joining


def _leave_record(number: int, result: Any, trainer: Trainer | None) -> None:
    running = runtime.current()
    if running is None or running.joining or running.generation.rank or trainer is None:
        return
    # of users' callbacks nobody knows whether they communicate when they are asked for their state
    callbacks = {each.state_key: each.state_dict() for each in _checkpoints(trainer)}
    tuned = {}
    for place, each in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
        tuned[place] = {name: vars(each)[name] for name in _FOUND if name in vars(each)}
    settings = _settings_of(trainer.lightning_module)
    drawn = pickle.dumps(random_states(trainer.strategy.root_device))
    for kept in (result, None):
        record = Record(kept, trainer.state, dict(trainer.callback_metrics), callbacks, tuned, settings, drawn)
        try:
            content = pickle.dumps(move_data_to_device(record.__dict__, "cpu"))
        except Exception:  # a result may be anything
            continue
        if len(content) <= _LARGEST:
            running.membership.post(key(number), content)
            return
    running.membership.post(key(number), pickle.dumps(Record(None, trainer.state, {}, random=drawn).__dict__))


def _settings_of(module: Any) -> dict[str, float]:
    found = {name: lightning_getattr(module, name) for name in _SETTINGS if lightning_hasattr(module, name)}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _find(number: int) -> Record | None:
    # not RankIdentity: the teardown of a call may have taken other variables away
    host, _, port = os.environ[STORE].rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_PATIENCE)
    if not store.check([key(number)]):
        return None
    return Record(**pickle.loads(store.get(key(number))))  # from the job's own store


def _wait_for_turn(number: int, function: Callable[..., Any]) -> Record | None:
    """What is left of the call; None if it is a fit that may be running."""
    found = _find(number)
    if found is not None or getattr(function, "__name__", "") == _FIT:
        return found
    log.info("slot %d waits for the end of the call that is running: ranks join only in a fit", int(os.environ[SLOT]))
    while found is None:
        time.sleep(_TICK)
        found = _find(number)
    return found


def _checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if type(each) is ModelCheckpoint]


def _pass_over(record: Record, trainer: Trainer | None) -> Any:
    if trainer is not None:
        trainer.state = record.state
        trainer.callback_metrics.update(record.metrics)
        for each in _checkpoints(trainer):
            if each.state_key in record.callbacks:
                each.load_state_dict(record.callbacks[each.state_key])
        for place, each in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
            vars(each).update(record.tuned.get(place, {}))
        for name, value in record.settings.items():
            if _settings_of(trainer.lightning_module).get(name, value) != value:
                lightning_setattr(trainer.lightning_module, name, value)
        put_random_states(pickle.loads(record.random), trainer.strategy.root_device)  # from the job's own store
    return record.result
