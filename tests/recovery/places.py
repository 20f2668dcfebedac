"""Places outside of training steps at which a process can kill or stop itself."""

from __future__ import annotations

import os
import signal
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
"""The setup hook; fit starts; a batch of the sanity check; a batch of validation: before its forward, in it, after it;
the end of validation; while a metric is synchronised; the end of an epoch; while a checkpoint is gathered, and while it
is written; fit ends; a batch of test and of predict, before and in its forward; the teardown hook."""

Death = tuple[int, str, int]
"""Slot, place, and at the how many-th time that it comes there, counted from 1."""


class Places(Callback):
    """Lets this process die.

    Args:
        deaths: Of all slots.
        how: The signal.
    """

    def __init__(self, deaths: Iterable[Death], how: signal.Signals = signal.SIGKILL) -> None:
        self._deaths = {(place, number) for victim, place, number in deaths if victim == slot()}
        self._how = how
        self._times: Counter[str] = Counter()
        self._hooked = False
        if self._deaths:
            self._patch()

    def reach(self, place: str) -> None:
        self._times[place] += 1
        if (place, self._times[place]) in self._deaths:
            os.kill(os.getpid(), self._how)

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

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._hook(trainer, pl_module)
        self.reach("sanity" if trainer.sanity_checking else "validation")

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
