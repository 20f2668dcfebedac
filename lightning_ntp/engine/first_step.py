"""Checks of the first steps: mistakes that would train on silently with wrong numbers.

Tensor-parallel peers must see the same batch and draw the same random numbers outside sharded regions; copies
of class ``full`` must have the same gradient, and those of class ``partial`` must not all have. All ranks of the job
raise together, also those of other replicas, so that nobody waits for a peer that has left.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm import Generation
from lightning_ntp.engine.consistency import all_equal, largest
from lightning_ntp.engine.weights import tensors_in
from lightning_ntp.parallel import PlanError, ShardedModel, ShardedParameter


class PeerMismatchError(RuntimeError):
    """Tensor-parallel peers differ in something that must be equal."""


def check_same_batch(batch: Any, generation: Generation, source: str, everywhere: bool) -> None:
    """Check that the ranks of a replica hold the same batch. Collective over the replica.

    Args:
        batch: Any nesting of tensors.
        generation: The current generation.
        source: Where the batch came from, for the message.
        everywhere: Collective over all members instead, which all raise if one replica's ranks differ. For training;
            in evaluation replicas may have different numbers of batches.

    Raises:
        PeerMismatchError: If it differs.
    """
    same = all_equal(_fingerprint(batch), generation.tensor_parallel, generation.device)
    bad = 0 if same else generation.replica + 1
    if everywhere:
        bad = largest(bad, generation.world, generation.device)
    if bad:
        raise PeerMismatchError(
            f"the ranks of replica {bad - 1} got different batches from {source}. Tensor-parallel peers"
            " must see the same samples: shard data by replica, not by rank"
            f" (num_replicas={len(generation.topology.live_replicas)} and rank=replica, which"
            " `trainer.distributed_sampler_kwargs` holds), give a shuffling sampler the same seed on all ranks, and"
            " seed a dataset that makes random data"
        )


class FirstStepCheck:
    """Compares gradients and random states of tensor-parallel peers after the first backward passes.

    Args:
        model: The cut model.
        generation: The current generation.
    """

    # Peers compute copies from equal inputs by equal kernels: they differ at most by the order of atomic
    # additions. A wrong class is off by a factor or by other data altogether.
    TOLERANCE = 1e-2
    # Every copy is looked at twice while it is trainable: the first pass of a GAN gives gradients to one half only.
    PASSES = 2

    def __init__(self, model: ShardedModel, generation: Generation) -> None:
        self._model, self._generation = model, generation
        self._passes: Counter[int] = Counter()
        self._never_ran = True

    def enter(self, generation: Generation) -> None:
        """Go on in another generation."""
        self._generation = generation

    def remember(self) -> Callable[[], None]:
        """Remember what was looked at; returns the function that puts it back, for a step that is replayed."""
        passes, never_ran = Counter(self._passes), self._never_ran

        def restore() -> None:
            self._passes, self._never_ran = Counter(passes), never_ran

        return restore

    def due(self) -> bool:
        """Whether the next backward is to be checked; the same answer on all ranks."""
        if self._generation.topology.full_degree == 1:
            return False
        return self._never_ran or any(True for _ in self._waiting())

    def run(self) -> None:
        """Check local gradients, before they are synced. Collective over all members.

        Raises:
            PlanError: If the gradient class of a parameter is wrong.
            PeerMismatchError: If the random states of a replica's ranks differ.
        """
        self._never_ran = False
        generation = self._generation
        looked_at = list(self._waiting())
        self._passes.update(entry.turn for entry in looked_at)
        finding = 0
        if generation.degree > 1:
            state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
            same = all_equal(state, generation.tensor_parallel, generation.device)
            finding = self._wrong_class(looked_at) or int(not same)
        finding = largest(finding, generation.world, generation.device)
        if finding == 1:
            raise PeerMismatchError(
                "tensor-parallel peers have different random states after the first step: random numbers were drawn"
                " inside a sharded region that is no block (dropout between a `colwise` and a `rowwise` layer), or on"
                " some ranks only. Use the styles `attention` or `mlp` for the module around it"
            )
        if finding:
            turn, agrees = divmod(finding - 2, 2)
            entry = next(e for e in self._model if e.turn == turn)
            raise PlanError(_agrees(entry) if agrees else _differs(entry))

    def _waiting(self) -> Iterator[ShardedParameter]:
        return (
            e
            for e in self._model
            if e.sharding.replicated and e.parameter.requires_grad and self._passes[e.turn] < self.PASSES
        )

    def _wrong_class(self, copies: list[ShardedParameter]) -> int:
        """0, or twice the turn of a wrong parameter plus 2 if its copies' gradients differ, 3 if they agree."""
        generation = self._generation
        verdicts = torch.zeros(len(copies), 2, dtype=torch.int32, device=generation.device)
        for k, entry in enumerate(copies):
            own = entry.parameter.grad
            own = torch.zeros_like(entry.parameter) if own is None else own
            first = own.detach().clone()
            dist.broadcast(first, group=generation.tensor_parallel, group_src=0)
            scale = float(first.abs().max())
            difference = float((own - first).abs().max())
            if scale > 0 or difference > 0:
                verdicts[k, 0] = int(difference > self.TOLERANCE * max(scale, difference))
                verdicts[k, 1] = int(difference <= 1e-6 * scale and _tells(own))
        dist.all_reduce(verdicts, group=generation.tensor_parallel)
        for entry, (differing, equal) in zip(copies, verdicts.tolist(), strict=True):
            if entry.sharding.gradient == "full" and differing:
                return 2 * entry.turn + 2
            if entry.sharding.gradient == "partial" and equal == generation.degree:
                return 2 * entry.turn + 3
        return 0


def _tells(gradient: Tensor) -> bool:
    """Whether equal gradients can be no coincidence: a few bfloat16 numbers have few bits to differ in."""
    return gradient.numel() * -math.log2(torch.finfo(gradient.dtype).eps) >= 20


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
        data = tensor.detach().cpu().contiguous().reshape(-1)
        crc = zlib.crc32(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"", crc)
    return crc
