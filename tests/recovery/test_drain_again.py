"""A planned leave of which nothing comes, because training ends, does not stand in the way of the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from tests.lightning.rigs import slot
from tests.recovery.jobs import PER_REPLICA, Job, Samples, Worlds, assert_left, run
from tests.recovery.models import Automatic


class AsksAt(Callback):
    """Asks slot 1 to leave after some step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step and slot() == 0:
            trainer.strategy.drain(1, "maintenance")  # type: ignore[attr-defined]


def train_twice(job: Job, directory: str) -> Any:
    degrees = []
    for step in (job.batches - 1, 1):  # announced in the vote of the last step; in the middle
        torch.manual_seed(3)
        trainer = Trainer(
            accelerator="cpu",
            devices=sum(job.degrees),
            strategy=NTPStrategy(degrees=job.degrees, timeout=30, heartbeat=10),
            precision="64-true",
            max_epochs=1,
            default_root_dir=directory,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[AsksAt(step)],
        )
        trainer.fit(Automatic(), DataLoader(Samples(job.samples), batch_size=PER_REPLICA))
        degrees.append(trainer.strategy.degrees)  # type: ignore[attr-defined]
    return degrees


def test_a_leave_in_the_run_after_one_that_ended_too_soon(world: Worlds, tmp_path: Path) -> None:
    result = run(world, Job((3,)), tmp_path, ranks=train_twice)
    assert_left(result, set(), {1})
    assert all(degrees == [(3,), (2,)] for degrees in result.survivors.values())
    # groups that met those of the first leave in the store would have taken another generation
    assert not any("all members live, new groups" in outcome.output for outcome in result.outcomes)
