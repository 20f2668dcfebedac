"""Data dealt out to ranks instead of replicas: an error at once, on all ranks, that names the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from tests.harness import Outcome
from tests.lightning.rigs import Regression, Worlds, make_trainer, rows, slot


class Validated(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def _global_sampler(stage: str, wrapped: bool) -> None:
    data = rows(12)
    sampler = DistributedSampler(data, num_replicas=3, rank=slot())
    if wrapped:
        wrong = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False))
    else:
        wrong = DataLoader(data, batch_size=2, sampler=sampler)
    trainer, module, right = (
        make_trainer((2, 1), use_distributed_sampler=not wrapped),
        Validated(),
        DataLoader(data, batch_size=2),
    )
    if stage == "fit":
        trainer.fit(module, wrong)
    elif stage == "val":
        trainer.fit(module, right, wrong)
    else:
        trainer.test(module, wrong, verbose=False)


@pytest.mark.parametrize(("stage", "wrapped"), [("fit", False), ("fit", True), ("val", False), ("test", True)])
def test_a_distributed_sampler_over_global_ranks_is_refused(world: Worlds, stage: str, wrapped: bool) -> None:
    for rank, outcome in enumerate(world(3).start(_global_sampler, stage, wrapped).wait()):
        assert outcome.state == "raised", outcome.error
        assert f"the DistributedSampler of a dataloader was made with num_replicas=3, rank={rank}" in outcome.error
        assert "distributed_sampler_kwargs" in outcome.error


def _own_sampler(degrees: tuple[int, ...]) -> int:
    trainer = make_trainer(degrees, use_distributed_sampler=False)
    strategy: Any = trainer.strategy
    data = rows(12)
    module = Regression()
    seen: list[Any] = []

    def train_dataloader() -> Any:
        sampler = DistributedSampler(data, shuffle=False, **strategy.distributed_sampler_kwargs)
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False))

    module.train_dataloader = train_dataloader  # type: ignore[method-assign]
    module.on_train_batch_start = lambda batch, k: seen.append(batch[0][0, 0].item())  # type: ignore[assignment]
    trainer.fit(module)
    return len(seen)


def test_a_distributed_sampler_made_from_the_trainers_numbers_is_taken(world: Worlds) -> None:
    assert world(3).run(_own_sampler, (2, 1)) == [3, 3, 3]


def _raised_alike(outcomes: list[Outcome], *parts: str) -> None:
    for outcome in outcomes:
        assert outcome.state == "raised", (outcome.state, outcome.error, outcome.stacks)
        assert "PeerMismatchError: the ranks of replica 0 got different batches from " in outcome.error, outcome.error
        assert all(part in outcome.error for part in parts), outcome.error
        assert outcome.seconds < 20


def _shuffled(degrees: tuple[int, ...]) -> None:
    data = rows(12)
    generator = torch.Generator().manual_seed(slot())
    sampler = RandomSampler(data, generator=generator)
    trainer = make_trainer(degrees, use_distributed_sampler=False)
    trainer.fit(Regression(), DataLoader(data, batch_size=2, sampler=sampler))


@pytest.mark.parametrize("degrees", [(2, 1), (3,)])
def test_a_shuffle_that_depends_on_the_rank_is_told_in_the_first_step_on_all_ranks(
    world: Worlds, degrees: tuple[int, ...]
) -> None:
    outcomes = world(3).start(_shuffled, degrees).wait(grace=20)
    _raised_alike(outcomes, "TensorDataset through RandomSampler", "give a shuffling sampler the same seed")


class _ShardedByRank(IterableDataset):
    """What many streaming data sets do: every rank of the process group takes its share."""

    def __iter__(self) -> Iterator[Any]:
        data = rows(12)
        shard = range(torch.distributed.get_rank(), 12, torch.distributed.get_world_size())
        yield from (data[i] for i in shard)


def _stream() -> None:
    make_trainer((2, 1)).fit(Regression(), DataLoader(_ShardedByRank(), batch_size=2))


def test_an_iterable_dataset_sharded_by_global_rank_is_told_in_the_first_step_on_all_ranks(world: Worlds) -> None:
    _raised_alike(world(3).start(_stream).wait(grace=20), "_ShardedByRank", "shard data by replica, not by rank")


def _stream_evaluated() -> None:
    make_trainer((2,)).test(Validated(), DataLoader(_ShardedByRank(), batch_size=2), verbose=False)


def test_evaluation_data_is_checked_too(world: Worlds) -> None:
    _raised_alike(world(2).start(_stream_evaluated).wait(grace=20), "_ShardedByRank")


class _Labels(IterableDataset):
    """Batches that are nothing but numbers of no dimension."""

    def __iter__(self) -> Iterator[Any]:
        yield {"x": torch.tensor(float(slot())), "y": torch.tensor(1.0)}


class _TakesNumbers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["x"].double().expand(1, 6)).sum()


def _numbers() -> None:
    make_trainer((2,)).fit(_TakesNumbers(), DataLoader(_Labels(), batch_size=None))


def test_numbers_without_dimensions_are_compared_too(world: Worlds) -> None:
    _raised_alike(world(2).start(_numbers).wait(grace=20), "_Labels")


class _Iterates(Regression):
    def training_step(self, dataloader_iter: Any) -> Any:
        return None


def _iterates() -> None:
    make_trainer((2,)).fit(_Iterates(), DataLoader(rows(4)))


def test_a_step_over_the_loaders_iterator_is_refused(world: Worlds) -> None:
    for outcome in world(2).start(_iterates).wait():
        assert outcome.state == "raised" and "_Iterates.training_step takes a dataloader_iter" in outcome.error
