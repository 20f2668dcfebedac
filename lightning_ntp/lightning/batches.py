"""The batch of a step: checked, complete when a replica is missing, and weighed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from lightning_ntp import engine
from lightning_ntp.comm import Generation
from lightning_ntp.lightning import private
from lightning_ntp.lightning import private_fetching as fetching
from lightning_ntp.lightning.data import describe_source, regular_batches
from lightning_ntp.lightning.drawing import Drawing
from lightning_ntp.lightning.private import EvaluationLoop
from lightning_ntp.lightning.shared_batches import SharedBatches
from lightning_ntp.lightning.shared_evaluation import SharedEvaluation
from lightning_ntp.plan.dealing import Counts, shareholders
from lightning_ntp.plan.share_schedule import ShareSchedule

_LOADERS = {
    "training": "train_dataloader",
    "validation": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}


class Resumed(NamedTuple):
    """The epoch in which a fit was resumed: its loader begins at its first batch, in Lightning 2.6.6."""

    epoch: int
    offset: int
    """How many batches were done before: the trainer counts on from there, the loader from 0."""
    order: int
    """The epoch by which its samples are shuffled."""


class Batches:
    """What a replica trains on in a step, and how much it counts.

    Args:
        generation: Gives the current generation.
    """

    def __init__(self, generation: Callable[[], Generation]) -> None:
        self._generation = generation
        self._checked: set[str] = set()
        self._even: tuple[object, bool] | None = None
        self._shared: SharedBatches | None = None
        self._shared_evaluation = SharedEvaluation()
        self._share: float | engine.LossWeight = 1.0
        self._resumed: Resumed | None = None
        self.schedule = ShareSchedule()
        """How many samples of which batch each replica takes; equal on all ranks."""
        self.largest = 0
        """The most samples that this rank has computed in one batch, as far as they can be told."""

    def reset(self) -> None:
        """Begin another run."""
        self._checked, self._even, self._shared, self._share = set(), None, None, 1.0
        self._resumed, self.schedule, self.largest = None, ShareSchedule(), 0

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
        return {
            "checked": sorted(self._checked),
            "even": None if self._even is None else self._even[1],
            "schedule": self.schedule,
            "resumed": self._resumed,
        }

    def know(self, known: dict[str, Any], trainer: Trainer) -> None:
        """In a newcomer: take over what :meth:`known` has said."""
        self._checked = set(known["checked"])
        self._even = None if known["even"] is None else (trainer.train_dataloader, known["even"])
        self.schedule, self._resumed = known["schedule"], known["resumed"]

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
        topology, shares = self._generation().topology, None
        counts = self.counts(trainer, batch_idx)
        if counts is not None or len(topology.live_replicas) < len(topology.replicas):
            shares = self._deal(trainer, batch_idx, counts)
        if shares is not None:
            own = shares[self._generation().replica]
            if shareholders(counts, len(topology.replicas)) != topology.live_replicas:
                # the loader has drawn for others than are there now
                batch = private.prepare_batch(trainer, self.shared(trainer).fetch(own))
            self.largest = max(self.largest, len(own))
        else:
            self.largest = max(self.largest, self.shared(trainer).batch_size)
        self.check(trainer, "training", batch)
        self._share = self._weigh(trainer, batch, counts, shares)
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

    # ---- who computes what ------------------------------------------------------------------------------------

    def shared(self, trainer: Trainer) -> SharedBatches:
        """The training batches by the numbers of their samples."""
        loaders = trainer.train_dataloader
        if self._shared is None or self._shared.source is not loaders:
            self._shared = SharedBatches(loaders)
        return self._shared

    def number(self, trainer: Trainer, batch_idx: int) -> int:
        """The number of a batch in its loader's pass, given that in the trainer's epoch."""
        return batch_idx - self.offset(trainer)

    def offset(self, trainer: Trainer) -> int:
        """How many batches of this epoch were done before the fit was resumed in it."""
        return self._position(trainer).offset

    def counts(self, trainer: Trainer, batch_idx: int) -> Counts | None:
        """How many samples of a batch each replica takes; None if shares are equal."""
        if not self.schedule.entries:
            return None
        where = self._position(trainer)
        return self.schedule.at(where.epoch, batch_idx - where.offset)

    def fetched(self, trainer: Trainer, batch_idx: int, number: int) -> None:
        """This rank's loader has given a batch: note where the trainer and it stand in a resumed epoch.

        Args:
            trainer: The running trainer.
            batch_idx: The number of the batch in the trainer's epoch.
            number: In the loader's pass.
        """
        drawing = fetching.drawing(trainer)
        if isinstance(drawing, Drawing):
            where = Resumed(self.shared(trainer).epoch, batch_idx - number, drawing.order)
            if where != self._position(trainer):
                self._resumed = where

    def own(self, trainer: Trainer, number: int, replica: int) -> Any:
        """A replica's batch by its number in the loader's pass, as its loader would have given it; on the host.

        None if samples cannot be fetched by their numbers.
        """
        shared, where = self.shared(trainer), self._position(trainer)
        if not shared.possible:
            return None
        everybody = range(len(self._generation().topology.replicas))
        counts = self.schedule.at(where.epoch, number)
        return shared.fetch(shared.deal(number, where.order, counts, everybody)[replica])

    def _position(self, trainer: Trainer) -> Resumed:
        epoch = self.shared(trainer).epoch
        resumed = self._resumed
        return resumed if resumed is not None and resumed.epoch == epoch else Resumed(epoch, 0, epoch)

    def _deal(self, trainer: Trainer, batch_idx: int, counts: Counts | None) -> dict[int, list[int]] | None:
        """Live replica -> its samples of a global batch; None if samples cannot be fetched by their numbers."""
        shared, where = self.shared(trainer), self._position(trainer)
        if not shared.possible:
            shared.say_skipped()
            return None
        live = self._generation().topology.live_replicas
        return shared.deal(batch_idx - where.offset, where.order, counts, live)

    def _weigh(
        self, trainer: Trainer, batch: Any, counts: Counts | None, shares: dict[int, list[int]] | None
    ) -> float | engine.LossWeight:
        generation = self._generation()
        replicas = len(generation.topology.live_replicas)
        weigh = getattr(trainer.lightning_module, "ntp_batch_weight", None)
        if weigh is not None:
            return engine.LossWeight(float(weigh(batch)), generation)
        if replicas == 1:
            return 1.0
        if shares is not None:
            own = len(shares[generation.replica])
            if counts is not None:  # agreed, so all ranks can deal and know the numbers
                return own / sum(map(len, shares.values()))
            return engine.LossWeight(float(own), generation)
        loaders = trainer.train_dataloader
        if self._even is None or self._even[0] is not loaders:
            # asked of the launch's replicas: with one missing, a batch is completed and weighed by its samples
            sizes = regular_batches(loaders, len(generation.topology.replicas))
            self._even = (loaders, engine.all_equal(sizes, generation.world, generation.device) and sizes > 0)
        if self._even[1] and replicas == len(generation.topology.replicas):
            return 1.0 / replicas
        return engine.LossWeight(float(engine.batch_size_of(batch)), generation)
