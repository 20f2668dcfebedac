"""A training loader draws the samples of its replica's share, in its workers too."""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from lightning_ntp.lightning.data import regular_batches
from lightning_ntp.lightning.dealt_batches import let_be
from lightning_ntp.lightning.drawing import Drawing, deal_by_shares
from lightning_ntp.lightning.shared_batches import SharedBatches, begins_alike
from lightning_ntp.plan.dealing import Counts
from lightning_ntp.plan.share_schedule import Entry, ShareSchedule

REPLICAS, SIZE = 3, 4


@pytest.fixture
def watching_workers() -> Iterator[None]:
    """torch watches workers by a handler of SIGCHLD, once and for ever."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


class Fit:
    """The loaders of all replicas and the shares that they deal by."""

    def __init__(self, samples: int, drop_last: bool = False, **options: Any) -> None:
        self.schedule = ShareSchedule()
        self.data = TensorDataset(torch.arange(samples))
        self.loaders = []
        for replica in range(REPLICAS):
            sampler = DistributedSampler(self.data, REPLICAS, replica, seed=5)
            self.loaders.append(DataLoader(self.data, SIZE, sampler=sampler, drop_last=drop_last, **options))
        self.plain = [list(map(tuple, loader.batch_sampler)) for loader in self.loaders]

    def deals(self) -> list[BatchSampler]:
        found = [deal_by_shares(loader, lambda *where: self.schedule.at(*where)) for loader in self.loaders]
        assert None not in found
        return found  # type: ignore[return-value]

    def announce(self, version: int, batch: int, counts: Counts | None, epoch: int = 0) -> None:
        self.schedule = self.schedule.announce(version, Entry(epoch, batch, counts))

    def run(self) -> Iterator[list[list[int]]]:
        """One epoch: the samples of each replica, batch by batch."""
        for parts in zip(*self.loaders, strict=True):
            yield [part[0].tolist() for part in parts]


@pytest.mark.usefixtures("watching_workers")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batches_stay_as_they_are(drop_last: bool, workers: int) -> None:
    # 23 each: five whole batches and one of three samples
    fit = Fit(69, drop_last, num_workers=workers)
    fit.deals()
    seen = []
    for number, parts in enumerate(fit.run()):
        seen.append(parts)
        if number == 0:
            fit.announce(1, 1 + 2 * workers, (1, 9, 2))
    assert len(seen) == len(fit.plain[0]) == (5 if drop_last else 6)
    for number, parts in enumerate(seen):
        own = [fit.plain[replica][number] for replica in range(REPLICAS)]
        assert sorted(sum(parts, [])) == sorted(sum(map(list, own), []))
        if number < 1 + 2 * workers:
            assert parts == [list(part) for part in own]
        else:
            whole = len(own[0]) == SIZE
            assert [len(part) for part in parts] == ([1, 9, 2] if whole else [1, 7, 1])


@pytest.mark.usefixtures("watching_workers")
def test_workers_draw_ahead_and_nothing_drawn_changes() -> None:
    fit = Fit(72, num_workers=2)
    fit.deals()
    iterators = [iter(loader) for loader in fit.loaders]
    for iterator in iterators:
        next(iterator)
    passes = [iterator._sampler_iter for iterator in iterators]
    assert all(isinstance(each, Drawing) and (each.drawn, each.order) == (5, 0) for each in passes)


def test_without_shares_nothing_changes() -> None:
    fit = Fit(69)
    batches = fit.deals()
    assert [list(map(tuple, loader.batch_sampler)) for loader in fit.loaders] == fit.plain
    assert [len(each) for each in batches] == [6] * REPLICAS
    assert regular_batches(fit.loaders[0], REPLICAS) and begins_alike(fit.loaders[0])
    assert all(isinstance(loader.batch_sampler, BatchSampler) for loader in fit.loaders)


def test_an_epoch_has_an_order_of_its_own() -> None:
    fit = Fit(69)
    fit.deals()
    fit.announce(1, 0, (2, 2, 8))
    orders = []
    for epoch in (0, 1):
        for loader in fit.loaders:
            loader.sampler.set_epoch(epoch)
        orders.append([sorted(sum(parts, [])) for parts in fit.run()])
        shared = SharedBatches(fit.loaders[1])
        dealt = [shared.deal(number, epoch, (2, 2, 8), (0, 1, 2)) for number in range(6)]
        assert list(fit.run()) == [[part[replica] for replica in range(REPLICAS)] for part in dealt]
    assert orders[0] != orders[1]


def test_a_replica_without_a_share_draws_its_own_batch_of_the_launch() -> None:
    """It was gone when shares were asked for; batches of no samples cannot be collated."""
    fit = Fit(69)
    fit.deals()
    fit.announce(1, 0, (6, 0, 6))
    assert [tuple(parts[1]) for parts in fit.run()] == fit.plain[1]


def test_copies_and_loaders_that_are_let_be_are_plain() -> None:
    fit = Fit(69)
    batches = fit.deals()
    fit.announce(1, 0, (1, 1, 10))
    assert len(next(iter(batches[0]))) == 1
    for made in (copy.deepcopy(batches[0]), pickle.loads(pickle.dumps(batches[0]))):
        assert list(map(tuple, made)) == fit.plain[0]
    let_be(batches[0])
    assert type(batches[0]) is BatchSampler and list(map(tuple, batches[0])) == fit.plain[0]


class _Own(BatchSampler):
    pass


class _Loader(DataLoader[Any]):
    pass


def test_other_loaders_are_left_as_they_are() -> None:
    data = TensorDataset(torch.arange(12))
    sampler = DistributedSampler(data, REPLICAS, 0)
    for loader in (
        DataLoader(data, 2),
        DataLoader(data, batch_size=None, sampler=sampler),
        DataLoader(data, batch_sampler=_Own(sampler, 2, False)),
        [1, 2],
    ):
        assert deal_by_shares(loader, lambda epoch, number: (1, 2, 3)) is None
    assert deal_by_shares(_Loader(data, 2, sampler=sampler), lambda epoch, number: None) is not None
