"""Data for replicas: tensor-parallel peers see the same batches, replicas see different ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_ntp.lightning.private import worker_init_function


def check_sampler(dataloader: object, replicas: int, replica: int) -> None:
    """Refuse a distributed sampler of the user's that deals samples to ranks instead of replicas.

    Raises:
        ValueError: If its numbers are not those of the replicas.
    """
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
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


def batches_are_even(dataloaders: Any, replicas: int) -> bool:
    """Whether all replicas are known to get batches of equal size at every step.

    True for dataloaders whose :class:`~torch.utils.data.DistributedSampler` deals out samples in regular batches: it
    gives all replicas the same number of samples.
    """
    found = list(_leaves(dataloaders))
    return bool(found) and all(_is_even(loader, replicas) for loader in found)


def describe_source(dataloaders: Any) -> str:
    """A dataloader's dataset and sampler, for messages."""
    parts = []
    for loader in _leaves(dataloaders):
        sampler = getattr(loader, "sampler", None)
        dataset = type(getattr(loader, "dataset", loader)).__name__
        parts.append(f"{dataset} through {type(sampler).__name__}" if sampler is not None else dataset)
    return ", ".join(parts) or "the dataloader"


def _is_even(loader: object, replicas: int) -> bool:
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, DistributedSampler):
        return False
    # a subclass may make batches of any size
    return type(loader.batch_sampler) is BatchSampler and loader.sampler.num_replicas == replicas


def _leaves(dataloaders: Any) -> Iterator[object]:
    if isinstance(dataloaders, dict):
        dataloaders = list(dataloaders.values())
    if isinstance(dataloaders, list | tuple):
        for loader in dataloaders:
            yield from _leaves(loader)
    elif dataloaders is not None:
        yield dataloaders
