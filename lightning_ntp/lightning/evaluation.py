"""Every batch of validation, test and predict as a transaction of its replica (DESIGN section 7).

Replicas evaluate by themselves, so after a loss each must know what it has finished. The ranks of a replica vote before
every batch and after the last one. Who passes the vote on batch k knows that all of them have done batch k - 1, so they
are never further apart than that vote: some may still be in batch k while others wait in the vote on k + 1. If any is,
all go back to the start of batch k; if none is, none does.

A replica that is gone takes its share of the results with it. Then every rank begins the loop again, and the samples of
the lost replica are dealt to the others (:mod:`lightning_ntp.lightning.shared_evaluation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer

from lightning_ntp.comm import Generation, Interrupted
from lightning_ntp.engine import Operations, Outcome
from lightning_ntp.launch import progress
from lightning_ntp.launch.progress import Tag
from lightning_ntp.lightning import private
from lightning_ntp.lightning.private import EvaluationLoop
from lightning_ntp.lightning.steps.attempts import Failure, attempt
from lightning_ntp.lightning.steps.deferred_rows import DeferredRows
from lightning_ntp.lightning.steps.snapshot import Restore, Snapshot, SnapshotRecorder

_LOOP = 10**9
"""More than the votes of one loop: a loop begins at a multiple of it, so that survivors of all replicas can compare."""


class Recovers(Protocol):
    """How survivors find together again."""

    def agree(self, error: Interrupted) -> Outcome: ...

    def complete(self) -> None: ...

    @property
    def records(self) -> Mapping[int, Mapping[str, Any]]:
        """What every survivor of the last change had brought, by slot."""


class RestartLoop(BaseException):
    """A replica was lost in the middle of a loop: it begins again. No ``except Exception`` in between may hold it."""


class Evaluation:
    """Runs the batches of a trainer's evaluation loops.

    Args:
        trainer: The trainer.
        recovery: How survivors find together again.
        operations: The collectives that a batch may contain.
        generation: Gives the current generation.
        vote: A collective of this rank's replica. Who returns from it knows that all its ranks have entered it.
        wait: An operation that waits for all ranks.
        complete_batch: Gives the batch to evaluate in place of one: with its part of lost replicas' samples.
        rows: Holds back what a batch logs until it is done.
        remember: Remembers the caller's own state that a batch changes; returns the function that puts it back.
        device: Whose random state counts, besides the CPU's.
    """

    def __init__(
        self,
        trainer: Trainer,
        recovery: Recovers,
        operations: Operations,
        generation: Callable[[], Generation],
        vote: Callable[[], None],
        wait: Callable[[], None],
        complete_batch: Callable[[EvaluationLoop, Any, int, int], Any],
        rows: DeferredRows,
        remember: Callable[[], Restore],
        device: torch.device,
    ) -> None:
        self._trainer, self._recovery, self._operations, self._generation = trainer, recovery, operations, generation
        self._vote, self._wait, self._complete_batch, self._rows = vote, wait, complete_batch, rows
        rows.hold_while(lambda: self._snapshot is not None)
        self._recorder = SnapshotRecorder(trainer, device, [rows.remember, remember, self._remember_loop])
        self._undo: list[Callable[[], None]] = []
        self._loop: EvaluationLoop | None = None
        self._replicas: tuple[int, ...] = ()
        self._start: Snapshot | None = None
        """Where the running loop begins, once its data are set up."""
        self.begun = 0
        """How many loops this rank has begun in the job."""
        self._passed = 0
        self._inside = False
        self._computed = False
        """The results of the running loop are there: hooks hear of them, and may save checkpoints."""
        self._step: Callable[[], None] | None = None
        self._snapshot: Snapshot | None = None
        self.replays = 0
        """How often a batch or a loop was begun again."""

    def install(self) -> None:
        """Take over the evaluation loops."""
        for loop in private.evaluation_loops(self._trainer):
            self._undo.append(
                private.patch_evaluation(
                    loop,
                    partial(self._run, loop),
                    partial(self._set_up, loop),
                    partial(self._run_batch, loop),
                    self._end,
                    self._have_results,
                )
            )

    def uninstall(self) -> None:
        """Give the loops back to Lightning."""
        while self._undo:
            self._undo.pop()()

    @property
    def running(self) -> EvaluationLoop | None:
        """The loop that is running."""
        return self._loop

    def record(self) -> dict[str, Any]:
        """What other survivors must know."""
        return {
            "loops": self.begun,
            "looping": self._loop is not None and not self._computed,
            "passed": self._passed,
            "inside": self._inside,
        }

    def check_whole(self) -> None:
        """After a change: can the running loop go on?

        Raises:
            RestartLoop: If a replica is gone, and nobody has computed the results of the loop with it.
        """
        if self._start is None or self._replicas == self._generation().topology.live_replicas:
            return
        # metrics are computed together: what one rank has, the others have or will get from it
        others = [each["evaluation"] for each in self._recovery.records.values()]
        if not any(o["loops"] > self.begun or o["loops"] == self.begun and not o["looping"] for o in others):
            self._operations.settle()
            raise RestartLoop

    # ---- the loop ---------------------------------------------------------------------------------------------

    def _run(self, loop: EvaluationLoop, run: Callable[[], Any]) -> Any:
        self._loop, self.begun = loop, self.begun + 1
        self._recorder.look_around()
        before = progress.current().tag
        try:
            while True:
                self._replicas = self._generation().topology.live_replicas
                self._passed, self._inside, self._computed = self.begun * _LOOP, False, False
                progress.current().back_to(Tag.EVALUATION_START)
                try:
                    result = run()
                    # who is done stays: it may hold what a slower replica loses, or have to begin again
                    self._wait()
                    progress.current().begin(before)
                    return result
                except RestartLoop:
                    pass
                # outside of the `except` block: the frames of the failed attempt are free
                self.replays += 1
                self._forget_batch()
                assert self._start is not None
                self._start.restore()
                private.back_to_training_mode(loop)
        finally:
            self._forget_batch()
            progress.current().back_to(before)
            self._loop, self._start, self._inside, self._computed = None, None, False, False

    def _set_up(self, loop: EvaluationLoop, set_up: Callable[[], None]) -> None:
        """The data of a loop. Once, however often it begins: that takes operations, and in the end one rank may have
        done all of them and another one not.
        """
        if loop is not self._loop:
            set_up()
        elif self._start is None:
            set_up()
            self._replicas = self._generation().topology.live_replicas
            self._start = self._recorder.take()

    def _run_batch(
        self,
        loop: EvaluationLoop,
        step: Callable[..., None],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
        dataloader_iter: Any,
    ) -> None:
        if dataloader_iter is not None:
            raise TypeError(
                f"the {self._trainer.state.stage} step takes a dataloader_iter: it must be given its batch, so that it"
                " can be evaluated again when a rank is lost; take (batch, batch_idx)"
            )
        progress.current().begin(Tag.EVALUATION)
        self._pass_vote(inside=True)
        self._snapshot = self._recorder.take()
        self._operations.enter()

        def evaluate() -> None:
            step(self._complete_batch(loop, batch, batch_idx, dataloader_idx), batch_idx, dataloader_idx, None)

        self._step = evaluate
        self._finish_batch()

    def _end(self) -> None:
        """All batches of a dataloader are done; what follows is for all replicas together."""
        if self._loop is not None:
            progress.current().begin(Tag.EVALUATION_END)
            self._pass_vote(inside=False)
            self._forget_batch()

    def _have_results(self) -> None:
        self._computed = True

    # ---- one batch --------------------------------------------------------------------------------------------

    def _finish_batch(self) -> None:
        """Evaluate the batch until it was not interrupted."""
        assert self._step is not None
        while True:
            _, failure = attempt(self._step)
            if failure is None:
                self._inside = False
                return
            self._recovery.agree(failure.error)
            self._go_back()
            self._recovery.complete()

    def _pass_vote(self, inside: bool) -> None:
        """Wait until all ranks of the replica have done the batch before.

        Args:
            inside: Whether another batch follows.
        """
        while True:
            _, failure = attempt(self._vote)
            if failure is None or self._passed_by_others(failure):
                break
        self._passed, self._inside = self._passed + 1, inside
        if failure is not None:
            self._recovery.complete()
        self._rows.write()

    def _passed_by_others(self, failure: Failure) -> bool:
        """Recover from an interruption in the vote, up to the move of shards if it has been passed: see the caller."""
        self._recovery.agree(failure.error)
        mates = self._mates()
        if any(int(mate["passed"]) > self._passed for mate in mates):
            return True
        if any(mate["inside"] and mate["passed"] == self._passed for mate in mates):
            # what follows may be interrupted too, and others must then know that we are back in that batch
            self._go_back()
            self._recovery.complete()
            self._finish_batch()
        else:
            self._recovery.complete()
        return False

    def _mates(self) -> list[Mapping[str, Any]]:
        generation = self._generation()
        slots = generation.topology.tensor_parallel_slots(generation.replica)
        return [self._recovery.records[slot]["evaluation"] for slot in slots if slot in self._recovery.records]

    def _go_back(self) -> None:
        """To the start of the batch, in the layout of then."""
        assert self._snapshot is not None
        self.replays += 1
        self._inside = True
        self._snapshot.restore()
        self._operations.rewind()

    def _forget_batch(self) -> None:
        self._step = self._snapshot = None
        self._operations.leave()

    def _remember_loop(self) -> Restore:
        assert self._loop is not None
        return private.remember_evaluation(self._loop)
