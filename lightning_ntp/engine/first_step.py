"""Checks of the first step: mistakes that would train on silently with wrong numbers.

Tensor-parallel peers must see the same batch and draw the same random numbers outside sharded regions; copies
of class ``full`` must have the same gradient, and those of class ``partial`` must not all have.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from lightning_ntp.comm import Generation
from lightning_ntp.engine.weights import tensors_in
from lightning_ntp.parallel import PlanError, ShardedModel, ShardedParameter


class PeerMismatchError(RuntimeError):
    """Tensor-parallel peers differ in something that must be equal."""


def check_same_batch(batch: Any, generation: Generation, source: str) -> None:
    """Check that the ranks of a replica hold the same batch. Collective over the replica.

    Args:
        batch: Any nesting of tensors.
        generation: The current generation.
        source: Where the batch came from, for the message.

    Raises:
        PeerMismatchError: On all ranks of the replica, if it differs.
    """
    if not _agree(_fingerprint(batch), generation):
        raise PeerMismatchError(
            f"the ranks of replica {generation.replica} got different batches from {source}. Tensor-parallel peers"
            " must see the same samples: shard data by replica, not by rank"
            f" (num_replicas={len(generation.topology.live_replicas)} and rank=replica, which"
            " `trainer.distributed_sampler_kwargs` holds), give a shuffling sampler the same seed on all ranks, and"
            " seed a dataset that makes random data"
        )


class FirstStepCheck:
    """Compares gradients and random states of tensor-parallel peers after the first backward.

    Args:
        model: The cut model.
        generation: The current generation.
    """

    # Peers compute copies from equal inputs by equal kernels: they differ at most by the order of atomic
    # additions. A wrong class is off by a factor or by other data altogether.
    TOLERANCE = 1e-2

    def __init__(self, model: ShardedModel, generation: Generation) -> None:
        self._model, self._generation = model, generation

    def run(self) -> None:
        """Check local gradients, before they are synced. Collective over the replica.

        Raises:
            PlanError: If the gradient class of a parameter is wrong.
            PeerMismatchError: If the peers' random states differ.
        """
        if self._generation.degree == 1:
            return
        self._check_classes()
        state = torch.get_rng_state()
        if not _agree(zlib.crc32(state.numpy().tobytes()), self._generation):
            raise PeerMismatchError(
                "tensor-parallel peers have different random states after the first step: random numbers were drawn"
                " inside a sharded region that is no block (dropout between a `colwise` and a `rowwise` layer), or on"
                " some ranks only. Use the styles `attention` or `mlp` for the module around it"
            )

    def _check_classes(self) -> None:
        generation = self._generation
        copies = [e for e in self._model if e.sharding.replicated and e.parameter.grad is not None]
        if not copies:
            return
        verdicts = torch.zeros(len(copies), 2, dtype=torch.int32, device=generation.device)
        for k, entry in enumerate(copies):
            own = entry.parameter.grad
            assert own is not None
            first = own.clone()
            dist.broadcast(first, group=generation.tensor_parallel, group_src=0)
            scale = float(first.abs().max())
            difference = float((own - first).abs().max())
            if scale > 0 or difference > 0:
                verdicts[k, 0] = int(difference > self.TOLERANCE * max(scale, difference))
                verdicts[k, 1] = int(difference <= 1e-6 * scale)
        dist.all_reduce(verdicts, group=generation.tensor_parallel)
        for entry, (differing, equal) in zip(copies, verdicts.tolist(), strict=True):
            if entry.sharding.gradient == "full" and differing:
                raise PlanError(_differs(entry))
            if entry.sharding.gradient == "partial" and equal == generation.degree:
                raise PlanError(_agrees(entry))


def _differs(entry: ShardedParameter) -> str:
    module = entry.name.rpartition(".")[0] or entry.name
    return (
        f"the copies of {entry.name!r} on tensor-parallel peers have different gradients, so it is used inside a"
        f" sharded region: add {module!r}: 'replicated_with_grad_allreduce' to the plan (or shard the module)"
    )


def _agrees(entry: ShardedParameter) -> str:
    module = entry.name.rpartition(".")[0] or entry.name
    return (
        f"the copies of {entry.name!r} on tensor-parallel peers have equal gradients, so it is used outside the"
        f" sharded part of its block and must not be summed: add {module!r}: 'replicated' to the plan"
    )


def _fingerprint(batch: Any) -> int:
    crc = 0
    for tensor in tensors_in(batch):
        crc = zlib.crc32(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), crc)
        data = tensor.detach().cpu().contiguous()
        crc = zlib.crc32(data.view(torch.uint8).numpy().tobytes() if data.numel() and data.dim() else b"", crc)
    return crc


def _agree(number: int, generation: Generation) -> bool:
    if generation.degree == 1:
        return True
    both = torch.tensor([number, -number], dtype=torch.int64, device=generation.device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=generation.tensor_parallel)
    return int(both[0]) == -int(both[1])
