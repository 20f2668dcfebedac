"""Global batches by the numbers of their samples, whoever of the replicas computes which.

The sampler of the launch defines global batches: the k-th is what all replicas' k-th batches hold together. When a
replica is gone, or takes fewer samples, the others take them over, and fetch their whole share by index where their
loader could not know. Nothing is skipped or repeated, and the gradient is that of the same global batch.
"""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Sequence
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_ntp.lightning.data import describe_source
from lightning_ntp.lightning.dealt_batches import is_plain
from lightning_ntp.plan.dealing import Counts, deal

log = logging.getLogger("lightning_ntp")


class GlobalBatches:
    """The global batches of an epoch, as a distributed sampler of the launch deals them to its replicas.

    Args:
        sampler: Any replica's.
        batch_size: Samples of a replica's batch.
    """

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int) -> None:
        self._sampler, self._size = sampler, batch_size
        self._orders: dict[int, array[int]] = {}

    def batch(self, number: int, order: int) -> list[list[int]]:
        """A global batch.

        Args:
            number: In the epoch.
            order: The epoch by which samples are shuffled.

        Returns:
            By replica the samples of its own batch.
        """
        replicas = self._sampler.num_replicas
        width = self._size * replicas
        samples = self._order(order)[number * width : (number + 1) * width].tolist()
        return [samples[replica::replicas] for replica in range(replicas)]

    def _order(self, epoch: int) -> array[int]:
        found = self._orders.get(epoch)
        if found is None:
            # all samples in turn are what a single replica would be dealt
            alone = copy.copy(self._sampler)
            alone.num_replicas, alone.rank, alone.num_samples, alone.epoch = 1, 0, alone.total_size, epoch
            found = array("q", alone)
            # the newest two: steps that are done again may be of the epoch before
            self._orders = {**dict([*self._orders.items()][-1:]), epoch: found}
        return found


class SharedBatches:
    """Makes this replica's share of a global batch by fetching samples by their number.

    Args:
        dataloaders: What the trainer iterates over.

    Attributes:
        why_not: Why the samples of these dataloaders cannot be fetched so; empty if they can.
    """

    def __init__(self, dataloaders: Any) -> None:
        self.source = dataloaders
        self.why_not = _why_not(dataloaders)
        self._loader = dataloaders if not self.why_not else None
        self._warned = False
        if self._loader is not None:
            dealer = getattr(self._loader.batch_sampler, "dealer", None)
            known = getattr(dealer, "batches", None)  # one list of all samples will do
            self._batches = known or GlobalBatches(self._loader.sampler, self._loader.batch_size)

    @property
    def possible(self) -> bool:
        """Whether samples can be fetched by their number."""
        return self._loader is not None

    @property
    def epoch(self) -> int:
        """The sampler's epoch; 0 if there is no such sampler."""
        return int(self._loader.sampler.epoch) if self._loader is not None else 0

    @property
    def batch_size(self) -> int:
        """Samples of a replica's batch as in the launch; 0 if they cannot be fetched by number."""
        return int(self._loader.batch_size) if self._loader is not None else 0

    def deal(self, number: int, order: int, counts: Counts | None, live: Sequence[int]) -> dict[int, list[int]]:
        """Who computes what of a global batch.

        Args:
            number: Of the batch in the epoch.
            order: The epoch by which samples are shuffled.
            counts: Samples by replica; None if shares are equal.
            live: The live replicas.
        """
        return deal(self._batches.batch(number, order), counts, live)

    def fetch(self, indices: Sequence[int]) -> Any:
        """A collated batch on the host, made here rather than in a worker."""
        loader = self._loader
        assert loader is not None and loader.collate_fn is not None
        return loader.collate_fn([loader.dataset[index] for index in indices])

    def say_skipped(self) -> None:
        """A replica is gone, and its samples with it; said once."""
        if not self._warned:
            log.warning("a replica is gone and its samples are skipped from now on: %s", self.why_not)
        self._warned = True


def begins_alike(loader: Any) -> bool:
    """Whether at the beginning of an epoch a loader gives what another one gives that has run through earlier epochs.

    What keeps a state of its own from epoch to epoch does not, as far as we can know: a generator, workers that stay, a
    user's own sampler or stream.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    if loader.generator is not None or loader.persistent_workers or not is_plain(loader.batch_sampler):
        return False
    sampler = loader.sampler
    # without a generator it asks the random state of the process, which all ranks of a replica have in common
    drawn = type(sampler) is RandomSampler and sampler.generator is None
    return drawn or type(sampler) in (SequentialSampler, DistributedSampler)


def _why_not(loader: Any) -> str:
    known = (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        # a subclass may deal in its own way, or draw another order each time it is asked
        and type(loader.sampler) is DistributedSampler
        and loader.batch_size is not None
    )
    if known:
        return ""
    what = describe_source(loader)
    if isinstance(loader, list | tuple | dict):
        what = f"a {type(loader).__name__} of loaders ({what})"
    return (
        "only a single DataLoader over a map-style dataset, with the sampler that the Trainer has put in, can be shared"
        f" among replicas; this is {what}"
    )
