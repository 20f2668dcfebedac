"""Gradient sync: buckets that start as soon as backward has filled them.

After :meth:`GradientSync.finish` every parameter's ``grad`` is the sum over all replicas, with the same bits
on all replicas and copies. A parameter that no replica has a gradient for keeps None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ntp.comm.bucket import Bucket, Filling
from lightning_ntp.comm.generation import Generation
from lightning_ntp.comm.lane import Lane
from lightning_ntp.parallel import ShardedModel, ShardedParameter


class GradientSync:
    """Syncs the gradients of a cut model, overlapped with backward.

    Usage: :meth:`prepare`, :meth:`begin`, backward, :meth:`finish`. A backward between :meth:`prepare` and
    :meth:`release` accumulates locally and is synced with the next one inside.

    Args:
        model: The cut model.
        generation: The current generation.
        lane: Runs the communication.
        bucket_cap_bytes: A bucket is closed when it has reached this size.
    """

    def __init__(self, model: ShardedModel, generation: Generation, lane: Lane, bucket_cap_bytes: int) -> None:
        self._model, self._generation, self._lane, self._cap = model, generation, lane, bucket_cap_bytes
        self._hooked: set[nn.Parameter] = set()
        self._hooks: list[Any] = []
        self.local: set[nn.Parameter] = set()
        """Parameters whose ``grad`` holds contributions that were not synced yet."""
        self._stash: dict[nn.Parameter, Tensor] = {}
        self._active = False
        self.buckets: list[Bucket] = []
        self._rounds: list[_Round] = []
        self._next = 0
        self._build()

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank puts on the wire per sync."""
        return sum(bucket.bytes_sent for bucket in self.buckets)

    def prepare(self) -> None:
        """Get ready for a backward, whether it is to be synced or not.

        Gradients that are synced already (several backward passes before one optimizer step) are set aside until
        :meth:`finish` or :meth:`release`: summing them over the replicas again would count them twice.
        """
        if any(p.requires_grad and p not in self._hooked for p in self._model.by_parameter()):
            self._build()  # a layer was thawed
        cleared = {p for p in self.local if p.grad is None}  # by zero_grad, without a step
        self.local -= cleared
        for p in cleared:
            self._stash.pop(p, None)
        for p in self._home:
            if p.grad is not None and p not in self.local:
                self._stash[p], p.grad = p.grad, None

    def release(self) -> None:
        """Put back what :meth:`prepare` has set aside, but for parameters that have local gradients now."""
        for p in [p for p in self._stash if p not in self.local]:
            p.grad = self._stash.pop(p)

    def begin(self) -> None:
        """Start to sync: buckets that the backward fills from now on, and what is local already."""
        self._next = 0
        self._rounds = [_Round(bucket) for bucket in self.buckets]
        self._active = True

    def finish(self) -> None:
        """Wait until all gradients are synced and install them.

        Raises:
            Exception: Whatever a collective raised.
        """
        self._active = False
        for round_ in self._rounds:
            round_.pending.clear()
        self._launch()
        rounds, self._rounds = self._rounds, []
        self._lane.drain()
        launched = [r for r in rounds if r.flags is not None]
        if launched:
            # on CUDA the one place where the host waits for the device
            received = iter(torch.cat([r.flags.double() for r in launched if r.flags is not None]).tolist())
            for round_ in launched:
                for entry, gradient in zip(round_.bucket.entries, round_.results, strict=True):
                    entry.parameter.grad = gradient if next(received) > 0 else None
                    # those of idle buckets stay local: they are synced once they are trainable again
                    self.local.discard(entry.parameter)
        for p in [p for p in self._stash if p not in self.local]:
            synced = self._stash.pop(p)
            p.grad = synced if p.grad is None else p.grad.add_(synced)

    def cancel(self) -> None:
        """Forget a backward that failed."""
        self._active = False
        self._rounds = []
        self.release()

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked = [], set()

    def _build(self) -> None:
        self.close()
        entries = [e for e in self._model if e.parameter.requires_grad]
        self._home: dict[nn.Parameter, tuple[int, int]] = {}
        self.buckets = [b for b in _buckets(entries, self._generation, self._cap) if b.has_work]
        for number, bucket in enumerate(self.buckets):
            for position, entry in enumerate(bucket.entries):
                self._home[entry.parameter] = (number, position)
        for entry in entries:
            hook = entry.parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
            self._hooked.add(entry.parameter)

    def _arrived(self, p: nn.Parameter) -> None:
        """Backward has accumulated the gradient of ``p``."""
        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError("a parameter has a sparse gradient: use dense gradients (sparse=False)")
        home = self._home.get(p)
        if home is None:  # nothing to communicate
            return
        if not self._active:
            self.local.add(p)
            return
        round_ = self._rounds[home[0]]
        if p not in round_.pending:
            raise RuntimeError(
                f"the parameter {self._model.by_parameter()[p].name!r} received its gradient twice in one backward:"
                " use torch.utils.checkpoint with use_reentrant=False"
            )
        round_.pending.discard(p)
        round_.take(home[1])
        self._launch()

    def _launch(self) -> None:
        """Submit filled buckets in bucket order: all ranks must enter collectives in the same order."""
        while self._next < len(self._rounds) and not self._rounds[self._next].pending:
            round_ = self._rounds[self._next]
            self._next += 1
            if round_.idle:
                continue
            for position in range(len(round_.bucket.entries)):
                round_.take(position)  # what was local before this backward
            self._lane.submit(round_.run)


class _Round:
    """One sync of one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        # frozen for now (a GAN's other half, say): nothing will arrive, and nothing is sent if that holds for all
        self.pending = {e.parameter for e in bucket.entries if e.parameter.requires_grad}
        self.idle = not self.pending
        self._filling: Filling | None = None
        self.results: list[Tensor] = []
        self.flags: Tensor | None = None

    def take(self, position: int) -> None:
        """Take a parameter's gradient away, if there is one."""
        parameter = self.bucket.entries[position].parameter
        with torch.no_grad():
            if self._filling is None:  # not earlier: while backward begins, activations need the memory
                self._filling = self.bucket.fill()
            if parameter.grad is not None:
                self._filling.put(position, parameter.grad)
                parameter.grad = None

    def run(self) -> None:
        filling, self._filling = self._filling, None
        assert filling is not None
        with torch.no_grad():
            self.results, self.flags = self.bucket.run(filling)


def _buckets(entries: list[ShardedParameter], generation: Generation, cap: int) -> Iterator[Bucket]:
    """Fill buckets in the order in which backward is expected to deliver: the reverse of registration.

    Parameters of gradient class ``full`` have buckets of their own, packed alike on every index, since the
    order of additions in an all-reduce depends on offsets and sizes. Those with several ``partial`` owners
    have buckets of their own too, since only they need an exchange in a uniform world.
    """
    topology = generation.topology
    open_: dict[tuple[Any, ...], list[ShardedParameter]] = {}
    done: list[list[ShardedParameter]] = []
    for entry in reversed(entries):
        sharding = entry.sharding
        kind = "sharded"
        if sharding.replicated and sharding.gradient == "full":
            kind = "full"
        elif any(lay.overlapping for d in set(topology.live_degrees) for lay in sharding.layouts(topology.family, d)):
            kind = "shared"
        key = (kind, entry.parameter.dtype, entry.parameter.device)
        filling = open_.setdefault(key, [])
        filling.append(entry)
        # counted in unsharded bytes over the full degree: the same on all ranks whatever they hold
        size = sum(e.shape.numel() for e in filling) * entry.parameter.element_size()
        if size / (1 if kind == "full" else topology.full_degree) >= cap:
            done.append(open_.pop(key))
    done += open_.values()
    order = {entry.turn: position for position, entry in enumerate(reversed(entries))}
    done.sort(key=lambda bucket: max(order[e.turn] for e in bucket))
    return (Bucket(bucket, generation) for bucket in done)
