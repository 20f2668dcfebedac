"""What every rank of a parity test does: train a recipe through the actual Trainer, and hand back its side of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import World
from tests.models import LitGPT, ManualLitGPT
from tests.reference import Recipe, Record, dataset, epoch_batches, moments_by_name


@dataclass
class RankRecord:
    """One rank's side; the unsharded tensors are on rank 0 only."""

    losses: list[tuple[float, int]] = field(default_factory=list)
    """Of its replica's micro-batches, with their sizes."""
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class _Gather(Callback):
    """Collects the end state while the strategy still stands."""

    def __init__(self, record: RankRecord, names: list[str], copies_equal: bool) -> None:
        self.record = record
        self.names = names
        self.copies_equal = copies_equal

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Every rank takes part in the gathering."""
        strategy: Any = trainer.strategy
        if self.copies_equal:
            strategy.assert_copies_equal()
        state = strategy.lightning_module_state_dict()
        (optimizer,) = trainer.optimizers
        optimizer_state = strategy.optimizer_state(optimizer)
        if strategy.is_global_zero:
            self.record.parameters = {k.removeprefix("model."): v.clone() for k, v in state.items()}
            self.record.moments = moments_by_name(optimizer_state, self.names)


class EpochBatches:
    """A batch sampler for what no DistributedSampler gives: replicas with batches of different sizes."""

    def __init__(self, recipe: Recipe, replica: int) -> None:
        self.batches = [batch[replica] for batch in epoch_batches(recipe, 0)]

    def __iter__(self):  # noqa: ANN204
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def loader(recipe: Recipe, replica: int) -> DataLoader:
    """This replica's batches: an ordinary loader (the Trainer adds its sampler) wherever that can give them."""
    rows = TensorDataset(dataset(recipe))
    if recipe.plain_loader:
        return DataLoader(rows, batch_size=recipe.batch_size, shuffle=recipe.shuffle)
    if recipe.shuffle:
        raise ValueError("batches made by hand are the same in every epoch: set shuffle=False")
    return DataLoader(rows, batch_sampler=EpochBatches(recipe, replica))


def train_in_rank(
    recipe: Recipe, degrees: tuple[int, ...], manual: bool = False, gradients: bool = False, copies_equal: bool = False
) -> RankRecord:
    """Train in this rank of a world of ``sum(degrees)``; every rank starts from another seed than the reference."""
    from lightning_ntp import NTPStrategy

    slot = int(os.environ["LIGHTNING_NTP_SLOT"])
    replica = next(r for r in range(len(degrees)) if slot < sum(degrees[: r + 1]))
    return train_with(
        NTPStrategy(degrees=degrees), recipe, sum(degrees), slot, replica, manual, gradients, copies_equal
    )


def train_with(
    strategy: Any,
    recipe: Recipe,
    devices: int,
    slot: int = 0,
    replica: int = 0,
    manual: bool = False,
    gradients: bool = False,
    copies_equal: bool = False,
) -> RankRecord:
    """Train a recipe under any strategy that has the methods a parity test needs."""
    kind = ManualLitGPT if manual else LitGPT
    options: dict[str, Any] = {"clip_norm": recipe.clip_norm} if manual else {}
    # Rank 0 has the reference's weights; all others must get them from it.
    module = kind(
        recipe.model,
        seed=recipe.seed + slot,
        optimizer=recipe.optimizer,
        lr=recipe.lr,
        record_gradients=gradients,
        record_norms=True,
        **options,
    )
    record = RankRecord()
    names = [name for name, _ in module.model.named_parameters()]
    clip = recipe.clip_value if recipe.clip_norm is None else recipe.clip_norm
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="bf16-mixed" if recipe.autocast else "64-true" if recipe.dtype == "float64" else "32-true",
        max_steps=recipe.steps,
        max_epochs=-1,
        accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=None if manual else clip,
        gradient_clip_algorithm=None if manual or clip is None else "norm" if recipe.clip_norm is not None else "value",
        use_distributed_sampler=recipe.plain_loader,
        callbacks=[_Gather(record, names, copies_equal)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(recipe, replica))
    record.losses, record.norms = module.losses, module.norms
    record.gradients = [{k.removeprefix("model."): v for k, v in g.items()} for g in module.gradients]
    return record


def train_in_world(
    world: World, recipe: Recipe, degrees: tuple[int, ...], timeout: float = 90.0, **options: Any
) -> Record:
    """Train in all ranks and put their sides together into one record of the global batches."""
    assert world.size == sum(degrees) and recipe.replicas == len(degrees)
    return combine(world.run(train_in_rank, recipe, degrees, timeout=timeout, **options), degrees)


def combine(ranks: list[RankRecord], degrees: tuple[int, ...]) -> Record:
    """Losses of the global batch from the replicas' own; checks that TP peers and norms agree bit by bit."""
    firsts = [sum(degrees[:r]) for r in range(len(degrees))]
    for first, degree in zip(firsts, degrees, strict=True):
        for slot in range(first, first + degree):
            assert ranks[slot].losses == ranks[first].losses, (
                f"slots {first} and {slot} are one replica with two losses"
            )
    for slot, rank in enumerate(ranks):
        assert rank.norms == ranks[0].norms, f"slot {slot} has another gradient norm than slot 0"
    losses = []
    for micro in zip(*(ranks[first].losses for first in firsts), strict=True):
        total = sum(size for _, size in micro)
        losses.append(sum(loss * size / total for loss, size in micro))
    return Record(losses, ranks[0].norms, ranks[0].gradients, ranks[0].parameters, ranks[0].moments)


def as_dtype(recipe: Recipe) -> torch.dtype:
    """The recipe's parameter dtype."""
    return torch.float64 if recipe.dtype == "float64" else torch.float32
