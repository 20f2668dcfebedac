"""The weight of a replica's loss: its share b_r / B of the global micro-batch.

Gradients are summed over replicas, so the weight goes into the loss. With equal batches it is 1 / replicas,
without any communication. Otherwise all ranks tell each other their number while forward runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm import Generation


class BatchSizeError(ValueError):
    """The number of samples of a batch cannot be told."""


def batch_size_of(batch: Any) -> int:
    """The number of samples in a batch: the size of dim 0 where all tensors of the batch agree on it.

    Raises:
        BatchSizeError: If they do not, or there is no tensor.
    """
    sizes = {int(t.shape[0]) if t.dim() else -1 for t in tensors_in(batch)}
    if len(sizes) != 1 or -1 in sizes:
        raise BatchSizeError(
            f"cannot tell the number of samples in a batch ({type(batch).__name__} with first dimensions"
            f" {sorted(sizes) or 'none'}): replicas may hold batches of different size, so define"
            " `ntp_batch_weight(self, batch) -> float` on the LightningModule (samples or tokens in the batch)"
        )
    return sizes.pop()


class LossWeight:
    """Exchanges batch weights in the background of the forward pass.

    Args:
        weight: This rank's number of samples or tokens; equal on the ranks of a replica.
        generation: The current generation.

    Raises:
        ValueError: If the weight is negative or not finite.
    """

    def __init__(self, weight: float, generation: Generation) -> None:
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"the weight of a batch is {weight!r}; it must be a finite number of at least 0")
        self._weight = float(weight)
        own = weight if generation.is_first_of_replica else 0.0
        self._total = torch.tensor(own, dtype=torch.float64, device=generation.device)
        self._work = dist.all_reduce(self._total, group=generation.world, async_op=True)

    def share(self) -> float:
        """This replica's share of the global micro-batch. Waits for the slowest rank to have told its number.

        Raises:
            ValueError: If no replica has any weight.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        total = float(self._total)
        if total <= 0:
            raise ValueError("the weights of all replicas' batches sum to 0: there is nothing to train on")
        return self._weight / total


def tensors_in(batch: Any) -> list[Tensor]:
    """All tensors in a nesting of mappings and sequences, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [t for value in batch.values() for t in tensors_in(value)]
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [t for value in batch for t in tensors_in(value)]
    return []
