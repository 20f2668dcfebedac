"""A signal on one rank stops all ranks at the same step, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.lightning.rigs import Regression, Worlds, loader, make_trainer, slot


class _Signal(Callback):
    """Sends this process a signal in the middle of a batch."""

    def __init__(self, signum: int, batch: int) -> None:
        self.signum, self.batch = signum, batch
        self.steps = 0

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.batch:
            os.kill(os.getpid(), self.signum)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps = trainer.global_step


def _stopped(signum: int, sender: int, degrees: tuple[int, ...]) -> Any:
    callback = _Signal(signum if slot() == sender else 0, 2)
    trainer = make_trainer(degrees, callbacks=[callback])
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(Regression(), loader(degrees, 24))
    except SIGTERMException:
        ended = "SIGTERM"
    except SystemExit as error:
        ended = f"exit {error.code}"
    else:
        ended = "ran to the end"
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored
    return ended, callback.steps, trainer.global_step, signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("sender", [0, 1, 2])
@pytest.mark.parametrize(("signum", "ending"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "exit 1")])
def test_a_signal_on_one_rank_stops_all_after_the_same_step(
    world: Worlds, signum: int, ending: str, sender: int
) -> None:
    assert world(3).run(_stopped, signum, sender, (2, 1)) == [(ending, 3, 3, True)] * 3


@pytest.mark.parametrize(("signum", "ending"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "exit 1")])
def test_a_job_of_one_rank_stops_as_well(world: Worlds, signum: int, ending: str) -> None:
    assert world(1).run(_stopped, signum, 0, (1,)) == [(ending, 3, 3, True)]


def _handlers(degrees: tuple[int, ...]) -> list[bool]:
    """Are the handlers of before back after every call, twice with one trainer?"""
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    trainer, module, found = make_trainer(degrees), Regression(), []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, loader(degrees, 8))
        found.append([signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before)
    os.kill(os.getpid(), signal.SIGTERM)
    return [*found, called == [1]]


def test_signal_handlers_are_as_before_after_every_call(world: Worlds) -> None:
    assert world(2).run(_handlers, (2,)) == [[True, True, True]] * 2


def _chained(degrees: tuple[int, ...]) -> Any:
    """A handler of the user's own still hears of the signal."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: heard.append(signum))
    trainer = make_trainer(degrees, callbacks=[_Signal(signal.SIGTERM, 1)])
    with pytest.raises(SIGTERMException):
        trainer.fit(Regression(), loader(degrees, 12))
    return heard, trainer.global_step


def test_a_users_own_handler_is_called_too(world: Worlds) -> None:
    for heard, step in world(2).run(_chained, (2,)):
        assert heard and set(heard) == {signal.SIGTERM} and step == 2


class _Tested(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.batches = batch_idx
        if slot() == 1 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _evaluation(degrees: tuple[int, ...]) -> int:
    module = _Tested()
    with pytest.raises(SIGTERMException):
        make_trainer(degrees).test(module, loader(degrees, 12), verbose=False)
    return module.batches


def test_evaluation_stops_on_all_peers_at_the_same_batch(world: Worlds) -> None:
    assert world(2).run(_evaluation, (2,)) == [1, 1]
