"""A user's script in which ranks hang: ``python hanging_script.py DIRECTORY FAULTS``, the latter as JSON."""

from __future__ import annotations

import json
import sys

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from lightning_ntp.callbacks import FaultInjector
from tests.recovery.jobs import Samples
from tests.recovery.models import Automatic

if __name__ == "__main__":
    directory, faults = sys.argv[1:]
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=NTPStrategy(degrees=(2, 2), heartbeat=2),
        precision="64-true",
        max_epochs=1,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[FaultInjector(json.loads(faults))],
    )
    trainer.fit(Automatic(), DataLoader(Samples(40), batch_size=2, shuffle=True))
    if trainer.is_global_zero:
        print(f"done: step {trainer.global_step}, degrees {trainer.strategy.topology.degrees}")
