"""A user's script that trains a single replica until it is told that it is enough: ``draining_script.py DIRECTORY``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from tests.recovery.jobs import Samples
from tests.recovery.models import Automatic


class Until(Callback):
    """Ends a fit, on all ranks after the same step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.is_global_zero:
            (self._directory / "training").touch()
        enough = trainer.is_global_zero and (self._directory / "enough").exists()
        trainer.should_stop = trainer.strategy.broadcast(enough) or trainer.global_step >= 20_000


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=NTPStrategy(degrees=(3,)),
        precision="64-true",
        max_epochs=-1,
        min_steps=1,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Until(directory)],
    )
    trainer.fit(Automatic(), DataLoader(Samples(400), batch_size=2, shuffle=True))
    if trainer.is_global_zero:
        print(f"done: degrees {trainer.strategy.degrees}")
