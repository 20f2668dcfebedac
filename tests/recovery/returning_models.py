"""What jobs train whose dead ranks come back: data and callbacks that make a newcomer's life hard."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lightning_ntp.launch import RankIdentity, jobs
from lightning_ntp.launch.environment import JOB_DIR
from lightning_ntp.launch.log import left_key
from tests.lightning.rigs import slot
from tests.recovery.jobs import PER_REPLICA, Samples
from tests.recovery.models import HIDDEN, Automatic


class Streams(Automatic):
    """Reads its data in order; for two replicas of degree 2, which is which by the slot."""

    def loader(self, count: int) -> DataLoader[Any]:
        return DataLoader(_Stream(count, slot() // 2), batch_size=PER_REPLICA)


class _Stream(IterableDataset[tuple[Tensor, Tensor, int]]):
    def __init__(self, count: int, replica: int) -> None:
        self._samples, self._count, self._replica = Samples(count), count, replica

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        return (self._samples[index] for index in range(self._replica, self._count, 2))


class DrawsOrder(Automatic):
    """A sampler with a generator of its own, which every epoch takes on. For one replica."""

    def loader(self, count: int) -> DataLoader[Any]:
        samples = Samples(count)
        sampler = RandomSampler(samples, generator=torch.Generator().manual_seed(5))
        return DataLoader(samples, batch_size=PER_REPLICA, sampler=sampler)


class DealsOtherwise(Automatic):
    """A sampler of the user's own, which knows replicas and counts its epochs itself."""

    def loader(self, count: int) -> DataLoader[Any]:
        samples = Samples(count)
        return DataLoader(samples, batch_size=PER_REPLICA, sampler=_Counting(samples, 2, slot() // 2))


class _Counting(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        self.seed += 1
        return super().__iter__()


class InWorkers(Automatic):
    """Loads in processes, which stay from epoch to epoch; items draw random numbers there."""

    def loader(self, count: int) -> DataLoader[Any]:
        return DataLoader(
            _Noisy(count),
            batch_size=PER_REPLICA,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
        )


class Augments(Automatic):
    """Items draw random numbers in the process itself."""

    def loader(self, count: int) -> DataLoader[Any]:
        return DataLoader(_Noisy(count), batch_size=PER_REPLICA, shuffle=True)


class _Noisy(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self, count: int) -> None:
        self._samples = Samples(count)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x, y, number = self._samples[index]
        return x + 0.1 * torch.randn_like(x), y, number


class Follows(Callback):
    """Remembers the degrees of now, as it is told of them, and averages the parameters that are whole everywhere."""

    def __init__(self) -> None:
        self.degrees: tuple[int, ...] = ()
        self.mean: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.degrees = trainer.strategy.topology.degrees

    def on_topology_change(self, change: Any) -> None:
        self.degrees = change.after.degrees

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        assert self.degrees == trainer.strategy.topology.degrees, f"{self.degrees} in slot {slot()}"
        bias = pl_module.net.head.bias.detach()
        self.mean = bias.clone() if self.mean is None else self.mean.lerp(bias, 0.2)
        pl_module.log("head", self.mean.sum())


class Followed(Automatic):
    """With callbacks that have a state of their own, and one that has tensors."""

    def extra_callbacks(self, directory: str) -> list[Callback]:
        return [Follows()]


class Saves(Automatic):
    """Its checkpoints are written when training starts, and after the fit."""

    def extra_callbacks(self, directory: str) -> list[Callback]:
        return [*super().extra_callbacks(directory), _SavesAtStart(Path(directory))]


class _SavesAtStart(Callback):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self._directory / "start.ckpt")


class Dropping(Automatic):
    """Draws random numbers in every forward, outside of regions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net.dropout.p = 0.3


class _Differs(Automatic):
    """A process that is started again is of another version; the others wait until it has seen that."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.other = RankIdentity.from_environ().joins

    def extra_callbacks(self, directory: str) -> list[Callback]:
        return [WaitsUntilRefused()]


class WaitsUntilRefused(Callback):
    """After three steps, until the first process that is started again has left."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        identity, membership = RankIdentity.from_environ(), trainer.strategy._runtime.membership
        ranks = len(trainer.strategy._runtime.launched.slots)
        if trainer.global_step != 3 or identity.joins or len(membership.roster.members) == ranks:
            return
        deadline = time.monotonic() + 60
        while membership.find(left_key(f"{identity.job}.{ranks}")) is None and time.monotonic() < deadline:
            time.sleep(0.01)


class Longer(_Differs):
    """Its data has more samples."""

    def loader(self, count: int) -> DataLoader[Any]:
        return DataLoader(Samples(count + 4 * self.other), batch_size=PER_REPLICA, shuffle=True)


class Wider(_Differs):
    """Its head is wider."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.other:
            self.net.head = nn.Linear(HIDDEN, 3)


class Newer(_Differs):
    """It finds another torch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.other:
            version = importlib.metadata.version
            importlib.metadata.version = lambda name: "99.0" if name == "torch" else version(name)


class Slower(_Differs):
    """Its optimizer has another learning rate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01 if self.other else 0.02)


class Drained(Automatic):
    """Under a supervisor slot 1 leaves as planned, and is started again when a person demands it."""

    def extra_callbacks(self, directory: str) -> list[Callback]:
        return [_DrainsAndDemands()]


class _DrainsAndDemands(Callback):
    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy._runtime.joining or slot() != 2 or JOB_DIR not in os.environ:
            return
        if trainer.global_step == 1:
            trainer.strategy.drain(1, "maintenance")
        if trainer.global_step == 5:
            time.sleep(0.5)  # for the process to end
            jobs.restart_demand(Path(os.environ[JOB_DIR]), 1).touch()
