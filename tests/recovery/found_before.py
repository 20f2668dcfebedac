"""Scripts that do something before they train: resume from a checkpoint, look for a learning rate, or draw data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from tests.lightning.rigs import EndState, slot
from tests.recovery.fates import WaitsForNewcomers
from tests.recovery.jobs import Samples
from tests.recovery.models import CONTEXT, HIDDEN, Automatic


class Tuned(Automatic):
    lr = 0.02

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(
    directory: str,
    faults: Sequence[tuple[int, int, str]],
    waits: Sequence[int],
    before: Literal["resume", "tune", "draw"],
) -> dict[str, Any]:
    """One rank's part, at degrees (2, 2)."""
    from lightning_ntp import NTPStrategy
    from lightning_ntp.callbacks import FaultInjector

    torch.manual_seed(3)
    end, module, checkpoint = EndState(), Tuned(), Path(directory) / "first.ckpt"
    data = DataLoader(Samples(16), batch_size=2, shuffle=True)

    def trainer(epochs: int, **more: Any) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=4,
            strategy=NTPStrategy(degrees=(2, 2), timeout=30, heartbeat=10),
            precision="64-true",
            max_epochs=epochs,
            logger=False,
            default_root_dir=directory,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **more,
        )

    if before in ("resume", "draw"):
        first = trainer(1)
        first.fit(Tuned(), data)
        first.save_checkpoint(checkpoint)
    if before == "draw":
        drawn = torch.randn(16, CONTEXT, HIDDEN, dtype=torch.float64)
        data = DataLoader([(x, x.mean(0)[:2], n) for n, x in enumerate(drawn)], batch_size=2, shuffle=True)
    kills = [{"kind": "kill", "slot": s, "step": step, "phase": phase} for s, step, phase in faults]
    training = trainer(3, callbacks=[end, FaultInjector(kills), WaitsForNewcomers(waits)])
    if before == "tune":
        found = Tuner(training).lr_find(module, data, num_training=20)
        assert found is not None
        module.lr = found.suggestion() or 0.01
    more: dict[str, Any] = {"ckpt_path": checkpoint, "weights_only": False} if before == "resume" else {}
    training.fit(module, data, **more)
    return {
        "parameters": end.parameters,
        "degrees": training.strategy.topology.degrees,
        "lr": module.lr,
        "slot": slot(),
    }
