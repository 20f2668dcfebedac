"""Jobs whose dead ranks are started again and come back, under the package's own supervisor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.lightning.rigs import EndState, slot
from tests.recovery.jobs import PER_REPLICA, Job, Ledger, Samples, _module

_PATIENCE_SECONDS = 60.0


class WaitsForNewcomers(Callback):
    """Before some steps all ranks wait until every process of the job is a member or stands by.

    Args:
        steps: Before which; the change comes in the step after.
    """

    def __init__(self, steps: tuple[int, ...]) -> None:
        self._steps = set(steps)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self._steps:
            wait_until_all_stand_by(trainer)


def wait_until_all_stand_by(trainer: Trainer) -> None:
    runtime = trainer.strategy._runtime
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not runtime.joining:
        roster = runtime.membership.roster
        if len({*roster.members, *roster.standby}) >= trainer.strategy.num_processes:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"members {roster.slots}, standing by {sorted(roster.standby)}")
        time.sleep(0.01)


def train_and_return(job: Job, waits: tuple[int, ...], directory: str) -> dict[str, Any]:
    """One rank's part."""
    from lightning_ntp import NTPStrategy
    from lightning_ntp.callbacks import FaultInjector

    torch.manual_seed(3)
    module = _module(job.module)(**job.settings)
    end, ledger = EndState(), Ledger(Path(directory))
    faults = [{"kind": "kill", "slot": s, "step": step, "phase": phase} for s, step, phase in job.faults]
    options: dict[str, Any] = {"plugins": module.plugins()} if module.plugins() else {"precision": "64-true"}
    trainer = Trainer(
        accelerator="cpu",
        devices=sum(job.degrees) + job.strategy.get("spares", 0),
        strategy=NTPStrategy(degrees=job.degrees, **{"timeout": 30, "heartbeat": 10, **job.strategy}),
        **{
            "max_epochs": job.epochs,
            "log_every_n_steps": 1,
            "logger": CSVLogger(directory, name="", version="rows", flush_logs_every_n_steps=1),
            "default_root_dir": directory,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
            **job.trainer,
        },
        callbacks=[*module.extra_callbacks(directory), end, ledger, WaitsForNewcomers(waits), FaultInjector(faults)],
    )
    trainer.fit(module, DataLoader(Samples(job.samples), batch_size=PER_REPLICA, shuffle=True))
    return {
        "losses": ledger.losses,
        "logged": ledger.logged,
        "steps": trainer.global_step,
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "degrees": trainer.strategy.topology.degrees,
        "changes": len(ledger.changes),
        "parameters": end.parameters,
        "optimizers": end.optimizers,
        "slot": slot(),
    }
