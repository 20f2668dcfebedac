"""Steps that are done again find what they found: whatever code between steps has changed since is put back for them,
or it is noticed and said that there is no way back.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lightning.rigs import slot
from tests.recovery.jobs import EXACT, Job, Worlds, run, survives
from tests.recovery.models import Automatic, Averages
from tests.recovery.test_neighbour_copies import COPIES, gone_back, job

HERE = "tests.recovery.test_steps_done_again:"
TOLD = "redundancy='neighbor' cannot go back across that"


class Anneals(Automatic):
    """Weighs its loss by the number of batches so far, as the loops tell it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, batch_idx) * (1 + 0.3 * self.trainer.fit_loop.total_batch_idx)
        self.note(loss, batch)
        return {"loss": loss}


class Gathers(Automatic):
    """Gathers gradients over two training steps, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        self.note(loss, batch)
        return {"loss": loss.detach()}


class FreezesStatistics(Automatic):
    """Batch statistics are frozen after an epoch."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.net.batch_norm.eval()


class Unfreezes(Automatic):
    """Unfreezes its head inside of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 5:
            self.net.head.requires_grad_(True)
        return super().training_step(batch, batch_idx)


class Pops(Automatic):
    """Takes its targets out of its batch, as labels often are."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if isinstance(batch, dict) else {"x": batch[0], "more": {"y": batch[1]}, "ids": batch[2]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert "made" in batch and "y" not in batch["more"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        taken = batch["x"], batch["more"].pop("y"), batch["ids"]
        batch["made"] = True
        loss = self.loss(taken, batch_idx)
        self.note(loss, taken)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss}


class Queue(Automatic):
    """Has a buffer too large to be copied while it does not change, which steps read; they change it from the third."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(20_000, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(self.queue, Tensor)
        loss = self.loss(batch, batch_idx) * (1 + self.queue.mean())
        if self.global_step >= 2:
            self.queue.add_(0.5)
        self.note(loss, batch)
        return {"loss": loss}


class AveragesLater(Averages):
    """Its moving average begins after some steps."""

    def on_fit_start(self) -> None:
        self._averages = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3:
            super().on_fit_start()


class Clips(Automatic):
    """Clips its weights as no version tells, and may die before the next step.

    Args:
        every: So many steps.
        dies: Whether slot 1 dies after the first epoch.
    """

    def __init__(self, every: int, dies: bool = False) -> None:
        super().__init__()
        self._every, self._dies = every, dies

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step % self._every == 0:
            for parameter in self.parameters():
                parameter.data.clamp_(-0.3, 0.3)

    def on_train_epoch_end(self) -> None:
        if self._dies and slot() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.trainer.strategy.barrier()


@pytest.mark.parametrize(
    ("module", "step", "more"),
    [
        ("Anneals", 5, {"trainer": {"accumulate_grad_batches": 3}, "batches": 7}),
        ("Gathers", 5, {}),
        pytest.param("FreezesStatistics", 7, {}, marks=pytest.mark.chaos),
        pytest.param("Unfreezes", 7, {}, marks=pytest.mark.chaos),
        pytest.param("Pops", 7, {}, marks=pytest.mark.chaos),
        pytest.param("Pops", 7, {"settings": {"manual": True}}, marks=pytest.mark.chaos),
    ],
)
def test_what_changes_meanwhile_is_put_back(
    world: Worlds, module: str, step: int, more: dict[str, Any], tmp_path: Path
) -> None:
    result = survives(world, job((3,), (1, step, "backward"), module=HERE + module, epochs=3, **more), tmp_path, (2,))
    assert gone_back(result)[0] > 3 or more
    assert TOLD not in result.outcomes[0].output


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        pytest.param("Queue", {}, marks=pytest.mark.chaos),
        pytest.param("AveragesLater", {}, marks=pytest.mark.chaos),
        ("Clips", {"every": 5}),
    ],
)
def test_what_cannot_be_put_back_is_told(world: Worlds, module: str, settings: dict[str, Any], tmp_path: Path) -> None:
    faulty = job((3,), (1, 7, "backward"), module=HERE + module, settings=settings, epochs=3)
    result = survives(world, faulty, tmp_path, (2,))
    assert 0 < gone_back(result)[0] < 5
    assert TOLD in result.outcomes[0].output


@pytest.mark.chaos
def test_a_loss_after_a_change_before_the_next_step_has_no_way_back(world: Worlds, tmp_path: Path) -> None:
    result = run(world, job((3,), module=HERE + "Clips", settings={"every": 4, "dies": True}), tmp_path)
    ends = [o.error for o in result.outcomes if o.state == "raised"]
    assert any("parameters were changed outside of the optimizers, between two steps" in end for end in ends), ends
    assert {o.state for o in result.outcomes} == {"raised", "died"}


@pytest.mark.chaos
def test_who_loses_the_way_in_every_step_does_not_pay_for_a_copy_in_every_step(world: Worlds, tmp_path: Path) -> None:
    clipping = job((2,), module=HERE + "Clips", settings={"every": 1}, batches=12)
    result = run(world, clipping, tmp_path)
    output = result.outcomes[0].output
    assert output.count(TOLD) == 3 and output.count("This is not said again") == 1


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.chaos), 3])
def test_gathered_gradients_move_with_the_shards(world: Worlds, step: int, tmp_path: Path) -> None:
    """In an ordinary recovery, and in a planned leave."""
    survives(world, Job((2, 2), ((1, step, "backward"),), module=HERE + "Gathers", epochs=3), tmp_path / "1", (1, 2))
    leave = Job((2, 2), module=HERE + "Gathers", drains=((0, 3, step),), epochs=3)
    survives(world, leave, tmp_path / "2", (2, 1), released=[3])


@pytest.mark.chaos
def test_manual_optimization_begins_with_the_first_copy(world: Worlds, tmp_path: Path) -> None:
    result = survives(
        world, Job((3,), ((1, 0, "forward"),), module="Manual", strategy=COPIES), tmp_path, (2,), bound=EXACT
    )
    assert TOLD not in result.outcomes[0].output
