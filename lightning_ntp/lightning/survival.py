"""What the strategy does so that a fit survives the loss of a rank.

Puts together the transaction (a step is replayed or finished), the recovery engine (agree, rebuild, reshard) and what
the Trainer's world must learn of a change: rank zero, loggers, events, hooks.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Trainer

from lightning_ntp import engine
from lightning_ntp.comm import Interrupted, JobLost, Runtime, ShardedState, runtime
from lightning_ntp.lightning.rank_zero import remember_rows, take_over_rank_zero
from lightning_ntp.lightning.snapshot import Restore
from lightning_ntp.lightning.transaction import Transaction
from lightning_ntp.parallel import ShardedModel
from lightning_ntp.plan.policy import RecoveryPolicy

log = logging.getLogger("lightning_ntp")

EVENTS_FILE = "events.jsonl"


class Survival:
    """The recovery of one run of the trainer.

    Args:
        trainer: The running trainer.
        current: The rank's runtime.
        model: The cut model.
        policy: What the user allows.
        operations: Repeats collectives between steps; its state is part of what survivors tell each other.
        states: Gives the per-parameter states that move with the parameters.
        vote: The last collective of a step.
        remember: Remembers what a step changes in the strategy; returns the function that puts it back.
        follow: Lets the strategy follow a change, before anybody else hears of it.
    """

    def __init__(
        self,
        trainer: Trainer,
        current: Runtime,
        model: ShardedModel,
        policy: RecoveryPolicy,
        operations: engine.Operations,
        states: Callable[[], list[ShardedState]],
        vote: Callable[[], None],
        remember: Callable[[], Restore],
        follow: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._trainer, self._runtime, self._follow = trainer, current, follow
        self._replaying_since: float | None = None
        self.engine = engine.RecoveryEngine(current, model, states, policy, self._changed)
        self.engine.describe = operations.record
        self.transaction = Transaction(trainer, self, vote, remember, device)
        # log_dir is a collective
        directory = Path(trainer.log_dir or trainer.default_root_dir)
        self.events = engine.EventLog(directory / EVENTS_FILE, current.slot, lambda: trainer.is_global_zero)
        remember_rows(trainer)

    def install(self) -> None:
        self.transaction.install()
        self._runtime.may_start = lambda group: self.transaction.check_may_communicate(f"a collective on {group}")

    def uninstall(self) -> None:
        self._runtime.may_start = lambda group: None
        self.transaction.uninstall()

    # ---- what the transaction asks for --------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        return self.engine.committed

    @committed.setter
    def committed(self, steps: int) -> None:
        self.engine.committed = steps
        if self._replaying_since is not None:
            seconds, self._replaying_since = time.monotonic() - self._replaying_since, None
            self.events.write("replay", step=steps - 1, seconds=seconds)

    @property
    def ready(self) -> bool:
        return self.engine.ready

    @ready.setter
    def ready(self, ready: bool) -> None:
        self.engine.ready = ready

    def agree(self, error: Interrupted) -> engine.Outcome:
        outcome: engine.Outcome = self._or_leave(lambda: self.engine.agree(error))
        if outcome is engine.Outcome.FORWARD:
            self.events.write("forward", step=self.committed)
        return outcome

    def complete(self) -> None:
        self._or_leave(self.engine.complete)

    def _or_leave(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except engine.Released as error:
            self._leave(str(error))
        except engine.PolicyForbids as error:
            raise JobLost(f"{error}; a checkpoint of the last complete step is at {self._save()}") from None
        except JobLost as error:
            raise JobLost(f"{error} ({self._newest_checkpoint()})") from None

    def _leave(self, reason: str) -> NoReturn:
        """Leave the job for good. The others go on; no callback of this rank may run any more."""
        log.warning("slot %d leaves the job: %s", self._runtime.slot, reason)
        runtime.shutdown(reason, others_go_on=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _save(self) -> Path:
        path = Path(self._trainer.default_root_dir) / f"ntp-step-{self.committed}.ckpt"
        self._trainer.save_checkpoint(path, weights_only=False)
        return path

    def _newest_checkpoint(self) -> str:
        paths = [
            path
            for callback in self._trainer.checkpoint_callbacks
            for path in (getattr(callback, "last_model_path", ""), getattr(callback, "best_model_path", ""))
            if path and os.path.exists(path)
        ]
        if not paths:
            return "this run has saved none"
        return f"newest checkpoint: {max(paths, key=os.path.getmtime)}"

    def _changed(self, change: engine.Change) -> None:
        """The members have changed and the shards have moved: everything that knew the old generation follows."""
        trainer = self._trainer
        was_zero = change.before.slots[0] == self._runtime.slot
        self._follow()
        if trainer.is_global_zero and not was_zero:
            take_over_rank_zero(trainer)
        self.events.write_change(change)
        if trainer.is_global_zero:
            log.warning(engine.describe(change))
            gone = [r for r in change.before.live_replicas if r not in change.after.live_replicas]
            if gone:
                log.warning("metrics of this epoch that only replica %s had accumulated are partial", gone)
        for listener in (trainer.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
            hook = getattr(listener, "on_topology_change", None)
            if hook is not None:
                hook(change)
        if self.transaction.open:
            self._replaying_since = time.monotonic()
