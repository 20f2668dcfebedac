"""A rank of the health benchmark: ``_health_ntp.py DIRECTORY STEPS SLOT:STEP watched|alone``.

Every step waits a fixed time in its forward, as if a device computed. Watched by :class:`HealthMonitor` over the tests'
mock of the driver, slot ``SLOT`` has the driver say XID 64 before step ``STEP``: it leaves. ``-1`` for no such thing.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
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
from lightning_ntp.callbacks import HealthMonitor
from lightning_ntp.comm import runtime
from lightning_ntp.engine import Change
from tests.nvml.mock import MockNvml

DEGREES = (2, 2)
COMPUTE_SECONDS = 0.2
HOOKS = ("on_train_batch_start", "on_train_batch_end")


class Model(LanguageModel):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(COMPUTE_SECONDS)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return adamw(self)


class TimedMonitor(HealthMonitor):
    """Adds up what its hooks take in a rank."""

    spent = 0.0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in HOOKS:
            setattr(self, name, self._timed(getattr(super(), name)))

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            begun = time.perf_counter()
            hook(*args, **kwargs)
            type(self).spent += time.perf_counter() - begun

        return timed


class Recorder(pl.Callback):
    """Notes when steps end, when a GPU sickens, and when the leave is announced and made."""

    def __init__(self, directory: Path, slot: int, step: int) -> None:
        self._directory, self._slot, self._step = directory, slot, step
        self._announced = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        current = runtime.current()
        assert current is not None
        self._marks = Marks(self._directory, current.slot)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        planned = trainer.strategy._survival.engine.planned  # type: ignore[attr-defined]
        if planned is not None and not self._announced:
            self._announced = True
            self._marks.write("announced", step=trainer.global_step)
        if trainer.global_step == self._step and trainer.strategy.slot == self._slot:  # type: ignore[attr-defined]
            MockNvml.attach().push_xid(self._slot, 64)
            self._marks.write("sickens", step=trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._marks.write("step", step=trainer.global_step, hooks=TimedMonitor.spent)

    def on_topology_change(self, change: Change) -> None:
        self._marks.write("change", step=change.step)


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    slot, _, step = sys.argv[3].partition(":")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl.seed_everything(1, verbose=False)
    mock = MockNvml.attach()
    gpus = [mock.get("uuid", gpu) for gpu in range(sum(DEGREES))]
    callbacks: list[pl.Callback] = [TimedMonitor(gpus=gpus)] if sys.argv[4] == "watched" else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=sum(DEGREES),
        strategy=NTPStrategy(degrees=DEGREES),
        max_steps=steps,
        callbacks=[*callbacks, Recorder(directory, int(slot), int(step))],
        default_root_dir=directory,
        logger=pl.loggers.CSVLogger(directory),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(**SIZES), DataLoader(Rows(), batch_size=SAMPLES // len(DEGREES)))


if __name__ == "__main__":
    main()
