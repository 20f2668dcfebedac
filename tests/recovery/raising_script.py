"""A user's script with an exception in it: ``python raising_script.py DIRECTORY WHO``."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from lightning_ntp.launch import RankIdentity
from tests.recovery.jobs import Samples
from tests.recovery.models import Automatic


class Raises(Callback):
    """Raises in the third step: in one slot, in a replica, everywhere, in whoever is rank 0, or out of memory."""

    def __init__(self, who: str) -> None:
        self.who = who

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        slot, who = RankIdentity.from_environ().slot, self.who
        if trainer.global_step < 2:
            return
        if who == "memory":
            if slot == 2 and trainer.global_step == 2:
                raise ValueError("gone")
            if slot == 3 and trainer.global_step == 4:
                raise torch.OutOfMemoryError("tried to allocate 3 GiB")
            return
        if who == "told":
            if slot == 3 and trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.4)
            return
        victims = {
            "one": [2],
            "replica": [2, 3],
            "all": range(4),
            "zero": [trainer.strategy.generation.topology.slots[0]],
        }
        if slot in victims[who]:
            raise ValueError(f"a mistake of {who}")


if __name__ == "__main__":
    directory, who = sys.argv[1:]
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=NTPStrategy(degrees=(2, 2)),
        precision="64-true",
        max_epochs=1,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Raises(who)],
    )
    trainer.fit(Automatic(), DataLoader(Samples(32), batch_size=2, shuffle=True))
    if trainer.is_global_zero:
        print(f"done: step {trainer.global_step}, degrees {trainer.strategy.degrees}", flush=True)
