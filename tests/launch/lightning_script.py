"""A minimal LightningModule and the script around it; run by test_lightning_launcher.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint

from tests.launch.gloo_strategy import GlooStrategy


class Module(pl.LightningModule):
    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.fail = fail

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.fail and batch_idx == 1:
            raise ValueError("no second step")
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch).sum(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 2), 2)

    test_dataloader = train_dataloader


class Note(Callback):
    """Leaves a file for each process whose callbacks see an exception."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        name = os.environ.get("LOCAL_RANK", "supervisor")
        Path(self.directory, f"exception-{name}").write_text(repr(exception))


def trainer(directory: Path | str, start_method: str, *callbacks: Callback) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=GlooStrategy(start_method),
        max_epochs=1,
        log_every_n_steps=1,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Note(str(directory)), *callbacks],
    )


if __name__ == "__main__":
    module = Module(fail=sys.argv[2] == "fail")
    job = trainer(sys.argv[1], "popen", OnExceptionCheckpoint(sys.argv[1], filename="on_exception"))
    job.fit(module)
    results = job.test(module, verbose=False)
    Path(sys.argv[1], f"done-{os.environ.get('LOCAL_RANK', 'supervisor')}").write_text(repr(results))
