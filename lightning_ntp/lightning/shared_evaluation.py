"""The evaluation samples of a replica that is gone: the others take them over, so that every sample still counts.

Evaluation has no global batches: the samples of lost replicas are spread evenly over the batches of the others. Those
become larger, not more, because a step may contain collectives over all replicas. Sums and means over samples are what
they were; what is made of whole batches (the largest mean of a batch) may not be.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_ntp.lightning import private
from lightning_ntp.lightning.dealt_batches import is_plain
from lightning_ntp.lightning.private import EvaluationLoop
from lightning_ntp.plan import Topology

log = logging.getLogger("lightning_ntp")


class SharedEvaluation:
    """Completes this replica's evaluation batches while replicas are missing."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._batches: list[list[int]] = []
        self._warned = False

    def complete(
        self, loop: EvaluationLoop, batch: Any, batch_idx: int, dataloader_idx: int, topology: Topology, replica: int
    ) -> Any:
        """The batch to evaluate in place of ``batch``.

        Args:
            loop: The running loop.
            batch: What this rank's dataloader gave.
            batch_idx: Its number.
            dataloader_idx: The dataloader's number.
            topology: The live members.
            replica: This rank's replica.
        """
        loader, limit = private.loader_of(loop, dataloader_idx)
        if not _can_be_shared(loader):
            if not self._warned:
                log.warning(
                    "a replica is gone and its evaluation samples are skipped from now on: only DataLoaders over"
                    " map-style datasets, with the sampler that the Trainer has put in, can be shared among the others"
                )
            self._warned = True
            return batch
        sampler = loader.batch_sampler.sampler
        key = (id(loop), dataloader_idx, sampler.epoch, limit, topology.live_replicas)
        if key != self._key:
            self._key, self._batches = key, _deal(loader.batch_sampler, limit, topology, replica)
        indices = self._batches[batch_idx]
        seen = getattr(loader.batch_sampler, "seen_batch_indices", None)
        if seen:  # 2.6.6: prediction writers are told which samples a batch has
            seen[batch_idx] = indices
        return loader.collate_fn([loader.dataset[index] for index in indices])


def _deal(batches: Any, limit: float, topology: Topology, replica: int) -> list[list[int]]:
    """The batches of a replica, its own samples first."""
    size = batches.batch_size
    parts = [_samples(batches.sampler, number) for number in range(len(topology.replicas))]
    if limit * size < len(parts[replica]):  # the user's limit, rather than the end of this replica's samples
        parts = [part[: int(limit) * size] for part in parts]
    live = topology.live_replicas
    own = [parts[replica][start : start + size] for start in range(0, len(parts[replica]), size)]
    if batches.drop_last and own and len(own[-1]) < size:
        own.pop()
    orphans = [index for number, part in enumerate(parts) if number not in live for index in part]
    more, count = orphans[live.index(replica) :: len(live)], len(own)
    return [batch + more[k * len(more) // count : (k + 1) * len(more) // count] for k, batch in enumerate(own)]


def _samples(sampler: Any, replica: int) -> list[int]:
    other = copy.copy(sampler)
    other.rank = replica
    if type(sampler) is not DistributedSampler:  # without repeated samples: parts may differ by one
        other.num_samples = len(range(replica, other.total_size, other.num_replicas))
    return list(other)


def _can_be_shared(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # not the dataloader's own attributes: predict gets a batch sampler, and then it has none
    sampler = getattr(loader.batch_sampler, "sampler", None)
    regular = is_plain(loader.batch_sampler) or private.counts_indices(loader.batch_sampler)
    return regular and (type(sampler) is DistributedSampler or private.is_prediction_sampler(sampler))
