"""A step that is interrupted anywhere and replayed leaves no trace: bit for bit the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_ntp.engine.recovery import Outcome
from tests.lightning.faulty_rank import Fault, Faults, Learner, assert_same, train

PHASES = ["before_forward", "after_forward", "backward", "sync", "hook", "clip", "clipped", "vote"]
CLIPPED = {"gradient_clip_val": 0.5}

Run = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # steps of microseconds: threads only wait for each other
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The remains of a run without interruptions, kept for the tests that compare with it."""
    known: dict[str, dict[str, Any]] = {}

    def run(build: Callable[[Faults], LightningModule] = Learner, **kwargs: Any) -> dict[str, Any]:
        key = f"{build.__name__}{sorted(kwargs.items())}"
        if key not in known:
            known[key] = train(tmp_path_factory.mktemp("undisturbed"), build, **kwargs)[1]
        return known[key]

    return run


def every(phases: list[str], first: int = 0) -> list[Fault]:
    """One fault per phase, in steps of their own: a replay reaches the phases before it once more."""
    return [(phase, first + 2 * k) for k, phase in enumerate(phases)]


@pytest.mark.parametrize("phase", PHASES)
def test_interrupted_step_is_replayed_without_a_trace(phase: str, tmp_path: Path, undisturbed: Run) -> None:
    trainer, found = train(tmp_path, faults=[(phase, 0), (phase, 4)], **CLIPPED)
    assert_same(found, undisturbed(**CLIPPED))
    assert trainer.strategy.transaction.replays == 2
    assert trainer.strategy.survivors.calls == ["agree", "complete"] * 2


def test_several_interruptions_of_one_step_and_of_its_replays(tmp_path: Path, undisturbed: Run) -> None:
    faults = [("vote", 2), ("after_forward", 3), ("backward", 3), ("vote", 3), ("before_forward", 6), ("clip", 4)]
    _, found = train(tmp_path, faults=faults, **CLIPPED)
    assert_same(found, undisturbed(**CLIPPED))


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("phase", ["before_forward", "after_forward", "backward", "vote"])
def test_all_micro_batches_of_a_window_are_replayed(
    accumulate: int, phase: str, tmp_path: Path, undisturbed: Run
) -> None:
    settings = {"accumulate_grad_batches": accumulate, **CLIPPED}
    # 5 batches an epoch: windows of 2, 2, 1 or of 3, 2; each number hits another micro-batch of a window
    numbers = [0, 3, 8] if phase != "vote" else [0, 2, 4]
    trainer, found = train(tmp_path, faults=[(phase, n) for n in numbers], **settings)
    assert_same(found, undisturbed(**settings))
    assert trainer.strategy.transaction.replays == 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_and_its_scaler(precision: str, tmp_path: Path, undisturbed: Run) -> None:
    settings = {"precision": precision, "accumulate_grad_batches": 2, **CLIPPED}
    faults = [("backward", 0), ("vote", 0), ("clip", 1), ("hook", 5), ("after_forward", 9)]
    _, found = train(tmp_path, faults=faults, **settings)
    assert_same(found, undisturbed(**settings))


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profilers_survive(profiler: str, tmp_path: Path, undisturbed: Run) -> None:
    _, found = train(tmp_path, faults=[("backward", 1), ("vote", 2)], profiler=profiler, **CLIPPED)
    assert_same(found, undisturbed(**CLIPPED))


class Overridden(Learner):
    """Takes the step into its own hands."""

    calls = 0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.faults.at("override")
        optimizer_closure()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        self.faults.at("changed")
        if batch_idx % 2 == 0:
            optimizer.step()


def test_optimizer_step_that_calls_the_closure_itself(tmp_path: Path, undisturbed: Run) -> None:
    faults = [("override", 1), ("changed", 2), ("backward", 5), ("hook", 1), ("vote", 2), ("vote", 3)]
    _, found = train(tmp_path, Overridden, faults=faults)
    assert_same(found, undisturbed(Overridden))


class Swallowing(Learner):
    """Catches what is not meant for it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            return super().training_step(batch, batch_idx)
        except RuntimeError:
            return sum(p.sum() for p in self.parameters())  # type: ignore[return-value]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        try:
            optimizer.step(closure=optimizer_closure)
        except RuntimeError as error:
            raise AssertionError("the transaction let an interruption through") from error


def test_interruptions_that_the_users_own_except_swallows(tmp_path: Path, undisturbed: Run) -> None:
    faults = [("after_forward", 0), ("before_forward", 4), ("vote", 3), ("backward", 7)]
    _, found = train(tmp_path, Swallowing, faults=faults, sticky=True, **CLIPPED)
    assert_same(found, undisturbed(Swallowing, **CLIPPED))


def test_step_that_a_survivor_has_committed_is_finished_forward(tmp_path: Path, undisturbed: Run) -> None:
    trainer, found = train(tmp_path, faults=[("vote", 0), ("vote", 4)], outcome=Outcome.FORWARD, **CLIPPED)
    assert_same(found, undisturbed(**CLIPPED))
    assert trainer.strategy.transaction.replays == 0
    assert trainer.strategy.survivors.calls == ["agree", "complete"] * 2


@pytest.mark.parametrize("outcome", list(Outcome))
def test_groups_are_rebuilt_without_graph_and_with_the_committed_values(outcome: Outcome, tmp_path: Path) -> None:
    values: list[tuple[int, Tensor, bool, bool]] = []

    def prepare(trainer: Any) -> None:
        def look() -> None:
            module = trainer.lightning_module
            alive = any(ref() is not None for ref in module.activations)
            clean = all(p.grad is None for p in module.parameters()) or outcome is Outcome.FORWARD
            weight = module.net.layers[0].weight
            values.append((trainer.strategy.survivors.committed, weight.detach().clone(), alive, clean))

        trainer.strategy.survivors.on_complete = look

    weights: list[Tensor] = []

    class Recording(Learner):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            weights.append(self.net.layers[0].weight.detach().clone())  # type: ignore[operator,union-attr]

    train(tmp_path, Recording, faults=[("vote", 2), ("vote", 7)], outcome=outcome, prepare=prepare)
    assert len(values) == 2
    for committed, weight, alive, clean in values:
        assert torch.equal(weight, weights[committed])
        assert not alive and clean


class Late(Learner):
    """Its optimizer communicates inside the update."""

    def configure_optimizers(self) -> Any:
        strategy = self.trainer.strategy

        class Communicating(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = super().step(closure)
                strategy.reduce_boolean_decision(True)
                return loss

        return Communicating(self.parameters(), lr=0.1)


def test_collective_between_vote_and_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="reduce_boolean_decision was called between the vote"):
        train(tmp_path, Late)


class Twice(Learner):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


def test_optimizer_that_calls_its_closure_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="LBFGS.* called its closure again"):
        train(tmp_path, Twice)


def test_other_errors_pass_through(tmp_path: Path) -> None:
    class Failing(Learner):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        train(tmp_path, Failing)


def test_large_buffer_that_never_changed_costs_no_copy(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, faults=[("vote", 3)], prepare=lambda trainer: None)
    recorder = trainer.strategy.transaction._recorder._buffers
    assert [(slot.label, copy.value) for slot, copy in recorder._large.items()] == [("net.table", None)]


def test_first_change_of_a_large_buffer_cannot_be_undone_and_says_so(tmp_path: Path) -> None:
    class Changing(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == 3:
                self.net.table += 1
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match=r"'net.table' \(80000 bytes\) changed for the first time"):
        train(tmp_path, Changing, faults=[("vote", 3)])
