"""The learning-rate finder gives the suggestion of one process, also when a rank dies while it searches."""

from __future__ import annotations

import csv
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from tests.harness import Outcome
from tests.lightning.rigs import EXACT as SAME
from tests.lightning.rigs import Degrees, EndState, Regression, Worlds, assert_same, loader, make_trainer, slot
from tests.recovery.jobs import EXACT

TRIALS, STEPS = 16, 4
SEARCH: dict[str, Any] = {"min_lr": 1e-3, "max_lr": 1.0, "early_stop_threshold": None}


class Momentum(Regression):
    """The optimizer has a state that moves."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def _kill(place: str) -> None:
    """Let this process die when it comes to a place of the search."""
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
    from lightning.pytorch.tuner import lr_finder

    from lightning_ntp.lightning.steps.whole_state import WholeState

    owners: dict[str, tuple[Any, str]] = {
        "save": (WholeState, "save"),
        "end_of_batch": (lr_finder._LRCallback, "on_train_batch_end"),
        "restore": (_CheckpointConnector, "restore"),
        "load": (WholeState, "load_optimizers"),
        "restored": (_CheckpointConnector, "resume_end"),
    }
    owner, name = owners[place]
    inner, left = getattr(owner, name), 6 if place == "end_of_batch" else 1

    def dies(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= name != "resume_end" or self._loaded_checkpoint != {}
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, *args, **kwargs)

    setattr(owner, name, dies)


def search(degrees: Degrees, directory: str, victim: int, place: str, how: str) -> dict[str, Any]:
    """Search, then train with what was found."""
    from lightning_ntp.callbacks import FaultInjector

    end, callbacks = EndState(), []
    if victim == slot() and degrees is not None and place not in ("", "sync", "vote"):
        _kill(place)
    if place in ("sync", "vote"):
        callbacks = [FaultInjector([{"kind": "kill", "slot": victim, "step": 7, "phase": place}])]
    if how == "callback":
        finder: Any = LearningRateFinder(num_training_steps=TRIALS, **SEARCH)
        callbacks = [finder, *callbacks]
    trainer = make_trainer(
        degrees, callbacks=[*callbacks, end], default_root_dir=directory, max_steps=STEPS, max_epochs=-1
    )
    module = Momentum(lr=0.5)
    if how == "tuner":
        found = Tuner(trainer).lr_find(module, loader(degrees, 4 * TRIALS), num_training=TRIALS, **SEARCH)
        assert found is not None and trainer.global_step == 0
        # it has no suggestion in so few steps, unless it may look at all of them
        module.lr = found.suggestion(1, 1) or 0.0
    trainer.fit(module, loader(degrees, 4 * TRIALS))
    if how == "callback":
        found = finder.optimal_lr
    assert found is not None
    return {
        "results": found.results,
        "suggestion": found.suggestion(1, 1),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "parameters": end.parameters,
        "step": trainer.global_step,
        "left": sorted(os.listdir(directory)),
        "degrees": None if degrees is None else trainer.strategy.degrees,  # type: ignore[attr-defined]
    }


def _first(outcomes: list[Outcome], dead: set[int]) -> dict[str, Any]:
    wrong = [o for o in outcomes if o.state != ("died" if o.slot in dead else "returned")]
    assert not wrong, "\n".join(f"slot {o.slot}: {o.state}\n{o.error}\n{o.output[-3000:]}" for o in outcomes)
    value: dict[str, Any] = next(o.value for o in outcomes if o.slot not in dead)
    return value


def _compare(got: dict[str, Any], want: dict[str, Any], bound: float) -> None:
    assert want["suggestion"] is not None and want["step"] == STEPS
    for key in ("results", "suggestion", "lr", "step", "left"):
        assert_same(got[key], want[key], bound, key)
    assert_same(got["parameters"], want["parameters"], bound, "parameters")


_truths: dict[str, dict[str, Any]] = {}


def truth(world: Worlds, how: str, directory: Path) -> dict[str, Any]:
    """One process, with the global batches."""
    if how not in _truths:
        directory.mkdir()
        _truths[how] = _first(world(1, fresh=True).start(search, None, str(directory), -1, "", how).survive(60), set())
    return _truths[how]


@pytest.mark.parametrize(
    ("victim", "place", "how"),
    [
        (-1, "", "tuner"),
        (0, "sync", "tuner"),
        *(
            pytest.param(*case, marks=pytest.mark.chaos)
            for case in [
                (1, "load", "callback"),
                (-1, "", "callback"),
                (2, "vote", "tuner"),
                (0, "save", "callback"),
                (2, "end_of_batch", "tuner"),
                (0, "restore", "callback"),
                (2, "load", "tuner"),
                (0, "restored", "callback"),
                (1, "restored", "tuner"),
            ]
        ),
    ],
)
def test_the_suggestion_is_that_of_one_process(
    world: Worlds, victim: int, place: str, how: str, tmp_path: Path
) -> None:
    want = truth(world, how, tmp_path / "truth")
    (tmp_path / "here").mkdir()
    running = world(3, fresh=True).start(search, (2, 1), str(tmp_path / "here"), victim, place, how)
    got = _first(running.survive(60), {victim} - {-1})
    assert got["degrees"] == {-1: (2, 1), 2: (2, 0)}.get(victim, (1, 1))
    got["left"] = [name for name in got["left"] if name != "events.jsonl"]
    _compare(got, want, SAME if victim < 0 else EXACT)


class Scaled(Momentum):
    batch_size = 2

    def train_dataloader(self) -> Any:
        return loader((2, 1), 4 * TRIALS)


def scale(callback: bool) -> None:
    finder: list[Callback] = [BatchSizeFinder()] if callback else []
    trainer = make_trainer((2, 1), callbacks=finder)
    if callback:
        trainer.fit(Scaled())
    else:
        Tuner(trainer).scale_batch_size(Scaled())


@pytest.mark.parametrize("callback", [False, True])
def test_the_batch_size_scaler_is_refused_with_a_reason(world: Worlds, callback: bool) -> None:
    for outcome in world(3, fresh=True).start(scale, callback).survive(60):
        assert outcome.state == "raised" and "not supported with distributed strategies" in outcome.error


class Midway(LearningRateFinder):
    """Searches before the second epoch, as Lightning's documentation shows."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


class Logging(Momentum):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss


def search_midway(directory: str, victim: int) -> Any:
    """Search in the middle of a fit; the victim dies in the search."""
    finder = Midway(num_training_steps=TRIALS, update_attr=False, **SEARCH)
    logger = CSVLogger(directory, name="", version="rows")
    trainer = make_trainer((2, 1), callbacks=[finder], logger=logger, max_epochs=6, log_every_n_steps=1)
    strategy: Any = trainer.strategy
    syncs = itertools.count(1)

    def reach(phase: str) -> None:
        if phase == "sync" and next(syncs) == 9 and slot() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    strategy.fault_points.append(reach)
    trainer.fit(Logging(lr=0.01), loader((2, 1), 4 * 4))
    assert finder.optimal_lr is not None
    return finder.optimal_lr.results, trainer.global_step


@pytest.mark.chaos
def test_a_loss_in_a_search_in_the_middle_of_training_keeps_the_rows_of_before(world: Worlds, tmp_path: Path) -> None:
    found = {}
    for victim in (-1, 0):
        outcomes = world(3, fresh=True).start(search_midway, str(tmp_path / str(victim)), victim).survive(60)
        states = [(o.slot, o.state, o.error, o.output[-2000:]) for o in outcomes]
        assert [o.state for o in outcomes].count("returned") == 3 - (victim >= 0), states
        with open(tmp_path / str(victim) / "rows" / "metrics.csv", newline="") as file:
            found[victim] = (outcomes[1].value, [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)])
    assert len(found[-1][1]) == 6 * 4 and len(found[-1][0][0]["loss"]) == TRIALS
    assert_same(found[0], found[-1], EXACT)
