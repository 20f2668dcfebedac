"""Data for replicas: tensor-parallel peers see the same batches, replicas see different ones."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_ntp.lightning.dealt_batches import is_plain
from lightning_ntp.lightning.private import worker_init_function


def check_sampler(dataloader: object, replicas: int, replica: int) -> None:
    """Refuse a distributed sampler of the user's that deals samples to ranks instead of replicas.

    Raises:
        ValueError: If its numbers are not those of the replicas.
    """
    # a batch sampler of the user's hides its sampler: the dataloader then names one that it does not use
    found = (getattr(dataloader, "sampler", None), getattr(getattr(dataloader, "batch_sampler", None), "sampler", None))
    for sampler in found:
        if isinstance(sampler, DistributedSampler):
            _check_numbers(sampler, replicas, replica)


def _check_numbers(sampler: DistributedSampler[Any], replicas: int, replica: int) -> None:
    if (sampler.num_replicas, sampler.rank) != (replicas, replica):
        raise ValueError(
            f"the {type(sampler).__name__} of a dataloader was made with num_replicas={sampler.num_replicas},"
            f" rank={sampler.rank}; this rank belongs to replica {replica} of {replicas}, and tensor-parallel peers"
            " must see the same samples. Leave the sampler to the Trainer, or make it with"
            " `**trainer.distributed_sampler_kwargs`"
        )


def seed_workers_by_replica(dataloader: object, replica: int) -> None:
    """Give tensor-parallel peers the same augmentations: seed their data workers alike."""
    if not isinstance(dataloader, DataLoader) or dataloader.worker_init_fn is not None:
        return
    if int(os.environ.get("PL_SEED_WORKERS", "0")):
        dataloader.worker_init_fn = worker_init_function(replica)


def regular_batches(dataloaders: Any, replicas: int) -> int:
    """A number that is equal on two replicas if they get batches of equal size at every step.

    Returns:
        0 if that cannot be told. It can for dataloaders whose :class:`~torch.utils.data.DistributedSampler` deals out
        samples in regular batches: it gives all replicas the same number of samples.
    """
    sizes = [_regular_batches(loader, replicas) for loader in _leaves(dataloaders)]
    return zlib.crc32(repr(sizes).encode()) if sizes and None not in sizes else 0


def describe_source(dataloaders: Any) -> str:
    """A dataloader's dataset and sampler, for messages."""
    parts = []
    for loader in _leaves(dataloaders):
        sampler = getattr(loader, "sampler", None)
        dataset = type(getattr(loader, "dataset", loader)).__name__
        parts.append(f"{dataset} through {type(sampler).__name__}" if sampler is not None else dataset)
    return ", ".join(parts) or "the dataloader"


def _regular_batches(loader: object, replicas: int) -> tuple[int, int, bool] | None:
    """Samples of a replica, batch size, and whether a smaller last batch is dropped."""
    if not isinstance(loader, DataLoader) or not is_plain(loader.batch_sampler):
        return None
    sampler, batches = loader.sampler, loader.batch_sampler
    assert isinstance(batches, BatchSampler)
    if not isinstance(sampler, DistributedSampler) or batches.sampler is not sampler:
        return None
    if type(sampler) not in (DistributedSampler, DistributedSamplerWrapper) or sampler.num_replicas != replicas:
        return None
    return len(sampler), batches.batch_size, batches.drop_last


def _leaves(dataloaders: Any) -> Iterator[object]:
    if isinstance(dataloaders, dict):
        dataloaders = list(dataloaders.values())
    if isinstance(dataloaders, list | tuple):
        for loader in dataloaders:
            yield from _leaves(loader)
    elif dataloaders is not None:
        yield dataloaders
