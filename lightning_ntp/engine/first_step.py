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
from torch import Tensor, nn

from lightning_ntp.comm import Generation
from lightning_ntp.engine.consistency import all_equal, largest
from lightning_ntp.engine.weights import tensors_in
from lightning_ntp.parallel import PlanError, ShardedModel, ShardedParameter
from lightning_ntp.parallel.modules import ColwiseLinear, RowwiseLinear, VocabParallelEmbedding


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

    A pass that gives a parameter no gradient, or zeros, tells nothing of its class and does not count. Passes are
    checked without overlap, so what waits for its first gradient is not looked for in every one of them: in the first
    few, then in the 32nd, the 64th, the 128th...

    Args:
        model: The cut model.
        generation: The current generation.
    """

    # Peers compute copies from equal inputs by equal kernels: they differ at most by the order of atomic
    # additions. A wrong class is off by a factor or by other data altogether.
    TOLERANCE = 1e-2
    # Every copy is looked at twice while it is trainable: the first pass of a GAN gives gradients to one half only.
    PASSES = 2
    PATIENCE = 16

    def __init__(self, model: ShardedModel, generation: Generation) -> None:
        self._model, self._generation = model, generation
        self._passes: Counter[int] = Counter()
        self._begun = 0

    def enter(self, generation: Generation) -> None:
        """Go on in another generation."""
        self._generation = generation

    def remember(self) -> Callable[[], None]:
        """Remember what was looked at; returns the function that puts it back, for a step that is replayed."""
        passes, begun = Counter(self._passes), self._begun

        def restore() -> None:
            self._passes, self._begun = Counter(passes), begun

        return restore

    def known(self) -> tuple[dict[int, int], int]:
        """What was looked at, for a newcomer."""
        return dict(self._passes), self._begun

    def know(self, known: tuple[dict[int, int], int]) -> None:
        """In a newcomer: take over what :meth:`known` has said."""
        self._passes, self._begun = Counter(known[0]), known[1]

    def begin(self) -> bool:
        """Count a backward pass that is about to begin: whether it is to be checked; the same answer on all ranks."""
        if self._generation.topology.full_degree == 1:
            return False
        self._begun += 1
        patient = self._begun <= self.PATIENCE or self._begun & (self._begun - 1) == 0
        return self._begun == 1 or (patient and any(True for _ in self._waiting()))

    def run(self) -> None:
        """Check local gradients, before they are synced. Collective over all members.

        Raises:
            PlanError: If the gradient class of a parameter is wrong.
            PeerMismatchError: If the random states of a replica's ranks differ.
        """
        generation = self._generation
        looked_at = list(self._waiting())
        # the finding, and of every copy whether it had a gradient to look at
        told = torch.zeros(1 + len(looked_at), dtype=torch.int64, device=generation.device)
        other_draws = 2 * len(self._model.parameters) + 2
        if generation.degree > 1:
            state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
            if all_equal(state, generation.tensor_parallel, generation.device):
                told[0] = self._wrong_class(looked_at, told[1:])
            else:
                told[0] = other_draws  # rather than the gradients: other masks make all of them differ
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=generation.world)
        finding, *seen = told.tolist()
        self._passes.update(entry.turn for entry, one in zip(looked_at, seen, strict=True) if one)
        if finding == other_draws:
            raise PeerMismatchError(
                "tensor-parallel peers have different random states after the first step: random numbers were drawn"
                " inside a sharded region that is no block (dropout between a `colwise` and a `rowwise` layer), or on"
                " some ranks only. Use the styles `attention` or `mlp` for the module around it"
            )
        if finding:
            turn, agrees = divmod(finding - 1, 2)
            entry = next(e for e in self._model if e.turn == turn)
            raise PlanError(_agrees(entry) if agrees else _differs(entry, self._model.module))

    def _waiting(self) -> Iterator[ShardedParameter]:
        return (
            e
            for e in self._model
            if e.sharding.replicated and e.parameter.requires_grad and self._passes[e.turn] < self.PASSES
        )

    def _wrong_class(self, copies: list[ShardedParameter], seen: Tensor) -> int:
        """0, or twice the turn of a wrong parameter plus 1 if its copies' gradients differ, 2 if they agree.

        Args:
            copies: What to look at.
            seen: Shape ``(copies,)``; set to 1 for those that have a gradient other than 0 on some peer.
        """
        generation = self._generation
        verdicts = torch.zeros(len(copies), 3, dtype=torch.int32, device=generation.device)
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
                verdicts[k, 2] = 1
        dist.all_reduce(verdicts, group=generation.tensor_parallel)
        seen.copy_(verdicts[:, 2] > 0)
        for entry, (differing, equal, _) in zip(copies, verdicts.tolist(), strict=True):
            if entry.sharding.gradient == "full" and differing:
                return 2 * entry.turn + 1
            if entry.sharding.gradient == "partial" and equal == generation.degree:
                return 2 * entry.turn + 2
        return 0


def _tells(gradient: Tensor) -> bool:
    """Whether equal gradients can be no coincidence: a few bfloat16 numbers have few bits to differ in."""
    return gradient.numel() * -math.log2(torch.finfo(gradient.dtype).eps) >= 20


def _differs(entry: ShardedParameter, root: nn.Module) -> str:
    module = entry.name.rpartition(".")[0] or entry.name
    if _is_sharded(root, entry.name.rpartition(".")[0]):
        return (
            f"the copies of {entry.name!r} on tensor-parallel peers have different gradients, though the output of"
            f" {module!r} is whole on each of them: what follows computes on shards. Is there a `colwise` layer without"
            " its `rowwise` (a head needs 'colwise_gather_output'), or a random number that peers draw differently?"
        )
    return (
        f"the copies of {entry.name!r} on tensor-parallel peers have different gradients, so it is used inside a"
        f" sharded region: add {module!r}: 'replicated_with_grad_allreduce' to the plan (or shard the module)"
    )


def _is_sharded(root: nn.Module, name: str) -> bool:
    """Whether the module of that name is sharded, or lies in one that is."""
    parts = name.split(".")
    around = (root.get_submodule(".".join(parts[: k + 1])) for k in range(len(parts)))
    return any(isinstance(each, ColwiseLinear | RowwiseLinear | VocabParallelEmbedding) for each in around)


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
