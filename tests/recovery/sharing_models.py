"""Modules whose samples move between replicas, and that see what must not change: values over all replicas."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ntp.comm import Interrupted
from tests.lightning.rigs import slot
from tests.recovery.jobs import EXACT, PER_REPLICA, Samples
from tests.recovery.models import Automatic, Manual, Settles

WHOLE = {"all_loss_step": EXACT, "all_loss_epoch": EXACT, "metric": 1e-6}
"""Logged values that are the same whoever computes which sample, and how exactly: torchmetrics sums in float32."""


class Moves(Automatic):
    """Logs the loss of global batches.

    Args:
        batch_size: Of the loader; the number of samples is the job's.
        loader: More settings of the loader.
    """

    def __init__(self, batch_size: int = PER_REPLICA, loader: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._options = {"batch_size": batch_size, **(loader or {})}

    def loader(self, count: int) -> DataLoader[Any]:
        return DataLoader(Samples(count), shuffle=True, **self._options)

    def note(self, loss: Tensor, batch: Any) -> None:
        # all replicas are in it
        whole = self.trainer.strategy.whole_loss(loss)
        self.log("all_loss", whole, on_step=True, on_epoch=True, batch_size=1)
        self.metric.update(loss.detach(), len(batch[2]))
        self.log("metric", self.metric, on_step=False, on_epoch=True)


class MovesFromTheStart(Moves):
    """Asks on all ranks, as scripts do: on those that come later too, when it is of yesterday."""

    def on_train_start(self) -> None:
        self.trainer.strategy.share_samples({0: 3, 1: 1})


class MovesAndSettles(Moves, Settles):
    """Asks for every slot's own place once all are back."""


class MovesManually(Moves, Manual):
    """Two optimizers."""


class Mishears(Moves):
    """Ranks whose vote is interrupted though others have heard it: the death of a rank in it can do so to anybody.

    Args:
        deaf: Slots.
        step: In the vote of which step.
    """

    def __init__(self, deaf: tuple[int, ...], step: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._deaf, self._step = deaf, step

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        stop, vote, step = strategy._stop, strategy._stop.vote, self._step

        def mishear() -> None:
            if self.trainer.global_step != step or strategy._runtime.interrupted or stop.vote is vote:
                return vote()
            stop.vote = vote  # once
            riders = stop.riders
            stop.riders = [_Deaf(rider) for rider in riders]
            try:
                vote()
            finally:
                stop.riders = riders
            while not strategy._runtime.interrupted:
                time.sleep(0.002)
            raise Interrupted("the vote was interrupted")

        if slot() in self._deaf:
            stop.vote = mishear


class _Deaf:
    def __init__(self, rider: Any) -> None:
        self.ballot = rider.ballot

    def counted(self, votes: tuple[int, ...]) -> None:
        pass
