"""Losses after which the job does not go on: it ends at once, says why, and names the newest checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ntp.comm import Generation
from tests.lightning.rigs import assert_same, slot
from tests.recovery.jobs import EXACT, Job, Result, Worlds, run, undisturbed
from tests.recovery.models import Automatic


class Checkpointed(Automatic):
    """Writes a checkpoint after every step."""

    def extra_callbacks(self, directory: str) -> list[Any]:
        return [ModelCheckpoint(Path(directory, "kept"), every_n_train_steps=1, save_top_k=-1)]


def errors_of(result: Result, survivors: set[int]) -> list[str]:
    """The last line of what every survivor raised."""
    raised = {o.slot: o.error for o in result.outcomes if o.state == "raised"}
    states = [(o.slot, o.state, o.error[-2000:], o.stacks, o.output[-2000:]) for o in result.outcomes]
    assert raised.keys() == survivors, states
    return [error.strip().splitlines()[-1] for error in raised.values()]


def test_the_last_copy_is_lost(world: Worlds, tmp_path: Path) -> None:
    job = Job((2, 2), module=f"{__name__}:Checkpointed", gate=(3, "sync"), trainer={"enable_checkpointing": True})
    result = run(world, job, tmp_path, together=(1, 3))
    for error in errors_of(result, {0, 2}):
        assert "JobLost: slots 1, 3 lost" in error and "had their only copies on the lost slots" in error
        assert f"newest checkpoint: {tmp_path}/kept/" in error and "step=3" in error, error
    assert max(o.seconds for o in result.outcomes if o.state == "raised") < 60


class SlowToEnter(Automatic):
    """Slot 2 comes into a new generation a second after the others."""

    def on_train_start(self) -> None:
        if slot() == 2:
            connect = Generation.connect

            def slow(generation: Generation) -> None:
                connect(generation)
                time.sleep(1.0)

            Generation.connect = slow  # type: ignore[method-assign]


def test_a_rank_that_ends_for_want_of_a_copy_is_not_taken_for_done(world: Worlds, tmp_path: Path) -> None:
    """The others may still be on their way into the generation in which it has seen that."""
    result = run(world, Job((2, 2), module=f"{__name__}:SlowToEnter", gate=(3, "sync")), tmp_path, together=(1, 3))
    for error in errors_of(result, {0, 2}):
        assert "JobLost: slot" in error and "only copies" in error, error


@pytest.mark.parametrize("phase", ["update", pytest.param("backward", marks=pytest.mark.chaos)])
def test_too_many_failures_end_the_job_with_a_checkpoint(world: Worlds, phase: str, tmp_path: Path) -> None:
    job = Job((2, 2), ((3, 1, "vote"), (0, 3, phase)), strategy={"max_failures": 1})
    committed = 3 + (phase == "update")
    errors = errors_of(run(world, job, tmp_path / "disturbed"), {1, 2})
    path = tmp_path / "disturbed" / f"ntp-step-{committed}.ckpt"
    for error in errors:
        assert "2 failures in this job, and max_failures=1" in error and str(path) in error, error
    saved = torch.load(path, weights_only=True)
    want = undisturbed(world, Job((2, 2), trainer={"max_steps": committed}), tmp_path).first
    assert saved["global_step"] == committed
    assert_same({k: v for k, v in saved["state_dict"].items() if k in want["parameters"]}, want["parameters"], EXACT)
    assert_same(saved["optimizer_states"], want["optimizers"], EXACT)


@pytest.mark.chaos
def test_no_replica_is_left_above_the_smallest_degree(world: Worlds, tmp_path: Path) -> None:
    job = Job((2, 2), ((0, 1, "forward"), (2, 3, "forward")), strategy={"min_tensor_parallel_size": 2})
    result = run(world, job, tmp_path)
    assert {o.slot: (o.state, o.exit_code) for o in result.outcomes if o.slot < 3} == {
        0: ("died", -9),
        1: ("died", 0),  # healthy, but its replica is dropped
        2: ("died", -9),
    }
    (error,) = errors_of(result, {3})
    assert "only copies" in error or "no replica would be left" in error, error
