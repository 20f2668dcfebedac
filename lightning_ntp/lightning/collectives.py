"""The strategy's collectives as Lightning calls them: one voice per replica, repeated if interrupted between steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.comm import Generation, runtime
from lightning_ntp.engine import Operations
from lightning_ntp.lightning.metrics import gather_from_replicas, gather_with_gradient

if TYPE_CHECKING:
    from lightning_ntp.lightning.steps.transaction import Transaction

T = TypeVar("T")


class ReplicaCollectives:
    """Barrier, broadcast, reduce and gather over the live members.

    Args:
        generation: Gives the current generation.
        operations: Repeats what is interrupted between steps.
        transaction: Gives the transaction of the running fit, if any: inside a step, it recovers.
    """

    def __init__(
        self,
        generation: Callable[[], Generation],
        operations: Callable[[], Operations],
        transaction: Callable[[], Transaction | None],
    ) -> None:
        self._generation, self._operations, self._transaction = generation, operations, transaction
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around what is called inside of a step: it waits for all replicas."""

    def barrier(self) -> None:
        self.run("barrier", self._wait)

    def together(self, what: str, act: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Do something collective in which some ranks are done before others have begun, then wait for all.

        Who passes the wait knows that all have done it. The result stays on each rank: it may differ, and may be too
        much for a join record.

        Args:
            what: For errors.
            act: Called on all ranks, once more if anybody dies meanwhile.
            undo: Undoes what ``act`` has changed, before it is called once more.
        """
        done: list[T] = []

        def attempt() -> None:
            done[:] = [act()]
            self._wait()

        self.run(what, attempt, undo)
        return done[0]

    def gather_for_rank_zero(self, gather: Callable[[], dict[str, T]]) -> dict[str, T]:
        """Gather on rank 0, from some ranks; once more if anybody dies before all have done their part.

        Args:
            gather: Called on all ranks; leaves everything as it is.

        Returns:
            On other ranks an empty dict; so too on a newcomer, which is alone with shards that nobody completes.
        """
        current = runtime.current()
        if current is not None and current.joining:
            return {}
        return self.together("gathering for a checkpoint", gather)

    def broadcast(self, obj: T, src: int) -> T:
        def send() -> T:
            generation = self._generation()
            boxed = [obj]
            dist.broadcast_object_list(boxed, src, group=generation.world, device=generation.device)
            self._wait()  # the source is done before the others have begun
            return boxed[0]

        return self.run("broadcast", send)

    def reduce(self, tensor: Tensor, reduce_op: Any) -> Tensor:
        """See :meth:`NTPStrategy.reduce`."""
        name = str(reduce_op if reduce_op is not None else "sum").rpartition(".")[2].lower()
        operation = {"mean": "SUM", "avg": "SUM"}.get(name, name.upper())
        if not hasattr(dist.ReduceOp, operation):
            raise ValueError(f"reduce_op={reduce_op!r} is none of mean, sum, max, min, product")

        def reduced() -> Tensor:
            generation = self._generation()
            value = tensor.detach().clone().to(generation.device)
            if not generation.is_first_of_replica and operation in ("SUM", "PRODUCT"):
                value.fill_(operation == "PRODUCT")
            dist.all_reduce(value, op=getattr(dist.ReduceOp, operation), group=generation.world)
            if name in ("mean", "avg"):
                # whole numbers have a mean too: Lightning divides by the mean number of samples of a batch
                value = value / len(generation.topology.live_replicas)
            return value

        return self.run("reduce", reduced)

    def decide(self, decision: bool | Callable[[], bool], all_: bool) -> bool:
        """See :meth:`NTPStrategy.reduce_boolean_decision`; a function is asked again when the vote is repeated."""

        def decided() -> bool:
            generation = self._generation()
            vote = torch.tensor(int(decision() if callable(decision) else decision), device=generation.device)
            operation = dist.ReduceOp.MIN if all_ else dist.ReduceOp.MAX
            dist.all_reduce(vote, op=operation, group=generation.world)
            return bool(vote)

        return self.run("reduce_boolean_decision", decided)

    def highest(self, value: Callable[[], int]) -> int:
        """The highest number of all ranks; asked again when the collective is repeated."""

        def reduced() -> int:
            generation = self._generation()
            found = torch.tensor(value(), device=generation.device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=generation.world)
            return int(found)

        return self.run("the highest number", reduced)

    def all_gather(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        if sync_grads and tensor.requires_grad:
            self._check("all_gather")
            return gather_with_gradient(tensor, self._generation())
        own = tensor.detach()
        return self.run("all_gather", lambda: torch.stack(gather_from_replicas(own, self._generation())))

    def _wait(self) -> None:
        generation = self._generation()
        devices = [generation.device.index] if generation.device.type == "cuda" else None
        dist.barrier(group=generation.world, device_ids=devices)

    def _check(self, what: str) -> Transaction | None:
        transaction = self._transaction()
        if transaction is not None:
            transaction.check_may_communicate(what)
        return transaction

    def run(self, what: str, operation: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Run a collective which nobody completes before all have entered it: inside of a step as a part of it, and
        repeated between steps.
        """
        transaction = self._check(what)
        if transaction is not None and transaction.inside:
            with self.waiting():
                return operation()
        return self._operations().run(operation, undo)
