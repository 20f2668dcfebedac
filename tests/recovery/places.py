"""Places outside of training steps at which a process can die, stop, hang, raise, or be told to go."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from tests.lightning.rigs import slot

PLACES = (
    "setup",
    "start",
    "sanity",
    "validation",
    "validation_first",
    "validation_middle",
    "validation_last",
    "validation_forward",
    "validation_end",
    "validation_epoch_end",
    "metric_sync",
    "epoch_end",
    "gather",
    "write",
    "fit_end",
    "test",
    "test_forward",
    "predict",
    "predict_forward",
    "teardown",
)
"""The setup hook; fit starts; a batch of the sanity check; a batch of validation: before its forward (any batch, or the
first, the middle or the last of its loop), in it, after it; the end of validation; while a metric is synchronised; the
end of an epoch; while a checkpoint is gathered, and while it is written; fit ends; a batch of test and of predict,
before and in its forward; the teardown hook."""

KINDS = ("kill", "stop", "hang", "raise", "term")
"""SIGKILL; SIGSTOP; Python sleeps for ever; an exception; SIGTERM to this process alone."""

Death = tuple[int, str, int]
"""Slot, place, and at the how many-th time that it comes there, counted from 1."""


class PlannedError(RuntimeError):
    """What a process raises that shall raise."""


def befall(kind: str) -> None:
    """A fault of this kind happens to this process, here and now."""
    if kind == "raise":
        raise PlannedError(f"slot {slot()} was told to raise this")
    if kind == "hang":
        while True:
            time.sleep(3600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])


class Places(Callback):
    """Lets a fault happen to this process at places.

    Args:
        deaths: Of all slots.
        kind: What happens to this one; of :data:`KINDS`.
    """

    ntp_own_attributes = ("_deaths", "_kind", "_times", "_hooked")

    def __init__(self, deaths: Iterable[Death], kind: str = "kill") -> None:
        self._deaths = {(place, number) for victim, place, number in deaths if victim == slot()}
        self._kind = kind
        self._times: Counter[str] = Counter()
        self._hooked = False
        if self._deaths:
            self._patch()

    def reach(self, place: str) -> None:
        self._times[place] += 1
        if (place, self._times[place]) in self._deaths:
            befall(self._kind)

    def _patch(self) -> None:
        import torch

        from lightning_ntp.lightning import checkpoint, checkpoint_io, metrics

        _before(metrics, "gather_from_replicas", partial(self.reach, "metric_sync"))
        _before(checkpoint, "gather_full", partial(self.reach, "gather"))

        class Torch:
            @staticmethod
            def save(content: Any, file: Any) -> None:
                file.write(b"half of a file")
                file.flush()
                self.reach("write")
                file.seek(0)
                file.truncate()
                torch.save(content, file)

        checkpoint_io.torch = Torch  # type: ignore[attr-defined]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.reach("setup")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reach("start")

    def _hook(self, trainer: Trainer, module: Any) -> None:
        if not self._hooked:
            self._hooked = True
            module.net.mlp.register_forward_pre_hook(lambda *_: self._in_forward(trainer))

    def _in_forward(self, trainer: Trainer) -> None:
        stage = trainer.state.stage.value if trainer.state.stage is not None else ""
        if stage in ("validate", "test", "predict"):
            self.reach({"validate": "validation"}.get(stage, stage) + "_forward")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._hook(trainer, pl_module)
        self.reach("sanity" if trainer.sanity_checking else "validation")
        if not trainer.sanity_checking:
            count = int(trainer.num_val_batches[dataloader_idx])
            for name, number in (("first", 0), ("middle", count // 2), ("last", count - 1)):
                if batch_idx == number:
                    self.reach(f"validation_{name}")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.reach("validation_end")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.reach("validation_epoch_end")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reach("epoch_end")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reach("fit_end")

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._hook(trainer, pl_module)
        self.reach("test")

    def on_predict_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._hook(trainer, pl_module)
        self.reach("predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.reach("teardown")


def _before(module: Any, name: str, call: Callable[[], None]) -> None:
    inner = getattr(module, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        call()
        return inner(*args, **kwargs)

    setattr(module, name, called)
