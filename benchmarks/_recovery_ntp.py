"""A rank of the recovery benchmarks under lightning_ntp: ``_recovery_ntp.py DIRECTORY STEPS SLOT:STEP... [--copies]``.

It trains ``STEPS`` steps; each ``SLOT:STEP`` kills a slot in the middle of the backward of a step, counted from 0.
"""

from __future__ import annotations

import logging
import os
import sys
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

DEGREES = (4, 4)


class Model(LanguageModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return adamw(self)


class Recorder(pl.Callback):
    """Writes marks, and kills its own process where it is told to.

    Args:
        directory: For the marks.
        kills: (slot, step) pairs.
    """

    def __init__(self, directory: Path, kills: list[tuple[int, int]]) -> None:
        self._directory, self._kills = directory, kills
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        current = runtime.current()
        assert current is not None
        self._slot, self._runtime, self._life = current.slot, current, current.generation.life
        self._marks = Marks(self._directory, current.slot)
        self._marks.write("start")
        trainer.optimizers[0].register_step_post_hook(self._updated)
        parameters = list(pl_module.parameters())
        middle = parameters[len(parameters) // 2]
        middle.register_post_accumulate_grad_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_backward(self, parameter: Tensor) -> None:
        if (self._slot, self._step) in self._kills:
            self._marks.die(self._step)

    def _updated(self, *_: Any) -> None:
        self._marks.write("step", step=self._step)
        self._step += 1

    def on_topology_change(self, change: Change) -> None:
        ended, self._life = self._life, self._runtime.generation.life
        deaths = [d.at for d in self._runtime.membership.roster.departures if d.slot in change.lost]
        self._marks.write(
            "change",
            step=change.step,
            seconds=change.seconds,
            announced=max(deaths, default=0.0),
            interrupted=ended.interrupted_at,
            bytes=change.moved_bytes,
            degrees=(change.before.degrees, change.after.degrees),
        )


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    copies = "--copies" in sys.argv  # one replica, whose ranks keep copies of each other's shards
    degrees = DEGREES[:1] if copies else DEGREES
    pairs = [each.partition(":") for each in sys.argv[3:] if each != "--copies"]
    kills = [(int(slot), int(step)) for slot, _, step in pairs]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=sum(degrees),
        strategy=NTPStrategy(degrees=degrees, redundancy="neighbor" if copies else None),
        max_steps=steps,
        callbacks=[Recorder(directory, kills)],
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(**SIZES), DataLoader(Rows(), batch_size=SAMPLES // len(degrees)))


if __name__ == "__main__":
    main()
