"""What the strategy does so that a run survives the loss of a rank.

Puts together the transactions of steps and of evaluation batches, the recovery engine (agree, rebuild, reshard) and
what the Trainer's world must learn of a change: rank zero, loggers, events, hooks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lightning_ntp import engine
from lightning_ntp.comm import Interrupted, JobLost, Runtime, runtime
from lightning_ntp.comm.membership import RAISED
from lightning_ntp.launch import RankIdentity, is_rank, jobs, progress
from lightning_ntp.launch.report import describe, report
from lightning_ntp.lightning.checkpoint_io import newest_checkpoint
from lightning_ntp.lightning.evaluation import Evaluation
from lightning_ntp.lightning.rank_zero import hand_over_rank_zero, remember_rows, take_over_rank_zero
from lightning_ntp.lightning.sample_shares import SampleShares
from lightning_ntp.lightning.steps.deferred_rows import DeferredRows
from lightning_ntp.lightning.steps.transaction import Transaction
from lightning_ntp.plan.policy import RecoveryPolicy

log = logging.getLogger("lightning_ntp")


class OutOfMemoryAfterShrink(RuntimeError):
    """A replica's shards have become too large for its devices."""

    __plain_reason__ = True  # no bug: the supervisor prints the message alone


class NotRepeated(RuntimeError):
    """A rank was lost while a hook between steps waited for it."""

    __plain_reason__ = True  # no bug: the supervisor prints the message alone


def _users_place(error: BaseException) -> str:
    """Where in the user's own code an exception has come from, for people."""
    ours = {Path(lightning.__file__).parent, Path(torch.__file__).parent, Path(__file__).parents[1]}
    place, hook = "code", False
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        foreign = not ours & {*Path(code.co_filename).parents}
        if foreign and hook:
            place = f"{getattr(code, 'co_qualname', code.co_name)} ({Path(code.co_filename).name}:{line})"
        hook = Path(lightning.__file__).parent in Path(code.co_filename).parents
    return place


class Survival:
    """The recovery of a rank, through all runs of the trainers in its script. Use :func:`survival_of`.

    Args:
        current: The rank's runtime.

    Attributes:
        operations: Repeats collectives between steps.
        rows: Holds back what is logged until it is certain.
        transaction: Of the running fit; None in other runs.
        evaluation: Of the running trainer.
    """

    def __init__(self, current: Runtime) -> None:
        self._runtime = current
        self.engine = engine.RecoveryEngine(current, self._changed)
        self.operations = engine.Operations(self)
        self.engine.describe, self.engine.heed = self._record, self._heed
        self.rows = DeferredRows()
        self.transaction: Transaction | None = None
        self.evaluation: Evaluation | None = None
        self._trainer: Trainer | None = None
        self._follow: Callable[[], None] = lambda: None
        self._loaded: Callable[[], int] = lambda: -1
        self._callbacks: list[Any] = []
        self._loggers: list[Logger] = []
        self._events: engine.EventLog | None = None
        self._replaying_since: float | None = None
        self._loops = 0
        self.can_replay: Callable[[], bool] = lambda: False
        """Whether this rank could give the open step from its beginning to somebody who joins in its replay."""
        self.renew: Callable[[int], None] = lambda committed: None
        """Called when a change is complete, with the committed steps: makes new copies for neighbours."""
        self.shares: SampleShares | None = None
        """Of the running fit."""
        self._forwards = False
        """The change that is under way found this rank in the vote on a step that others had committed."""

    def begin(
        self, trainer: Trainer, policy: RecoveryPolicy, follow: Callable[[], None], loaded: Callable[[], int]
    ) -> None:
        """A run begins: from now on a rank that is lost interrupts the others, and they go on.

        Args:
            trainer: The running trainer.
            policy: What the user allows.
            follow: Lets the strategy follow a change, before anybody else hears of it.
            loaded: At which step optimizer states were loaded from a checkpoint; -1 if they were not.
        """
        self.end()
        self._trainer, self._follow, self._loaded, self.engine.policy = trainer, follow, loaded, policy
        # a learning-rate finder replaces them while it runs
        self._callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
        self._loggers = list(trainer.loggers)
        self._events = None
        progress.current().forget_done()
        self._runtime.announce_recoverable()

    def install(self, evaluation: Evaluation, transaction: Transaction | None) -> None:
        """The model is cut: steps and batches are transactions from now on. Call it on all ranks."""
        assert self._trainer is not None
        trainer = self._trainer
        # log_dir is a collective
        directory = Path(trainer.log_dir or trainer.default_root_dir)
        self._events = engine.EventLog(directory / engine.FILE_NAME, self._runtime.slot, lambda: trainer.is_global_zero)
        progress.note_run_directory(directory)
        self._publish()
        remember_rows(trainer)
        self.rows.install(trainer.loggers)
        self.evaluation, self.transaction = evaluation, transaction
        evaluation.begun = self._loops
        evaluation.install()
        if transaction is not None:
            transaction.install()
            self._runtime.may_start = lambda group: transaction.check_may_communicate(f"a collective on {group}")

    def end(self) -> None:
        """The run is over. A rank that is lost after it still only interrupts the others."""
        self._runtime.may_start = lambda group: None
        progress.current().back_to(progress.Tag.SETUP)
        if self.transaction is not None:
            self.transaction.uninstall()
        if self.evaluation is not None:
            self.evaluation.uninstall()
            self._loops = self.evaluation.begun
        self.transaction = self.evaluation = None
        self.renew = lambda committed: None
        self.can_replay = lambda: False
        self.shares = None
        self.rows.uninstall()

    def judge(self, error: BaseException) -> BaseException:
        """Whose fault is an exception in this rank?

        Returns:
            What to raise for it. Not if it is this rank's alone: then the rank leaves and the others go on.
        """
        if not isinstance(error, Exception):
            return error
        # else the others would take its leave for the end of the script
        lost = isinstance(error, JobLost)  # which the others find out by themselves, and say more of
        self._runtime.farewell = "cannot go on" if lost else f"{RAISED}{type(error).__name__}"
        if self._runtime.joining:
            if self._runtime.membership.is_member:  # the others count on it since a moment ago
                self._give_up(error)
            return error
        if isinstance(error, Interrupted):
            return self._not_repeated(error)
        topology, slot = self._runtime.generation.topology, self._runtime.slot
        replica = self._runtime.generation.replica
        degree, at_launch = topology.degrees[replica], self._runtime.launched.degrees[replica]
        if isinstance(error, MemoryError | torch.OutOfMemoryError) and degree < at_launch:
            return OutOfMemoryAfterShrink(
                f"slot {slot} ran out of memory at tensor-parallel degree {degree}: replica {replica} was launched at"
                f" {at_launch}, and each of its ranks now holds {at_launch / degree:.2f} times as much of the model and"
                f" of its activations. Giving up this rank too would only make the others' shares larger. Start again"
                f" with smaller batches, activation checkpointing or min_tensor_parallel_size={degree + 1}"
                f" ({newest_checkpoint(self._trainer)})."
                f" It said: {str(error).splitlines()[0] if str(error) else repr(error)}"
            )
        found = describe(error)
        if not (found.echo or found.plain) and self._runtime.membership.stands_alone(
            found.signature, topology.tensor_parallel_slots(replica)
        ):
            self._give_up(error)
        return error

    def _give_up(self, error: BaseException) -> NoReturn:
        """An exception that is this rank's alone: it counts as its death."""
        report(error, alone=True)
        log.warning("slot %d has raised an exception that the others have not, and leaves the job", self._runtime.slot)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _not_repeated(self, error: Interrupted) -> NotRepeated:
        return NotRepeated(
            f"{self._runtime.membership.why_over()} while {_users_place(error)} called the model, or another"
            " collective, outside of steps and evaluation batches: nobody but you knows what to do again there. Give it"
            " to the strategy, on all ranks, and such a loss is survived: `result ="
            " self.trainer.strategy.repeat(lambda: self(batch))`, see docs/recovery.md"
            f" ({newest_checkpoint(self._trainer)})"
        )

    # ---- what the transaction asks for --------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        return self.engine.committed

    @committed.setter
    def committed(self, steps: int) -> None:
        self.engine.committed = steps
        if self._replaying_since is not None:
            seconds, self._replaying_since = time.monotonic() - self._replaying_since, None
            self.record("replay", step=steps - 1, seconds=seconds)

    @property
    def ready(self) -> bool:
        return self.engine.ready

    @ready.setter
    def ready(self, ready: bool) -> None:
        self.engine.ready = ready

    def agree(self, error: Interrupted) -> engine.Outcome:
        transaction = self.transaction
        if transaction is not None and transaction.history is not None:
            if not (transaction.open or transaction.redoing) and (why := transaction.history.meddled()):
                transaction.lose_way(why)
            transaction.history.note_changing()
        outcome: engine.Outcome = self._or_leave(lambda: self.engine.agree(error))
        self._forwards = outcome is engine.Outcome.FORWARD
        return outcome

    def complete(self) -> None:
        """See :meth:`RecoveryEngine.complete`.

        Raises:
            RestartLoop: If the running evaluation loop must begin again.
        """
        transaction = self.transaction
        gathers = transaction is not None and transaction.gathers
        if transaction is not None and gathers:
            transaction.drop_gathered()
        self._or_leave(self._complete)
        if transaction is not None and transaction.redoing:
            return
        if transaction is not None and gathers and not self.engine.over:
            transaction.gather_again(self.evaluation.running if self.evaluation is not None else None)
        if not self.engine.over:
            self.renew(self.engine.committed)
        if self.evaluation is not None:
            self.evaluation.check_whole()

    def _complete(self) -> None:
        steps, forbidden = self.engine.committed, None
        try:
            self.engine.complete()
        except engine.PolicyForbids as error:
            forbidden = error
        if self.engine.committed < steps:
            self._catch_up(steps)
        if self.transaction is not None and self.transaction.history is not None:
            self.transaction.history.settle()
        if forbidden is not None:
            raise forbidden

    def _catch_up(self, steps: int) -> None:
        """The job went back to the neighbours' copies: do the steps since then again."""
        assert self.transaction is not None and self._trainer is not None
        first, began = self.engine.committed, time.monotonic()
        self.transaction.catch_up(steps, self.evaluation.running if self.evaluation is not None else None)
        seconds = time.monotonic() - began
        self.record("caught_up", step=steps, steps=steps - first, seconds=seconds)
        if self._trainer.is_global_zero:
            log.warning(
                "step%s done again in %.1f s; the job goes on where it was",
                f" {first} was" if steps == first + 1 else f"s {first} to {steps - 1} were",
                seconds,
            )

    @property
    def records(self) -> Mapping[int, Mapping[str, Any]]:
        """What every survivor of the last change had brought, by slot."""
        return self.engine.records

    def _record(self) -> dict[str, Any]:
        idle = {"loops": self._loops, "looping": False, "passed": 0, "inside": False}
        evaluation = self.evaluation.record() if self.evaluation is not None else idle
        operations = self.operations.record()
        progress = int(operations["operation"]) + int(evaluation["passed"])
        return {
            **operations,
            "evaluation": evaluation,
            "progress": progress,
            "loaded": self._loaded(),
            "open": self.transaction is not None and self.transaction.inside and self.can_replay(),
            "standby": self._runtime.membership.roster.standby,
            **(self.shares.record() if self.shares is not None else {}),
        }

    def _heed(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        if self.shares is not None:
            self.shares.heed(records)

    def record(self, event: str, **details: Any) -> None:
        """Append an event to the run's file, if this rank is the one that writes."""
        if self._events is not None:
            self._events.write(event, **details)

    def _or_leave(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except engine.Released as error:
            self._runtime.membership.announce_released(str(error))
            self.leave(str(error))
        except engine.PolicyForbids as error:
            raise JobLost(f"{error}; a checkpoint of the last complete step is at {self._save()}") from None
        except JobLost as error:
            raise JobLost(f"{error} ({newest_checkpoint(self._trainer)})") from None

    def leave(self, reason: str) -> NoReturn:
        """Leave the job for good. The others go on; no callback of this rank may run any more.

        Raises:
            JobLost: If there are no others.
        """
        if self._runtime.generation.topology.slots == (self._runtime.slot,):
            why = f"slot {self._runtime.slot}, the last rank, was told to leave: {reason}"
            raise JobLost(f"{why} ({newest_checkpoint(self._trainer)})")
        log.warning("slot %d leaves the job: %s", self._runtime.slot, reason)
        runtime.shutdown(reason, others_go_on=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _save(self) -> Path:
        assert self._trainer is not None
        self.operations.settle()
        path = Path(self._trainer.default_root_dir) / f"ntp-step-{self.committed}.ckpt"
        self._trainer.save_checkpoint(path, weights_only=False)
        return path

    def _publish(self) -> None:
        """Let `lightning-ntp status` know who works where."""
        directory = RankIdentity.from_environ().job_dir if is_rank() else None
        generation = self._runtime.generation
        if directory is None or generation.rank or self._runtime.joining:
            return
        with contextlib.suppress(OSError):
            replicas = [dict(replica) for replica in generation.topology.replicas]
            jobs.write_whole(jobs.layout_note(directory), json.dumps({"replicas": replicas}))

    def _changed(self, change: engine.Change) -> None:
        """The members have changed and the shards have moved: everything that knew the old generation follows."""
        trainer = self._trainer
        assert trainer is not None
        was_zero = change.before.slots[0] == self._runtime.slot
        self._follow()
        self._publish()
        if was_zero and not trainer.is_global_zero:
            hand_over_rank_zero(trainer)
        if trainer.is_global_zero and not was_zero:
            # at once: Lightning's next look at a logger would begin its file anew
            take_over_rank_zero(trainer, self._loggers, running=self._events is not None)
        if self._events is not None:
            self._events.write_change(change)
            if self._forwards:
                self._events.write("forward", step=change.step - 1)
        if trainer.is_global_zero:
            stage = trainer.state.stage
            evaluates = self.transaction is None and stage is not None
            log.warning(engine.describe(change, stage.value if evaluates and stage is not None else ""))
            gone = [r for r in change.before.live_replicas if r not in change.after.live_replicas]
            if gone and self.transaction is not None:
                log.warning("metrics of this epoch that only replica %s had accumulated are partial", gone)
        added = [each for each in trainer.callbacks if each not in self._callbacks]  # type: ignore[attr-defined]
        for listener in (trainer.lightning_module, *self._callbacks, *added):
            hook = getattr(listener, "on_topology_change", None)
            if hook is not None:
                hook(change)
        if self.transaction is not None and self.transaction.open and not change.planned:
            self._replaying_since = time.monotonic()


_current: Survival | None = None


def survival_of(current: Runtime) -> Survival:
    """The recovery of a runtime: one, whatever trainers come and go."""
    global _current
    if _current is None or _current._runtime is not current:
        _current = Survival(current)
    return _current
