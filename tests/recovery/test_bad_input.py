"""What users do that cannot survive a loss: a clear error, and never a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.recovery.jobs import Job, Worlds, assert_returned, run, survives
from tests.recovery.models import Automatic
from tests.recovery.test_endings import errors_of


class OwnGroup(Automatic):
    """Makes a process group and keeps it."""

    def on_train_start(self) -> None:
        self.make()

    def make(self) -> None:
        self.group = dist.new_group(list(range(dist.get_world_size())))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        dist.all_reduce(torch.ones(1), group=self.group)
        return super().training_step(batch, batch_idx)


class RenewedGroup(OwnGroup):
    """Makes it again when the members change."""

    def on_topology_change(self, change: Any) -> None:
        self.make()


class Communicating(torch.optim.SGD):
    """An optimizer that averages something among ranks."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        dist.all_reduce(torch.ones(1))
        super().step()
        return loss


class Odd(torch.optim.SGD):
    """Its state is no shard of anything."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = torch.zeros(3)
        return loss


class WithCommunicating(Automatic):
    def configure_optimizers(self) -> Any:
        return Communicating(self.parameters(), lr=0.1)


class WithOdd(Automatic):
    def configure_optimizers(self) -> Any:
        return Odd(self.parameters(), lr=0.1)


class Iterating(Automatic):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        raise AssertionError("never called")


class UsesAnOldGraph(Automatic):
    """A term of step 1 is a part of the loss of step 4. It saves no tensors, so updates in between do not matter."""

    term: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output, step = super().training_step(batch, batch_idx), self.trainer.global_step
        if step == 1:
            self.term = self.net.mlp.up_proj.weight.sum()
        if step == 4:
            output["loss"] = output["loss"] + self.term
        return output


@pytest.mark.parametrize("phase", ["forward", pytest.param("update", marks=pytest.mark.chaos)])
def test_a_group_held_across_a_loss_is_an_error(world: Worlds, phase: str, tmp_path: Path) -> None:
    result = run(world, Job((2, 2), ((3, 2, phase),), module=f"{__name__}:OwnGroup"), tmp_path)
    for error in errors_of(result, {0, 1, 2}):
        assert (
            "StaleGroupError: the process group" in error and "make it again with torch.distributed.new_group" in error
        )


def test_a_group_that_is_made_again_works(world: Worlds, tmp_path: Path) -> None:
    survives(
        world, Job((2, 2), ((0, 2, "forward"), (3, 4, "vote")), module=f"{__name__}:RenewedGroup"), tmp_path, (1, 1)
    )


@pytest.mark.parametrize(
    ("degrees", "change"),
    [
        ((3,), {"drains": ((0, 2, 2),)}),
        pytest.param((3, 1), {"faults": ((2, 2, "backward"),)}, marks=pytest.mark.chaos),
    ],
)
def test_a_graph_that_is_used_across_a_change_is_an_error(
    world: Worlds, degrees: tuple[int, ...], change: dict[str, Any], tmp_path: Path
) -> None:
    """Its gradient would be one of units that the rank does not hold any more."""
    module = f"{__name__}:UsesAnOldGraph"
    result = run(world, Job(degrees, module=module, **change), tmp_path)
    told = "parameter 'net.mlp.up_proj.weight' through a graph from before the ranks of this job changed"
    for outcome in result.outcomes[:2]:  # another replica hears of it from them
        assert outcome.state == "raised" and told in outcome.error, outcome
    assert_returned(run(world, Job(degrees, module=module), tmp_path / "unchanged"), set())


def test_a_collective_between_vote_and_update_is_an_error(world: Worlds, tmp_path: Path) -> None:
    result = run(world, Job((2, 1), module=f"{__name__}:WithCommunicating"), tmp_path)
    for error in errors_of(result, {0, 1, 2}):
        assert "was called between the vote on a step and the end of its update" in error, error


@pytest.mark.parametrize("faults", [(), pytest.param(((2, 0, "between_vote_and_update"),), marks=pytest.mark.chaos)])
def test_a_state_that_is_no_shard_is_named_in_the_first_step(world: Worlds, faults: Any, tmp_path: Path) -> None:
    result = run(world, Job((2, 1), faults, module=f"{__name__}:WithOdd"), tmp_path)
    for error in errors_of(result, {0, 1, 2} - {f[0] for f in faults}):
        assert "Odd" in error and "history" in error, error


def test_steps_that_draw_their_own_batches_are_refused(world: Worlds, tmp_path: Path) -> None:
    result = run(world, Job((2, 1), module=f"{__name__}:Iterating"), tmp_path)
    for error in errors_of(result, {0, 1, 2}):
        assert "training_step takes a dataloader_iter" in error


def test_a_smallest_degree_above_a_starting_one_is_refused(world: Worlds, tmp_path: Path) -> None:
    result = run(world, Job((2, 1), strategy={"min_tensor_parallel_size": 2}), tmp_path)
    for error in errors_of(result, {0, 1, 2}):
        assert "min_tensor_parallel_size=2 is above the starting degree 1 of replica 1" in error


def test_nothing_of_this_disturbs_a_job_without_faults(world: Worlds, tmp_path: Path) -> None:
    assert_returned(run(world, Job((2, 1)), tmp_path), set())
