"""Ranks that compute as slowly as simulated GPUs would: the modelled time hides what is really computed.

The GPUs are those of the tests' stand-in for NVIDIA's driver (``tests/nvml``), with a model of power, clocks and heat.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

sys.path.append(str(Path(__file__).resolve().parents[2]))

from lightning_ntp.lightning.planned_times import planned_times
from tests.nvml.mock import MockNvml


def uuids(gpus: int) -> list[str]:
    """Of the simulated GPUs, by slot."""
    return [f"GPU-00000000-0000-0000-0000-{number:012d}" for number in range(gpus)]


def own_slot() -> int:
    """This rank's slot, which is the number of its GPU; 0 in the launching process."""
    return int(os.environ.get("LIGHTNING_NTP_SLOT", "0"))


class SimulatedGpu(pl.Callback):
    """Loads this rank's GPU while it trains, and lets every training step take as long as that GPU takes for it.

    That is the samples of the batch, times the largest share of the model at its replica's degree, divided by the
    GPU's speed: its clock over its highest. The time stands in the forward.

    Args:
        sample_s: Seconds per sample at full degree and highest clock.
        load: Of a GPU at work, 0 to 1.
    """

    ntp_own_attributes = ("_mock",)

    def __init__(self, sample_s: float, load: float = 1.0) -> None:
        self._sample_s, self._load = sample_s, load
        self._mock: MockNvml | None = None

    @property
    def mock(self) -> MockNvml:
        """The GPUs of all ranks."""
        if self._mock is None:
            self._mock = MockNvml.attach()
        return self._mock

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        compute = pl_module.training_step

        @functools.wraps(compute)
        def training_step(batch: Any, batch_idx: int) -> Any:
            ends = time.monotonic() + self.seconds(trainer, len(batch[0]))
            output = compute(batch, batch_idx)
            time.sleep(max(0.0, ends - time.monotonic()))
            return output

        pl_module.training_step = training_step  # type: ignore[method-assign]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mock.set(own_slot(), load=self._load)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mock.set(own_slot(), load=0.0)

    def seconds(self, trainer: pl.Trainer, samples: int) -> float:
        """How long this rank's GPU computes."""
        strategy: Any = trainer.strategy
        planned = planned_times(strategy.sharded, strategy.topology)[strategy.replica]
        return self._sample_s * samples * planned / self.mock.speed(own_slot())
