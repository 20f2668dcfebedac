"""The samples of a replica that is gone: the others take them over, so that the global batch stays what it was.

The sampler of the launch defines global batches: the k-th is what all replicas' k-th batches hold together. When a
replica is gone, its part is dealt to the others, who fetch their whole share by index. Nothing is skipped or repeated,
and the gradient is that of the same global batch.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_ntp.plan import Topology

log = logging.getLogger("lightning_ntp")


class SharedBatches:
    """Makes this replica's share of a global batch while replicas are missing.

    Args:
        dataloaders: What the trainer iterates over.
    """

    def __init__(self, dataloaders: Any) -> None:
        self.source = dataloaders
        self._loader = dataloaders if _can_be_shared(dataloaders) else None
        self._indices: tuple[int, list[list[int]]] | None = None
        self._warned = False

    @property
    def possible(self) -> bool:
        """Whether samples can be fetched by their number."""
        return self._loader is not None

    def share(self, batch_idx: int, topology: Topology, replica: int) -> tuple[Any, int] | None:
        """Fetch this replica's share.

        Args:
            batch_idx: The number of the batch in the epoch.
            topology: The live members.
            replica: This rank's replica.

        Returns:
            The collated batch on the host and its number of samples; None if the samples cannot be fetched again, then
            the replica goes on with its own batch and those of the lost one are skipped.
        """
        loader = self._loader
        if loader is None:
            if not self._warned:
                log.warning(
                    "a replica is gone and its samples are skipped from now on: only a single DataLoader over a"
                    " map-style dataset, with the sampler that the Trainer has put in, can be shared among the others"
                )
            self._warned = True
            return None
        samples = [loader.dataset[index] for index in self.indices(batch_idx, topology, replica)]
        collate = loader.collate_fn
        assert collate is not None
        return collate(samples), len(samples)

    def indices(self, batch_idx: int, topology: Topology, replica: int) -> list[int]:
        """The samples of this replica's share: its own, then its part of those of the lost replicas."""
        parts = [self._batch(batch_idx, r) for r in range(len(topology.replicas))]
        live = topology.live_replicas
        orphans = [index for r, part in enumerate(parts) if r not in live for index in part]
        return parts[replica] + orphans[live.index(replica) :: len(live)]

    def _batch(self, batch_idx: int, replica: int) -> list[int]:
        loader = self._loader
        assert loader is not None and loader.batch_size is not None
        sampler = loader.sampler
        assert isinstance(sampler, DistributedSampler)
        if self._indices is None or self._indices[0] != sampler.epoch:
            dealt = []
            for rank in range(sampler.num_replicas):
                other = copy.copy(sampler)
                other.rank = rank
                dealt.append(list(other))
            self._indices = (sampler.epoch, dealt)
        start = batch_idx * loader.batch_size
        return self._indices[1][replica][start : start + loader.batch_size]


def begins_alike(loader: Any) -> bool:
    """Whether at the beginning of an epoch a loader gives what another one gives that has run through earlier epochs.

    What keeps a state of its own from epoch to epoch does not, as far as we can know: a generator, workers that stay, a
    user's own sampler or stream.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    if loader.generator is not None or loader.persistent_workers or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    # without a generator it asks the random state of the process, which all ranks of a replica have in common
    drawn = type(sampler) is RandomSampler and sampler.generator is None
    return drawn or type(sampler) in (SequentialSampler, DistributedSampler)


def _can_be_shared(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        # a subclass may deal in its own way, or draw another order each time it is asked
        and type(loader.sampler) is DistributedSampler
        and loader.batch_size is not None
    )
