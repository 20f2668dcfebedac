"""A user's script with slow steps: ``python slow_script.py DIRECTORY STEPS SECONDS VICTIM``.

Every rank leaves a file ``rank-PID`` when its first step is done. SECONDS is how long a store may give no answer.
VICTIM is a slot that kills itself once there is a file ``die``; -1 for none.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from lightning_ntp.comm import store
from lightning_ntp.launch import RankIdentity
from tests.recovery.jobs import Samples
from tests.recovery.models import Automatic


class Slow(Callback):
    def __init__(self, directory: Path, victim: int) -> None:
        self.directory, self.victim = directory, victim

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (self.directory / f"rank-{os.getpid()}").touch()
        if (self.directory / "die").exists() and RankIdentity.from_environ().slot == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)


if __name__ == "__main__":
    directory, steps, seconds, victim = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    store._CALL_SECONDS = seconds
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=NTPStrategy(degrees=(2, 1), heartbeat=2),
        precision="64-true",
        max_steps=steps,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Slow(directory, victim)],
    )
    trainer.fit(Automatic(), DataLoader(Samples(4 * steps), batch_size=2, shuffle=True))
    if trainer.is_global_zero:
        print(f"done: step {trainer.global_step}, degrees {trainer.strategy.degrees}", flush=True)
