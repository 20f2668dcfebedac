"""The model is called in a hook between steps: done again after a loss, or an error that says what to do."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning.rigs import assert_same, slot
from tests.recovery.jobs import EXACT, PER_REPLICA, Job, Samples, Worlds, assert_returned, numbers, run, undisturbed
from tests.recovery.models import CONTEXT, HIDDEN, Automatic
from tests.recovery.test_endings import errors_of

LENGTH = 3


class Sampling(Automatic):
    """Draws from the model after every second step.

    Args:
        dies: (slot, forward): the process kills itself in the so many-th forward between steps, from 1.
        repeats: Whether it asks the strategy to repeat them.
    """

    def __init__(self, dies: tuple[tuple[int, int], ...] = (), repeats: bool = True) -> None:
        super().__init__()
        self.repeats, self.drawing, self.forwards = repeats, False, 0
        self.drawn: list[float] = []
        self.deaths = [forward for victim, forward in dies if victim == slot()]
        self.net.mlp.register_forward_pre_hook(lambda *_: self.die())

    def die(self) -> None:
        if self.drawing:
            self.forwards += 1
            if self.forwards in self.deaths:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step % 2 == 0:
            strategy: Any = self.trainer.strategy
            drawn = strategy.repeat(self.draw) if self.repeats else self.draw()
            self.log("drawn", drawn)
            self.log("draws", float(len(self.drawn)))

    @torch.no_grad()
    def draw(self) -> torch.Tensor:
        before = self.training
        self.eval()
        self.drawing = True
        x = torch.randn(2, CONTEXT, HIDDEN, dtype=torch.float64)
        for _ in range(LENGTH):
            chosen = torch.multinomial(self.net(x).softmax(-1), 1)
            x = x + 0.1 * chosen.unsqueeze(-1)
        self.drawn.append(float(x.sum()))
        self.drawing = False
        self.train(before)
        # a collective inside is part of it
        return self.trainer.strategy.reduce(x.sum(), reduce_op="mean")  # type: ignore[return-value]


class AfterValidation(Sampling):
    """Draws at the end of every validation, and in its batches, which are repeated as a whole anyway."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(8), batch_size=PER_REPLICA)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        self.log("val", self.loss(batch, batch_idx) + 0 * strategy.repeat(self.draw), batch_size=len(batch[2]))

    def on_validation_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.log("drawn", strategy.repeat(self.draw))
        self.log("draws", float(len(self.drawn)))


JOB = Job((2, 2), module=f"{__name__}:Sampling")


@pytest.mark.parametrize(
    ("dies", "gathered"),
    [
        (((3, 2),), 1),
        # between two micro-batches of a step, which run again too
        (((3, 2),), 3),
        pytest.param(((0, LENGTH + 1),), 1, marks=pytest.mark.chaos),
        pytest.param(((1, 1), (2, 2 * LENGTH)), 1, marks=pytest.mark.chaos),
        pytest.param(((0, LENGTH + 1),), 3, marks=pytest.mark.chaos),
        pytest.param(((1, 1), (2, 2 * LENGTH)), 3, marks=pytest.mark.chaos),
        pytest.param(((1, 1), (2, LENGTH + 1)), 4, marks=pytest.mark.chaos),
    ],
    ids=str,
)
def test_what_is_given_to_the_strategy_draws_the_same_again(
    world: Worlds, dies: Any, gathered: int, tmp_path: Path
) -> None:
    job = replace(JOB, trainer={"accumulate_grad_batches": gathered}, batches=7) if gathered > 1 else JOB
    want = undisturbed(world, job, tmp_path)
    got = run(world, replace(job, settings={"dies": dies}), tmp_path / "disturbed")
    assert_returned(got, {victim for victim, _ in dies})
    for number, found in got.survivors.items():
        assert_same(found["logged"], want.survivors[number]["logged"], EXACT, f"logged in slot {number}")
    assert_same(got.first["parameters"], want.first["parameters"], EXACT, "parameters")
    assert_same(numbers(got.rows()), numbers(want.rows()), 1e-6, "rows")
    assert got.first["changes"] == len(dies)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("degrees", "death"),
    # a loop: two batches of three forwards each, then three more; the first is the sanity check
    [((2, 2), (3, 8)), ((2, 2), (0, 5)), ((2, 2), (1, 9 + 7)), ((1, 2), (0, 9 + 8)), ((1, 2), (0, 9 + 2))],
    ids=str,
)
def test_it_may_be_in_evaluation_too(world: Worlds, degrees: Any, death: Any, tmp_path: Path) -> None:
    job = Job(degrees, module=f"{__name__}:AfterValidation", trainer={"num_sanity_val_steps": 2})
    want = undisturbed(world, job, tmp_path)
    got = run(world, replace(job, settings={"dies": (death,)}), tmp_path / "disturbed")
    assert_returned(got, {death[0]})
    assert got.first["changes"] == 1
    for number, found in got.survivors.items():
        assert [e.get("draws") for e in found["logged"]] == [e.get("draws") for e in want.survivors[number]["logged"]]
        if 0 not in got.first["degrees"]:
            assert_same(found["logged"], want.survivors[number]["logged"], EXACT, f"logged in slot {number}")
    assert_same(got.first["parameters"], want.first["parameters"], EXACT, "parameters")


def test_what_is_not_is_an_error_that_says_where_and_what_to_do(world: Worlds, tmp_path: Path) -> None:
    result = run(world, replace(JOB, settings={"dies": ((3, 2),), "repeats": False}), tmp_path)
    (error,) = {e for e in errors_of(result, {0, 1, 2}) if "NotRepeated" in e}
    assert "NotRepeated: slot 3 died (SIGKILL) while Sampling.on_train_batch_end (test_between_steps.py:" in error, (
        error
    )
    assert "`result = self.trainer.strategy.repeat(lambda: self(batch))`, see docs/recovery.md" in error
