"""The batch of a step: checked, complete when a replica is missing, and weighed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_ntp import engine
from lightning_ntp.comm import Generation
from lightning_ntp.lightning import private
from lightning_ntp.lightning.data import describe_source, regular_batches
from lightning_ntp.lightning.private import EvaluationLoop
from lightning_ntp.lightning.shared_batches import SharedBatches
from lightning_ntp.lightning.shared_evaluation import SharedEvaluation

_LOADERS = {
    "training": "train_dataloader",
    "validation": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}


class Batches:
    """What a replica trains on in a step, and how much it counts.

    Args:
        generation: Gives the current generation.
    """

    def __init__(self, generation: Callable[[], Generation]) -> None:
        self._generation = generation
        self._checked: set[str] = set()
        self._even: tuple[object, bool] | None = None
        self._shared: tuple[object, SharedBatches] | None = None
        self._shared_evaluation = SharedEvaluation()
        self._share: float | engine.LossWeight = 1.0

    def reset(self) -> None:
        """Begin another run."""
        self._checked, self._even, self._shared, self._share = set(), None, None, 1.0

    def remember(self) -> Callable[[], None]:
        """Remember what is known; returns the function that puts it back.

        A replayed step must enter the same collectives again, on all ranks.
        """
        checked, even = set(self._checked), self._even

        def restore() -> None:
            self._checked, self._even = set(checked), even

        return restore

    def known(self) -> dict[str, Any]:
        """What all ranks have found out alike, for a newcomer."""
        return {"checked": sorted(self._checked), "even": None if self._even is None else self._even[1]}

    def know(self, known: dict[str, Any], trainer: Trainer) -> None:
        """In a newcomer: take over what :meth:`known` has said."""
        self._checked = set(known["checked"])
        self._even = None if known["even"] is None else (trainer.train_dataloader, known["even"])

    def training(self, trainer: Trainer, batch: Any, batch_idx: int) -> Any:
        """The batch to train on. Collective over all members in the first steps and where batches may differ in size.

        Args:
            trainer: The running trainer.
            batch: What this rank's dataloader gave.
            batch_idx: Its number in the epoch.

        Raises:
            PeerMismatchError: If tensor-parallel peers hold different batches.
            BatchSizeError: If the number of samples is needed and cannot be told.
        """
        topology, samples = self._generation().topology, None
        if len(topology.live_replicas) < len(topology.replicas):
            batch, samples = self._complete(trainer, batch, batch_idx)
        self.check(trainer, "training", batch)
        self._share = self._weigh(trainer, batch, samples)
        return batch

    def evaluation(self, loop: EvaluationLoop, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """The batch to evaluate on: with its part of the samples of replicas that are gone."""
        generation = self._generation()
        topology = generation.topology
        if len(topology.live_replicas) == len(topology.replicas):
            return batch
        return self._shared_evaluation.complete(loop, batch, batch_idx, dataloader_idx, topology, generation.replica)

    def loss_share(self) -> float:
        """This replica's share of the global micro-batch. Waits for the others' numbers, where they are needed."""
        if isinstance(self._share, engine.LossWeight):
            self._share = self._share.share()
        return self._share

    def check(self, trainer: Trainer, stage: str, batch: Any) -> None:
        """Check the first batch of a stage."""
        if stage not in self._checked:
            source = describe_source(getattr(trainer, _LOADERS[stage]))
            engine.check_same_batch(batch, self._generation(), source, everywhere=stage == "training")
            self._checked.add(stage)

    def _complete(self, trainer: Trainer, batch: Any, batch_idx: int) -> tuple[Any, int | None]:
        """This replica's share of the global batch and its number of samples, when a replica is gone."""
        generation, loaders = self._generation(), trainer.train_dataloader
        if self._shared is None or self._shared[0] is not loaders:
            self._shared = (loaders, SharedBatches(loaders))
        found = self._shared[1].share(batch_idx, generation.topology, generation.replica)
        return (batch, None) if found is None else (private.prepare_batch(trainer, found[0]), found[1])

    def _weigh(self, trainer: Trainer, batch: Any, samples: int | None) -> float | engine.LossWeight:
        generation = self._generation()
        replicas = len(generation.topology.live_replicas)
        weigh = getattr(trainer.lightning_module, "ntp_batch_weight", None)
        if weigh is not None:
            return engine.LossWeight(float(weigh(batch)), generation)
        if replicas == 1:
            return 1.0
        if samples is not None:
            return engine.LossWeight(float(samples), generation)
        loaders = trainer.train_dataloader
        if self._even is None or self._even[0] is not loaders:
            # asked of the launch's replicas: with one missing, a batch is completed and weighed by its samples
            sizes = regular_batches(loaders, len(generation.topology.replicas))
            self._even = (loaders, engine.all_equal(sizes, generation.world, generation.device) and sizes > 0)
        if self._even[1] and replicas == len(generation.topology.replicas):
            return 1.0 / replicas
        return engine.LossWeight(float(engine.batch_size_of(batch)), generation)
