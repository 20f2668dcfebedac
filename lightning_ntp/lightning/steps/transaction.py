"""One optimizer step as all or nothing: vote, replay and roll-forward (DESIGN section 7).

A collective that a membership change interrupts raises ``Interrupted``. Here it is caught, outside of the user's own
code as far as that is possible; the survivors recover; and the step runs again from its snapshot, as if nothing had
happened. Between the vote and the end of the update nothing communicates, so nobody is ever half-stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from torch.optim import Optimizer

from lightning_ntp.comm.interruption import Interrupted
from lightning_ntp.engine.recovery import Outcome
from lightning_ntp.launch import progress
from lightning_ntp.launch.progress import Tag
from lightning_ntp.lightning import private
from lightning_ntp.lightning.steps.attempts import Failure, Unwind, attempt
from lightning_ntp.lightning.steps.deferred_rows import DeferredRows
from lightning_ntp.lightning.steps.history import History, Past, as_then
from lightning_ntp.lightning.steps.manual_state import ManualState
from lightning_ntp.lightning.steps.registered_state import RegisteredState
from lightning_ntp.lightning.steps.snapshot import Restore, Snapshot, SnapshotRecorder
from lightning_ntp.lightning.steps.window import Entry, ReplayClosure, Window

T = TypeVar("T")


class Recovery(Protocol):
    """How the survivors find together again, and what they need to know of this rank for it."""

    committed: int
    """Steps that this rank has finished; counted by the transaction."""
    ready: bool
    """In the vote on the next one, with complete gradients; set by the transaction."""

    def agree(self, error: Interrupted) -> Outcome:
        """Agree on the members and on what becomes of this rank's open step.

        Called with the step's stack possibly still there (in the vote), so no layout may change here. Deaths during
        agreement are its own business: it does not raise ``Interrupted``.
        """

    def complete(self) -> None:
        """Rebuild the groups and reshard. Called without a graph or activations of the step.

        Parameters, buffers and optimizer state hold the values after ``committed`` steps. Gradients are None, but for
        those which a user accumulates across steps. Does not raise ``Interrupted`` either.
        """


class Transaction:
    """Makes every optimizer step of a fit a transaction; in manual optimization, every training step.

    State of a module or callback that nobody else can know of is put back by its own two methods, if it has them:
    ``ntp_snapshot() -> Any``, called at the beginning of every micro-batch, and ``ntp_restore(state)``.

    Args:
        trainer: The trainer, its module and optimizers set up.
        recovery: How survivors find together again.
        vote: The last collective of a step.
        rows: Holds back what a step logs until it is committed.
        remember: Remembers the caller's own state that a step changes; returns the function that puts it back.
        device: Whose random state counts, besides the CPU's.
    """

    def __init__(
        self,
        trainer: Trainer,
        recovery: Recovery,
        vote: Callable[[], None],
        rows: DeferredRows,
        remember: Callable[[], Restore] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._trainer, self._recovery, self._vote = trainer, recovery, vote
        self._window: Window | None = None
        self._rows = rows
        rows.hold_while(lambda: self.open)
        others = [self._rows.remember] if remember is None else [self._rows.remember, remember]
        self._device = device or torch.device("cpu")
        self._recorder = SnapshotRecorder(trainer, self._device, others)
        self._swallowed: Interrupted | None = None
        self._forward = False
        self._undo: list[Callable[[], None]] = []
        self.in_update = False
        """Between the vote and the end of the update: no collective may start."""
        self.registered: RegisteredState | None = None
        """State per parameter that optimizer steps change, besides the optimizers' own."""
        self.replays = 0
        """How often a step was begun again."""
        self.history: History | None = None
        """The steps that may have to be done again, where neighbours keep copies."""
        self.on_commit: list[Callable[[int, bool], None]] = []
        """Called after every step, with the number of steps, and whether gradients are being gathered for later ones;
        not for steps that are done again.
        """
        self.on_gradients: Callable[[Any], None] = lambda result: None
        """Called in every step once all gradients are synced, before hooks, clipping and the vote, with what the last
        micro-batch has returned; in manual optimization before the step begins, with None. May change the layout, and
        the membership may interrupt it.
        """
        self.on_micro_batch: Callable[[Any], None] = lambda result: None
        """Called after a micro-batch that others of its step follow, with what it has returned."""
        self.given: Callable[[bool], ClosureResult | None] = lambda last: None
        """What to return in place of a micro-batch, given whether it is the last of its step; None to make it."""
        self.before_manual_step: Callable[[], None] = lambda: None
        self.before_micro_batch: Callable[[], None] = lambda: None
        """Called before a micro-batch for the first time, and before what it may have to go back to is remembered."""
        self.on_replay: Callable[[int], None] = lambda position: None
        """Called in a replay before each micro-batch, with its number in the step, when its start is put back."""
        self.before_replay: Callable[[], None] = lambda: None
        """Called when all survivors are about to replay the step, in their new layout."""
        self._stepping = self._working = False
        self.lose_way: Callable[[str], None] = lambda why: None
        """Called when the steps so far cannot be done again."""
        self.redoing = False
        """Whether steps are done again that were committed before."""

    def keep_history(self, oldest: Callable[[], int | None]) -> None:
        """Keep committed steps from now on, as far as a copy needs them.

        Args:
            oldest: The step of the oldest copy; None if there is none.
        """
        self.history = History(self._trainer, self._recorder, oldest, self._device, self.registered)

    @property
    def open(self) -> bool:
        """Whether a step is under way."""
        return self._window is not None

    @property
    def inside(self) -> bool:
        """Whether a micro-batch or an update is under way: an interruption now is recovered from by replay. Between the
        micro-batches of a step are hooks, and validation perhaps, which go on as they do between steps.
        """
        return self._window is not None and (self._working or self._window.manual is not None)

    @property
    def at_start(self) -> bool:
        """Whether the next micro-batch is the first of a step."""
        return self._window is None or not self._window.entries

    @property
    def batch_idx(self) -> int:
        """The number in the epoch of the batch that is worked on: in a replay, not the trainer's newest."""
        window = self._window
        if window is None or window.position >= len(window.entries):
            return int(self._trainer.fit_loop.batch_idx)
        return window.entries[window.position].batch_idx

    def snapshot(self) -> Snapshot:
        """The state as it is now, for whoever tries something out inside of a step."""
        return self._recorder.take()

    def constant_buffers(self) -> frozenset[str]:
        """Names of large buffers that no step has changed."""
        return self._recorder.constant_buffers()

    def install(self) -> None:
        """Take over the steps of a fit."""
        trainer = self._trainer
        self._undo.append(private.patch_after_closure(trainer.precision_plugin, self._at_vote))
        if trainer.lightning_module.automatic_optimization:
            wrap = partial(ReplayClosure, run=self._run_closure, before_backward=self.before_backward)
            self._undo.append(private.patch_automatic_optimization(trainer, wrap, self._run_batch))
        else:
            for optimizer in trainer.optimizers:
                # not in `optimizer_step`: users may call the optimizer itself
                hook = optimizer.register_step_pre_hook(self._before_manual_update)
                self._undo.append(hook.remove)

    def uninstall(self) -> None:
        """Give the steps back to Lightning."""
        while self._undo:
            self._undo.pop()()
        self._window = self._swallowed = None
        self._forward = self._recovery.ready = self.in_update = False

    def check_may_communicate(self, what: str) -> None:
        """Called by whoever starts a collective.

        Raises:
            RuntimeError: Between the vote and the end of the update.
        """
        if self.in_update:
            raise RuntimeError(
                f"{what} was called between the vote on a step and the end of its update, where ranks may no longer"
                " wait for each other (one that dies there would leave some updated and others not). Communicate in"
                " on_before_optimizer_step or earlier, or after the optimizer's step; optimizers that communicate"
                " inside of step() are not supported"
            )

    # ---- entry points -----------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Called before every backward, and before anything sets gradients aside."""
        if self._window is not None:
            self._window.keep_gradients(self._recorder.parameters)

    def optimizer_step(self, run: Callable[[], T]) -> T:
        """Run ``Strategy.optimizer_step``.

        Args:
            run: The step itself, which may be called several times.
        """
        window = self._window
        if window is None:
            return run()
        if window.manual is not None:
            return self._manual_optimizer_step(run)
        before = window.position

        def once() -> T:
            # steps that are done again lie inside of the one that has lost a rank
            stepping, self._stepping = self._stepping, True
            try:
                with self._update_ends():
                    return run()
            finally:
                self._stepping = stepping

        def may_replay(failure: Failure) -> None:
            if window.position == before:
                raise Unwind(failure)  # the closure was called elsewhere: the caller must begin again

        result = self._until_done(window, once, before, may_replay)
        if self._recovery.ready:
            self._commit()
        return result

    def training_step(self, run: Callable[[], T]) -> T:
        """Run ``Strategy.training_step``: with manual optimization that is the whole transaction."""
        if self._trainer.lightning_module.automatic_optimization:
            return run()
        self.before_micro_batch()
        snapshot = self._recorder.take()  # first: it knows the parameters
        entry = Entry(None, snapshot, self._trainer.fit_loop.batch_idx)
        window = self._window = self._begin(Window([entry], manual=self._manual_state()))

        def once() -> T:
            self._swallowed = None
            if not self.redoing:
                self.before_manual_step()
                self.on_gradients(None)
            output = run()
            if self._swallowed is not None:
                raise self._swallowed  # the user's own `except` has caught it
            # always, and at the very end: users may communicate after their last update, or not update at all
            self._cast()
            return output

        window.run = once
        output = self._until_done(window, once, 0)
        if self._forward:
            output = recursive_detach(output)
        self._commit()
        return output

    # ---- automatic optimization -------------------------------------------------------------------------------

    @contextmanager
    def _work(self) -> Iterator[None]:
        working, self._working = self._working, True
        try:
            yield
        finally:
            self._working = working

    def _run_batch(self, optimize: Callable[[int, Closure], None], batch_idx: int, closure: ReplayClosure) -> None:
        """Around everything that happens in the last micro-batch of a window."""
        with self._work():
            self._run_last(optimize, batch_idx, closure)

    def _run_last(self, optimize: Callable[[int, Closure], None], batch_idx: int, closure: ReplayClosure) -> None:
        window = self._window_of(closure)
        before = window.position
        restore = private.remember_batch(self._trainer)
        replaying = False

        def once() -> None:
            nonlocal replaying
            if replaying:
                restore()
            replaying = True
            optimize(batch_idx, closure)
            if self._window is window:
                # the module's `optimizer_step` has not stepped: still the others must know that we got here
                self._cast()

        def may_replay(failure: Failure) -> None:
            if self._window is not window:
                raise failure.error  # after the commit

        window.run = once
        self._until_done(window, once, before, may_replay)
        if self._window is window:
            self._commit()

    def _run_closure(self, closure: ReplayClosure) -> ClosureResult:
        if self.in_update:
            names = ", ".join(sorted({type(o).__name__ for o in self._trainer.optimizers}))
            raise RuntimeError(
                f"the optimizer ({names}) called its closure again during the update: only optimizers that need one"
                " forward and backward per step can be trained here"
            )
        window = self._window_of(closure)
        position = window.position
        if position == len(window.entries):
            self.before_micro_batch()
            window.entries.append(Entry(closure, self._recorder.take(), self._trainer.fit_loop.batch_idx))
            replaying = False
        else:
            replaying = True

        def once() -> ClosureResult:
            nonlocal replaying
            result = None
            if replaying:
                self._restore(window, position)
            else:
                result = self.given(self._stepping)
            replaying = True
            if result is None:
                result = closure.rerun()
            if not self.redoing:
                (self.on_gradients if self._stepping else self.on_micro_batch)(result)
            return result

        with self._work():
            result = self._until_done(window, once, position)
        window.position = position + 1
        return result

    def _window_of(self, closure: ReplayClosure) -> Window:
        window = self._window
        if window is None or (closure.opens_window and closure not in window.closures):
            window = self._window = self._begin(Window())
        if closure not in window.closures:
            window.closures.append(closure)
            if self.history is not None or self._trainer.accumulate_grad_batches > 1:
                closure.progress = private.remember_loops(self._trainer)
        return window

    def _begin(self, window: Window) -> Window:
        """A step begins."""
        if self.history is not None:
            why = self.history.begin()
            if why:
                self.lose_way(why)
        return window

    def _at_vote(self) -> None:
        """Hooks, unscaling and clipping are done."""
        if self._window is not None and self._window.manual is None:
            self._cast()
            self.in_update = True

    @contextmanager
    def _update_ends(self) -> Iterator[None]:
        try:
            yield
        except Interrupted as error:
            if self.in_update:
                raise RuntimeError(
                    "a collective was interrupted between the vote on a step and the end of its update: parameters may"
                    " be half updated. An optimizer that communicates inside of step() is not supported"
                ) from error
            raise
        finally:
            self.in_update = False

    # ---- manual optimization ----------------------------------------------------------------------------------

    def _manual_state(self) -> ManualState:
        trainer = self._trainer
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        return ManualState(
            trainer.lightning_module, self._recorder.parameters, trainer.optimizers, schedulers, self.registered
        )

    def _before_manual_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._window is not None and self._window.manual is not None:
            self._window.manual.before_update(optimizer)

    def _manual_optimizer_step(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except Interrupted as error:
            self._swallowed = error
            # 2.6.6 starts the action in `_on_before_step` and stops it in `_on_after_step`, which is not called now
            private.stop_profiling(self._trainer, "optimizer_step")
            raise

    # ---- vote, replay, commit ---------------------------------------------------------------------------------

    def _cast(self) -> None:
        """The vote. Returns when the step is to be finished.

        Raises:
            Unwind: If it is to be replayed.
        """
        self._recovery.ready = True
        _, failure = attempt(self._vote)
        if failure is None:
            return
        # no unwinding before it is known what became of the step: the gradients may be needed
        if self._recovery.agree(failure.error) is Outcome.FORWARD:
            self._forward = True
            return
        self._recovery.ready = False
        failure.agreed = True
        raise Unwind(failure)

    def _until_done(
        self,
        window: Window,
        run: Callable[[], T],
        keep: int,
        may_replay: Callable[[Failure], None] = lambda failure: None,
    ) -> T:
        """Run until it was not interrupted.

        Args:
            window: The open window.
            run: What to run.
            keep: So many micro-batches of the window were done before; they run again first.
            may_replay: Raises if a failure is not to be recovered from here.
        """
        result, failure = attempt(run)
        while failure is not None:
            may_replay(failure)
            # outside of any `except`: there an exception's frames would keep the activations alive
            _, again = attempt(partial(self._roll_back, window, failure, keep))
            if again is None:
                result, again = attempt(run)
            failure = again
        assert result is not None or failure is None
        return result  # type: ignore[return-value]

    def _roll_back(self, window: Window, failure: Failure, keep: int) -> None:
        """Recover, and go back to the state before the micro-batch number ``keep``."""
        self.replays += 1
        self._recovery.ready = False
        recorder = self._recorder
        if not failure.agreed:
            outcome = self._recovery.agree(failure.error)
            if outcome is not Outcome.REPLAY:
                raise RuntimeError(f"the outcome {outcome} was agreed for a step that this rank did not vote on")
        manual = window.manual is not None
        window.drop_gradients(recorder.parameters, set() if manual else self._optimized())
        window.restore_start()
        window.position = 0
        self._recovery.complete()
        if not self.redoing:
            self.before_replay()
        for position in range(keep):
            entry = window.entries[position]
            assert entry.closure is not None
            self._restore(window, position)
            # as they ran before, and as ranks do that stand between micro-batches: see `gather_again`
            with private.without_sync(self._trainer):
                result = entry.closure.rerun()
            if not self.redoing:
                self.on_micro_batch(result)
            window.position = position + 1
        if manual:
            self._restore(window, 0)
            window.manual = self._manual_state()

    def _restore(self, window: Window, position: int) -> None:
        """Go back to the start of a micro-batch that is about to be replayed."""
        window.restore(position)
        if not self.redoing:
            self.on_replay(position)

    def _optimized(self) -> set[Any]:
        return {p for o in self._trainer.optimizers for group in o.param_groups for p in group["params"]}

    def _commit(self) -> None:
        window, forward = self._window, self._forward
        assert window is not None
        # manual optimization over several steps: of what is in the gradients nobody keeps a copy
        gathering = window.manual is not None and not window.manual.updated and self._has_gradients()
        self._recovery.committed += 1
        self._recovery.ready = self._forward = False
        self._window = None
        self._recorder.committed()
        if self.redoing:
            del window
        else:
            self._rows.write()
            if self.history is not None:
                self.history.commit(window, window.run, self._recovery.committed)
                self.history.settle()
                self._check_buffers()
            if forward:
                for closure in window.closures:
                    closure.let_go_of_graph()
            del window
        if forward:
            self._recovery.complete()
        elif not self.redoing:
            for listener in self.on_commit:
                listener(self._recovery.committed, gathering)

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._optimized())

    def _check_buffers(self) -> None:
        name = self._recorder.uncopied()
        if name:
            self.lose_way(f"the large buffer {name!r} has changed, after steps that had left it as it was")

    # ---- doing steps again ------------------------------------------------------------------------------------

    def catch_up(self, steps: int, evaluating: private.EvaluationLoop | None = None) -> None:
        """Do the steps again from ``committed`` up to ``steps``: parameters went back, nothing else did.

        Another loss on the way may take parameters back once more; then it begins again.

        Args:
            steps: The steps that were committed before.
            evaluating: The evaluation loop that is running, if any.
        """
        assert self.history is not None
        window, forward, self._forward = self._window, self._forward, False
        redoing, in_update, self.redoing, self.in_update = self.redoing, self.in_update, True, False
        ready, tag = self._recovery.ready, progress.current().tag
        try:
            with self.history.as_then(evaluating):
                for parameter in self._optimized():
                    parameter.grad = None
                while self._recovery.committed < steps:
                    self._redo(self.history.since(self._recovery.committed)[0])
        finally:
            self._window, self._forward, self.redoing, self.in_update = window, forward, redoing, in_update
            self._recovery.ready = ready
            progress.current().back_to(tag)
        self.history.settle()

    @property
    def gathers(self) -> bool:
        """Whether gradients of micro-batches are there that belong to a step under way, with none of them running."""
        return self._window is not None and not (self.inside or self.redoing)

    def drop_gathered(self) -> None:
        """A rank was lost between two micro-batches: their gradients are of the layout of then, and not synced yet."""
        assert self._window is not None
        self._window.note_changing()
        self._window.drop_gradients(self._recorder.parameters, self._optimized())

    def gather_again(self, evaluating: private.EvaluationLoop | None = None) -> None:
        """Run the micro-batches of this step again, in the layout of now. Ranks that were in one replay the same.

        Args:
            evaluating: The evaluation loop that is running, if any.
        """
        window = self._window
        assert window is not None
        results, tag = [closure.result for closure in window.closures], progress.current().tag

        def run() -> None:
            for position, entry in enumerate(window.entries):
                assert entry.closure is not None
                window.restore(position)
                entry.closure.progress()
                with private.without_sync(self._trainer):
                    entry.closure.rerun()
                window.position = position + 1

        self.redoing = window.past = True
        window.position = 0
        progress.current().begin(Tag.STEP)
        try:
            with as_then(self._trainer, self._recorder, window.changing, evaluating), self._work():
                self._until_done(window, run, 0)
        finally:
            self.redoing = window.past = False
            progress.current().back_to(tag)
            for closure, result in zip(window.closures, results, strict=True):
                closure.result = result

    def _redo(self, past: Past) -> None:
        window, manual = past.window, not self._trainer.lightning_module.automatic_optimization
        results = [closure.result for closure in window.closures]
        last = 0 if manual else len(window.entries) - 1

        def run() -> None:
            past.restore()
            for each in window.closures:
                each.move_batch(self._device)
            for position in range(last):
                window.restore(position)
                closure = window.entries[position].closure
                assert closure is not None
                closure.progress()
                closure.rerun()
                window.position = position + 1
            if manual:
                window.restore(0)
                window.manual = self._manual_state()
            else:
                window.closures[-1].progress()
            past.run()

        def may_replay(failure: Failure) -> None:
            if self._window is not window:
                raise failure.error  # after the commit

        progress.current().begin(Tag.STEP)
        progress.current().back_to(Tag.STEP)  # done again, it says nothing about how fast this rank is
        window.past, window.position, window.kept = True, 0, None
        self._window = window
        if not manual:  # there gradients may be gathered over several steps
            window.drop_gradients(self._recorder.parameters, self._optimized())
        try:
            with self._work():
                self._until_done(window, run, 0, may_replay)
            if self._window is window:
                self._commit()
        finally:
            window.past = False
            for closure, result in zip(window.closures, results, strict=True):
                closure.result = result
