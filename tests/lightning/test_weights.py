"""Every sample weighs alike, whatever replica it is in: the gradient is that of the mean over the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from tests.lightning.rigs import Degrees, EndState, Regression, Worlds, assert_same, make_trainer, replica_of, rows

BATCHES = {0: [[0, 1, 2], [3, 4, 5, 6]], 1: [[7], [8, 9]]}
"""Rows of two steps, by replica."""


class Uneven(BatchSampler):
    """Three and four rows in replica 0, one and two in replica 1; for the truth both together."""

    def __init__(self, degrees: Degrees) -> None:
        self.batches = (
            BATCHES[replica_of(degrees)] if degrees else [a + b for a, b in zip(*BATCHES.values(), strict=True)]
        )

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _train(degrees: Degrees, module: Regression, data: Any) -> Any:
    end = EndState()
    make_trainer(degrees, callbacks=[end], use_distributed_sampler=False).fit(module, data)
    return end.parameters, module.gradients


def _uneven(degrees: Degrees) -> Any:
    return _train(degrees, Regression(), DataLoader(rows(10), batch_sampler=Uneven(degrees)))


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (1, 1)])
def test_a_batch_sampler_may_give_replicas_batches_of_different_sizes(world: Worlds, degrees: tuple[int, ...]) -> None:
    assert_same(world(sum(degrees)).run(_uneven, degrees)[0], _uneven(None))


def _smaller_batches(degrees: Degrees) -> Any:
    """Ordinary loaders with DistributedSamplers, but replica 1 takes a third of replica 0's batch size."""
    from torch.utils.data import DistributedSampler

    data = rows(6)
    if degrees is None:
        # rows 0, 2, 4 are replica 0's, 1, 3, 5 replica 1's
        return _train(None, Regression(), DataLoader(data, batch_sampler=[[0, 2, 4, 1]]))
    replica = replica_of(degrees)
    sampler = DistributedSampler(data, 2, replica, shuffle=False)
    module, end = Regression(), EndState()
    trainer = make_trainer(degrees, callbacks=[end], limit_train_batches=1)
    trainer.fit(module, DataLoader(data, sampler=sampler, batch_size=3 if replica == 0 else 1))
    return end.parameters, module.gradients


def test_a_replica_may_have_another_batch_size(world: Worlds) -> None:
    assert_same(world(3).run(_smaller_batches, (2, 1))[0], _smaller_batches(None))


class _Stream(IterableDataset):
    def __init__(self, degrees: Degrees) -> None:
        self.degrees = degrees

    def __iter__(self) -> Iterator[Any]:
        data = rows(10)
        for batch in Uneven(self.degrees):
            yield tuple(torch.stack(c) for c in zip(*(data[i] for i in batch), strict=True))


def _stream(degrees: Degrees) -> Any:
    return _train(degrees, Regression(), DataLoader(_Stream(degrees), batch_size=None))


def test_an_iterable_dataset_may_give_replicas_batches_of_different_sizes(world: Worlds) -> None:
    assert_same(world(3).run(_stream, (2, 1))[0], _stream(None))


class Masked(Regression):
    """The mean runs over the rows with a mask ("tokens" rather than samples); replica 1 has none in the first step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        kept = x[:, 0] > -0.75
        return (F.mse_loss(self.net(x), y, reduction="none").mean(-1) * kept).sum() / kept.sum().clamp(min=1)

    def ntp_batch_weight(self, batch: Any) -> Any:
        return (batch[0][:, 0] > -0.75).sum()


def _masked(degrees: Degrees) -> Any:
    return _train(degrees, Masked(), DataLoader(rows(10), batch_sampler=Uneven(degrees)))


def test_the_module_may_weigh_batches_by_tokens(world: Worlds) -> None:
    assert_same(world(3).run(_masked, (2, 1))[0], _masked(None))


class _Ragged(Dataset):
    """Batches whose tensors disagree about their first dimension."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.ones(2, 6, dtype=torch.float64), "y": torch.ones(3, dtype=torch.float64)}


class _TakesRagged(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["x"]).pow(2).mean() * batch["y"].mean()


def _ragged() -> None:
    _train((2, 1), _TakesRagged(), DataLoader(_Ragged(), batch_size=None))


def test_a_batch_whose_number_of_samples_is_ambiguous_is_refused_with_the_way_out(world: Worlds) -> None:
    for outcome in world(3).start(_ragged).wait():
        assert outcome.state == "raised" and "first dimensions [2, 3]" in outcome.error, outcome.error
        assert "ntp_batch_weight" in outcome.error


class _Weighs(Regression):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def ntp_batch_weight(self, batch: Any) -> float:
        return self.weight


def _weighs(weight: float) -> None:
    _train((2, 1), _Weighs(weight), DataLoader(rows(4), batch_size=2))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (float("nan"), "the weight of a batch is nan"),
        (float("inf"), "the weight of a batch is inf"),
        (-1.0, "the weight of a batch is -1.0"),
        (0.0, "sum to 0"),
    ],
)
def test_weights_that_make_no_sense_are_refused(world: Worlds, weight: float, message: str) -> None:
    for outcome in world(3).start(_weighs, weight).wait():
        assert outcome.state == "raised" and message in outcome.error, outcome.error


def _logged(degrees: Degrees) -> list[float]:
    module = Regression()
    seen: list[float] = []
    module.training_step = lambda batch, batch_idx: seen.append(float(loss := module.loss(batch))) or loss  # type: ignore
    _train(degrees, module, DataLoader(rows(10), batch_sampler=Uneven(degrees)))
    return seen


def test_the_weight_is_in_the_gradient_only(world: Worlds) -> None:
    sides = world(3).run(_logged, (2, 1))
    x, y = rows(10).tensors
    module = Regression().double()
    with torch.no_grad():
        own = [float(F.mse_loss(module.net(x[b]), y[b])) for b in (BATCHES[0][0], BATCHES[1][0])]
    assert sides[0] == sides[1]
    assert_same([sides[0][0], sides[2][0]], own)
