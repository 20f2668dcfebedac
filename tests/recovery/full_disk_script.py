"""A user's script whose files cannot be written any more: ``python full_disk_script.py DIRECTORY WHAT``.

WHAT: "full": from the fourth step on no file can grow beyond 8 KiB. "gone": rank 0 dies in the fourth step, and the
directory of the checkpoints is a file then. "events": that of the events cannot be written from the start.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from lightning_ntp.launch import RankIdentity
from tests.recovery.jobs import Samples
from tests.recovery.models import Automatic

LIMIT = 8192


class Trouble(Callback):
    def __init__(self, directory: Path, what: str) -> None:
        self.directory, self.what = directory, what

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        slot = RankIdentity.from_environ().slot
        if trainer.global_step != 3:
            return
        if self.what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
        if self.what == "gone" and slot == 0:
            shutil.move(self.directory / "kept", self.directory / "moved")
            (self.directory / "kept").touch()
        if slot == 0 and self.what in ("gone", "events"):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    directory, what = Path(sys.argv[1]), sys.argv[2]
    if what == "events" and not (directory / "events.jsonl").exists():
        (directory / "events.jsonl").symlink_to("/dev/full")
    kept = ModelCheckpoint(directory / "kept", every_n_train_steps=1, save_top_k=1, save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=NTPStrategy(degrees=(2, 2)),
        precision="64-true",
        max_epochs=1,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Trouble(directory, what), kept],
    )
    trainer.fit(Automatic(), DataLoader(Samples(32), batch_size=2, shuffle=True))
    if trainer.is_global_zero:
        print(f"done: step {trainer.global_step}, degrees {trainer.strategy.degrees}", flush=True)
