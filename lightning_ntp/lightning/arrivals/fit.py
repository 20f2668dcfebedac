"""What a fit needs so that ranks can join it, on both sides: batches, state, and what the strategy knows.

:mod:`lightning_ntp.lightning.arrivals.members` says how it goes.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_ntp import engine
from lightning_ntp.comm import Interrupted, Runtime
from lightning_ntp.lightning import private_fetching as fetching
from lightning_ntp.lightning.arrivals.identity import describe_job
from lightning_ntp.lightning.arrivals.joined_state import JoinedState, put_random_states, random_states
from lightning_ntp.lightning.arrivals.members import Captures, Fetched, Joining
from lightning_ntp.lightning.arrivals.newcomer import Newcomer, TooLate
from lightning_ntp.lightning.arrivals.told import Told
from lightning_ntp.lightning.batches import Batches
from lightning_ntp.lightning.shared_batches import begins_alike
from lightning_ntp.lightning.steps.transaction import Transaction
from lightning_ntp.lightning.steps.whole_state import WholeState
from lightning_ntp.lightning.survival import Survival
from lightning_ntp.lightning.verification import Verification
from lightning_ntp.parallel import ShardedModel


class Arrivals:
    """Lets ranks join a fit.

    Args:
        trainer: The trainer, its module and optimizers set up.
        current: The rank's runtime.
        survival: Recovers.
        model: The cut model.
        states: Gives the per-parameter states that move with the parameters.
        batches: Of this fit.
        first_steps: Its check of the first steps.
        verification: Its verification.
        whole: Has the registered states.
        device: This rank's.
        told: What the members have said of this fit.
    """

    def __init__(
        self,
        trainer: Trainer,
        current: Runtime,
        survival: Survival,
        model: ShardedModel,
        states: Callable[[], Any],
        batches: Batches,
        first_steps: engine.FirstStepCheck,
        verification: Verification,
        whole: WholeState,
        device: torch.device,
        told: Told,
    ) -> None:
        self._trainer, self._runtime, self._survival, self._batches = trainer, current, survival, batches
        self._first_steps, self._verification = first_steps, verification
        self._whole, self._device = whole, device
        self._carried = JoinedState(trainer, device, whole.registered, survival.rows)
        transaction = survival.transaction
        assert transaction is not None
        automatic = trainer.lightning_module.automatic_optimization
        captures = Captures(
            lambda: self._alone(self._carried.schema),
            lambda result, loops: self._alone(
                lambda: self._carried.capture(result, transaction.constant_buffers(), loops)
            ),
            self._carried.loops,
            self._common,
        )
        self.joining = Joining(
            current,
            survival.engine,
            captures,
            automatic,
            lambda: transaction.redoing,
            lambda: batches.shared(trainer).possible,
        )
        self._newcomer: Newcomer | None = None
        if current.joining:
            self._newcomer = Newcomer(
                current,
                survival.engine,
                model,
                states,
                self._carried,
                self._take_common,
                self._by_number,
                automatic,
                told,
                lambda: describe_job(trainer, model),
                lambda replica: fetching.set_replica(trainer, replica),
            )
        fetching.patch_fetching(trainer, self._epoch_begins, self._fetch)
        self._connect(transaction, automatic)

    def _connect(self, transaction: Transaction, automatic: bool) -> None:
        transaction.on_micro_batch = self.joining.micro_batch_done
        self._survival.can_replay = lambda: self.joining.can_replay and not transaction.redoing
        transaction.before_replay, transaction.on_replay = self.joining.before_replay, self.joining.replayed
        newcomer = self._newcomer
        if newcomer is None:
            return

        def start() -> None:
            if newcomer.joins:
                newcomer.start()

        def given(last: bool) -> Any:
            return newcomer.micro_batch(last) if newcomer.joins else None

        def arrive() -> None:
            if newcomer.joins:
                newcomer.arrive()

        transaction.before_micro_batch = start
        if automatic:
            transaction.given = given
        else:
            transaction.before_manual_step = arrive

    def _alone(self, capture: Callable[[], bytes]) -> bytes:
        """Capture this rank's state. User code takes part in it, and the other ranks wait in nothing meanwhile."""
        before, thread = self._runtime.may_start, threading.get_ident()

        def refuse(group: str) -> None:
            if threading.get_ident() == thread:
                raise RuntimeError(f"a collective on {group} was called while one rank alone was asked for its state")
            before(group)

        self._runtime.may_start = refuse
        try:
            return capture()
        finally:
            self._runtime.may_start = before

    # ---- batches ----------------------------------------------------------------------------------------------

    def _epoch_begins(self) -> None:
        self.joining.epoch_begins(all(map(begins_alike, fetching.training_loaders(self._trainer))))

    def _fetch(self, fetcher: Any) -> Any:
        """The next training batch."""
        number = fetching.batches_seen(self._trainer)
        fetched = self._given(number) or self._own(fetcher, number)
        if fetched.random is not None and self._runtime.slot in self.joining.awaiting:
            put_random_states(pickle.loads(fetched.random), self._device)  # from the job's own store
        self.joining.fetched(fetched)
        if fetched.item is None:
            fetcher.done = True
            raise StopIteration
        fetcher.done = fetched.done
        return fetched.item

    def _own(self, fetcher: Any, number: int) -> Fetched:
        # not only if it hands batches now: it may have to, should another one be lost before the step is over
        shared = bool(self.joining.awaiting)
        before = pickle.dumps(random_states(self._device)) if shared else None
        try:
            fetched = Fetched(number, next(fetcher), False)
            fetched.done = fetcher.done
        except StopIteration:
            fetched = Fetched(number, None, True)
        after = pickle.dumps(random_states(self._device)) if shared else None
        fetched.random = after if after != before else None
        if fetched.item is not None:
            self._batches.fetched(self._trainer, self._trainer.fit_loop.batch_idx + 1, fetched.item[1])
        return fetched

    def _given(self, number: int) -> Fetched | None:
        """A batch that this rank does not get from its own loader."""
        newcomer = self._newcomer
        if newcomer is None:
            return None
        if newcomer.joins:
            try:
                return newcomer.first()
            except TooLate:
                raise fetching.leave_fit() from None
        if self._runtime.slot not in self.joining.awaiting:
            return None
        batch_idx = self._trainer.fit_loop.batch_idx + 1
        drawn = self._batches.number(self._trainer, batch_idx)
        fetched = newcomer.handed(number, drawn, self.joining, self._recover)
        fetched.done = fetched.done or batch_idx + 1 >= self._trainer.num_training_batches
        return fetched

    def _recover(self, error: Interrupted) -> None:
        self._survival.agree(error)
        self._survival.complete()

    def _by_number(self, drawn: int) -> Any:
        """This replica's batch by its number in the loader's pass, without its dataloader."""
        assert self._newcomer is not None
        replica = self._newcomer.replica
        found = self._batches.own(self._trainer, drawn, replica)
        if found is None:
            why = (
                f"nobody is left in replica {replica} whose dataloader is in position, and its batches cannot be"
                f" fetched by number: {self._batches.shared(self._trainer).why_not}"
            )
            if self._runtime.generation.topology.live_replicas != (replica,):
                self._survival.leave(why)  # the replica is lost, as it would be without newcomers
            raise RuntimeError(why)
        return found

    # ---- what all ranks have in common --------------------------------------------------------------------------

    def _common(self) -> dict[str, Any]:
        evaluation = self._survival.evaluation
        assert evaluation is not None
        return {
            "operations": self._survival.operations.completed,
            "loops": evaluation.begun,
            "batches": self._batches.known(),
            "first steps": self._first_steps.known(),
            "verification": self._verification.known(),
            "awaiting": sorted(self.joining.awaiting),
            "validates": self._trainer.val_dataloaders is not None,
        }

    def _take_common(self, common: dict[str, Any], joined: Iterable[int]) -> None:
        evaluation = self._survival.evaluation
        assert evaluation is not None
        if self._runtime.joining:
            fetching.set_up_validation(self._trainer, common["validates"])
            fetching.set_sampler_epoch(self._trainer)  # samples of replicas that are gone are dealt by it
        self._survival.operations.stand_at(common["operations"])
        evaluation.begun = common["loops"]
        self._batches.know(common["batches"], self._trainer)
        self._first_steps.know(common["first steps"])
        self._verification.know(common["verification"])
        self.joining.awaiting = {*common["awaiting"], *joined}
