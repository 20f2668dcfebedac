"""A rank of the drain benchmark: ``_drain_ntp.py DIRECTORY STEPS SLOT:STEP planned|blocking|comes back``.

Every step waits a fixed time in its forward, as if a device computed, so that a core is left for what goes on beside.
A slot that comes back is killed after the step, started again, and joins when it is ready.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
from _recovery_marks import Marks
from _recovery_model import SAMPLES, SIZES, Rows, adamw
from torch import Tensor
from torch.utils.data import DataLoader

from examples.gpt.model import LanguageModel
from lightning_ntp import NTPStrategy
from lightning_ntp.comm import runtime
from lightning_ntp.engine import Change
from lightning_ntp.engine.planned import PlannedChange
from lightning_ntp.launch import RankIdentity, is_rank

DEGREES = (2, 2)
COMPUTE_SECONDS = 0.4
BACK_AFTER_SECONDS = 4.0
"""The loss is some steps past then: a rank is ready for the next step but one."""


class Model(LanguageModel):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(COMPUTE_SECONDS)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return adamw(self)


class Recorder(pl.Callback):
    """Notes when every step ends, and asks for the leave.

    Args:
        directory: For the marks.
        slot, step: Who is to leave, after how many steps.
        dies: Whether it dies instead, the first time.
    """

    ntp_own_attributes = ("_marks", "_dies")

    def __init__(self, directory: Path, slot: int, step: int, dies: bool) -> None:
        self._directory, self._leaver, self._step = directory, slot, step
        self._comes_back = dies
        self._dies = dies and not RankIdentity.from_environ().joins if is_rank() else dies

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        current = runtime.current()
        assert current is not None
        self._marks = Marks(self._directory, current.slot)
        self._marks.write("start")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._marks.write("step", step=trainer.global_step)
        if self._dies and trainer.global_step == self._step and trainer.strategy.slot == self._leaver:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._comes_back and trainer.global_step == self._step and trainer.is_global_zero:
            trainer.strategy.drain(self._leaver, "benchmark")  # type: ignore[attr-defined]

    def on_topology_change(self, change: Change) -> None:
        joined = len(change.after.slots) > len(change.before.slots)
        self._marks.write("change", step=change.step, seconds=change.seconds, bytes=change.moved_bytes, joined=joined)


def block() -> None:
    """Let a leave be prepared and moved at once, while the training waits for it."""
    begin = PlannedChange.__init__

    def and_wait(self: PlannedChange, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._preparation.wait()

    PlannedChange.__init__ = and_wait  # type: ignore[method-assign]


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    slot, _, step = sys.argv[3].partition(":")
    if sys.argv[4] == "blocking":
        block()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=sum(DEGREES),
        strategy=NTPStrategy(degrees=DEGREES, max_restarts=1, restart_backoff=BACK_AFTER_SECONDS),
        max_steps=steps,
        callbacks=[Recorder(directory, int(slot), int(step), dies=sys.argv[4] == "comes back")],
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(**SIZES), DataLoader(Rows(), batch_size=SAMPLES // len(DEGREES)))


if __name__ == "__main__":
    main()
