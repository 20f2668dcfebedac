"""Manual optimization: the whole training step is the transaction, parameters and optimizer state included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ntp.engine.recovery import Outcome
from tests.lightning.faulty_rank import FEATURES, Faults, Learner, assert_same, train


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TwoOptimizers(Learner):
    """A GAN's way: toggled optimizers, schedulers stepped by hand."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.automatic_optimization = False
        self.other = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.own_steps += 1
        x, y = batch
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        loss = self.loss_of(x, y)
        first.zero_grad()
        self.manual_backward(loss)
        self.faults.at("first")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        other = (self.other(x) - self.net(x).unsqueeze(-1).detach()).square().mean()
        second.zero_grad()
        self.manual_backward(other)
        self.faults.at("second")
        second.step()
        self.untoggle_optimizer(second)
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()
        self.log("other", other)
        self.faults.at("end")
        return {"loss": loss, "other": other}

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        second = torch.optim.SGD(self.other.parameters(), lr=0.05, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (first, second)]


class Accumulating(Learner):
    """Clears gradients after the update, every third batch; counts on what the batches before have left."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss_of(*batch) / 3)
        self.faults.at("first")
        if batch_idx % 3 == 2:
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
        self.faults.at("end")


MANUAL = ["before_forward", "backward", "sync", "first", "hook", "second", "end", "vote"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[Any, Any] = {}

    def run(build: Any, **kwargs: Any) -> Any:
        key = f"{build.__name__}{sorted(kwargs.items())}"
        if key not in known:
            known[key] = train(tmp_path_factory.mktemp("undisturbed"), build, **kwargs)[1]
        return known[key]

    return run


@pytest.mark.parametrize("phase", MANUAL)
def test_whole_training_step_is_replayed(phase: str, tmp_path: Path, undisturbed: Any) -> None:
    # the odd hits of a phase that comes twice a step are behind the first optimizer's update
    faults = [(phase, 0), (phase, 3), (phase, 6)]
    trainer, found = train(tmp_path, TwoOptimizers, faults=faults)
    assert_same(found, undisturbed(TwoOptimizers))
    assert trainer.strategy.transaction.replays == 3


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the scaler skips the first update
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision: str, tmp_path: Path, undisturbed: Any) -> None:
    faults = [("end", 0), ("second", 3), ("hook", 9), ("vote", 4)]
    _, found = train(tmp_path, TwoOptimizers, faults=faults, precision=precision)
    assert_same(found, undisturbed(TwoOptimizers, precision=precision))


def test_gradients_accumulated_over_training_steps_are_kept(tmp_path: Path, undisturbed: Any) -> None:
    faults = [("before_forward", 1), ("backward", 1), ("first", 2), ("end", 2), ("vote", 4), ("end", 7)]
    _, found = train(tmp_path, Accumulating, faults=faults)
    assert_same(found, undisturbed(Accumulating))


def test_committed_training_step_is_not_replayed(tmp_path: Path, undisturbed: Any) -> None:
    trainer, found = train(tmp_path, TwoOptimizers, faults=[("vote", 2)], outcome=Outcome.FORWARD)
    assert_same(found, undisturbed(TwoOptimizers))
    assert trainer.strategy.transaction.replays == 0
    assert trainer.strategy.survivors.calls == ["agree", "complete"]


class Swallowing(TwoOptimizers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except RuntimeError:
            return None


def test_interruption_that_the_users_own_except_swallows(tmp_path: Path, undisturbed: Any) -> None:
    faults = [("hook", 3), ("sync", 8), ("end", 5)]
    _, found = train(tmp_path, Swallowing, faults=faults, sticky=True)
    assert_same(found, undisturbed(Swallowing))


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profilers_survive(profiler: str, tmp_path: Path, undisturbed: Any) -> None:
    _, found = train(tmp_path, TwoOptimizers, faults=[("hook", 1), ("second", 3)], profiler=profiler)
    assert_same(found, undisturbed(TwoOptimizers))
