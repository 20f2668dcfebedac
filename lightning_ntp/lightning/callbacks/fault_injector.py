"""Rehearse faults: kill, stop, hang, break or slow down a rank at a chosen place, in a step or outside."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_ntp.engine import Change
from lightning_ntp.launch import RankIdentity, is_rank
from lightning_ntp.lightning.callbacks.fault_schedule import (
    AFTER_FIT,
    KINDS,
    PHASES,
    STEP_PHASES,
    Draw,
    Fault,
    Kind,
    Phase,
    as_faults,
    check_among,
    check_seconds,
    draw_faults,
)
from lightning_ntp.lightning.callbacks.interrupted_update import InterruptedGroups


class InjectedFault(RuntimeError):
    """What a ``raise`` fault raises."""


class FaultInjector(Callback):
    """Lets faults happen, so that a user can rehearse them. Put it last among the callbacks.

    A fault happens once in a process, in the first step at or after its own that reaches its phase, and not again when
    that step is replayed. Faults of steps before the one that training starts at (from a checkpoint) never happen, but
    for those in test and predict.

    Args:
        faults: Which, at whom, where; mappings (from YAML) are taken too.
        mtbf: Mean time between random faults, in optimizer steps, of the job as it is launched; None for none. All
            ranks draw the same faults. Slots fail alike, so with fewer left faults are rarer. The last one is spared.
        seed: Of the random faults.
        kinds: Of the random faults.
        phases: Of the random faults; anywhere in a step by default.
        max_faults: The most random faults; None for any number.
        seconds: How long a random ``slow`` fault sleeps in each step.
        steps: How many steps in a row a random ``slow`` fault lasts.

    Example::

        callbacks:
          - class_path: lightning_ntp.callbacks.FaultInjector
            init_args:
              faults: [{kind: kill, slot: 2, step: 100, phase: backward}]

    Raises:
        ValueError: If a value is out of range.
    """

    ntp_own_attributes = (
        *("_slot", "_slots", "_waiting", "_over", "_slowing", "_draws", "_next_draw", "_drawn"),
        *("_hooks", "_step_hooks", "_trainer", "_calls_left"),
    )
    """A rank that joins waits for the faults of its own slot."""

    def __init__(
        self,
        faults: Sequence[Fault | Mapping[str, Any]] = (),
        mtbf: float | None = None,
        seed: int = 0,
        kinds: Sequence[Kind] = ("kill",),
        phases: Sequence[Phase] = STEP_PHASES,
        max_faults: int | None = None,
        seconds: float = 1.0,
        steps: int = 1,
    ) -> None:
        super().__init__()
        for name, chosen, known in (("kinds", kinds, KINDS), ("phases", phases, PHASES)):
            if isinstance(chosen, str) or not chosen:
                raise ValueError(f"{name}={chosen!r} must be a list with at least one of {', '.join(known)}")
            for each in chosen:
                check_among(f"an element of {name}", each, known)
        if mtbf is not None:
            check_seconds("mtbf", mtbf)
        if max_faults is not None and (
            isinstance(max_faults, bool) or not isinstance(max_faults, int) or max_faults < 0
        ):
            raise ValueError(f"max_faults={max_faults!r} must be an integer of at least 0, or None for any number")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r} must be an integer")
        Fault("slow", 0, 0, seconds=seconds, steps=steps)  # checks the two
        self.faults = as_faults(faults)
        self.mtbf, self.seed, self.max_faults = mtbf, seed, max_faults
        self.kinds, self.phases = tuple(kinds), tuple(phases)
        self.seconds, self.steps = seconds, steps
        self._slot, self._slots = 0, 1
        self._waiting: list[Fault] = []
        self._over: set[Fault] = set()
        """Of :attr:`faults`: those that have happened in this process."""
        self._slowing: dict[Fault, set[int]] = {}
        self._draws: Iterator[Draw] = iter(())
        self._next_draw: Draw | None = None
        self._drawn = 0
        self._hooks: list[RemovableHandle] = []
        self._step_hooks: list[RemovableHandle] = []
        self._trainer: Trainer | None = None
        self._calls_left = 0

    # ---- the schedule -----------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        self._slot, self._slots = trainer.global_rank, trainer.world_size
        if is_rank():
            identity = RankIdentity.from_environ()
            self._slot, self._slots = identity.slot, identity.world_size
        points = getattr(trainer.strategy, "fault_points", None)
        if points is not None:
            points.append(self._reach)
        self._slowing = {}
        self._arm(-1)

    def _check_slots(self) -> None:
        for fault in self.faults:
            if fault.slot >= self._slots:
                raise ValueError(f"the fault ({fault}) is for slot {fault.slot}, but there are {self._slots} slots")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_slots()

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_slots()

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_slots()

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._arm(trainer.global_step)

    def _arm(self, start: int) -> None:
        """Wait for the faults of a fit that starts at a step, and of what comes after the fit."""
        self._waiting = [
            fault
            for fault in self.faults
            if fault.slot == self._slot
            and fault not in self._over
            and (fault.step >= start or fault.phase in AFTER_FIT)
        ]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        start = trainer.global_step
        self._arm(start)
        if self.mtbf is not None:
            self._draws = draw_faults(self.mtbf, self.seed, self.kinds, self.phases)
            self._next_draw = next(each for each in self._draws if each.step >= start)
            self._drawn = 0
        for optimizer in trainer.optimizers:
            self._step_hooks += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._draw(trainer.global_step)
        if self._due("forward"):
            leaves = [m for m in pl_module.modules() if m is not pl_module and not any(m.children())]
            self._hooks += [leaf.register_forward_hook(self._in_forward) for leaf in leaves]
            self._calls_left = (len(leaves) + 1) // 2
        self._reach("data")

    def on_topology_change(self, change: Change) -> None:
        """A rank that joins is not to suffer what has befallen the one before it."""
        if self._trainer is None or self._slot in change.before.slots or self._slot not in change.after.slots:
            return
        now = self._trainer.global_step
        self._waiting = [fault for fault in self._waiting if fault.step > now or fault.phase in AFTER_FIT]
        while self._next_draw is not None and self._next_draw.step <= now:
            self._drawn += 1
            self._next_draw = next(self._draws)

    def _draw(self, step: int) -> None:
        """Take in the random faults up to ``step``."""
        while self._next_draw is not None and self._next_draw.step <= step:
            if self.max_faults is not None and self._drawn >= self.max_faults:
                self._next_draw = None
                return
            self._drawn += 1
            # among the slots at launch, whoever lives: ranks may learn of a loss on different sides of a step's start
            fault = self._next_draw.among(range(self._slots), self.seconds, self.steps)
            if fault.slot == self._slot:
                self._waiting.append(fault)
            self._next_draw = next(self._draws)

    # ---- the phases -------------------------------------------------------------------------------------------

    def _in_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        # once half of the layers are done; if they are not all used, or used again, then not quite
        self._calls_left -= 1
        if self._calls_left <= 0:
            self._reach("forward")

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._unhook()
        self._reach("forward")
        if self._due("backward"):
            # after accumulation rather than on the gradient: nothing of the graph may be held, shards change shape
            wanted = [p for p in pl_module.parameters() if p.requires_grad]
            middle = wanted[len(wanted) // 2]
            hook = middle.register_post_accumulate_grad_hook(self._in_backward)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _in_backward(self, parameter: Tensor) -> None:
        self._reach("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._unhook()
        self._reach("backward")
        if not self._has_points(trainer):
            self._reach("sync")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._has_points(trainer):
            return
        self._reach("sync")
        self._reach("vote")

    @staticmethod
    def _has_points(trainer: Trainer) -> bool:
        return hasattr(trainer.strategy, "fault_points")

    def _before_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        # torch calls this before the closure, which runs the whole step: the update itself comes after that
        if self._due("between_vote_and_update") or self._due("update"):
            returns = all(fault.kind == "slow" for fault in self._due("update"))
            between, update = partial(self._reach, "between_vote_and_update"), partial(self._reach, "update")
            InterruptedGroups(optimizer, between, update, split=not returns).install()

    def _after_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        InterruptedGroups.give_back(optimizer)
        self._reach("between_vote_and_update")
        self._reach("update")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._reach("batch_end")

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._reach("sanity" if trainer.sanity_checking else "validation_batch")

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._reach("validation_end")

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._has_points(trainer):
            self._reach("checkpoint")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("epoch_end")

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("fit_end")

    @override
    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._reach("test")

    @override
    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._reach("predict")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._unhook()
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.on_train_end(trainer, pl_module)
        points = getattr(trainer.strategy, "fault_points", [])
        if self._reach in points:
            points.remove(self._reach)
        self._trainer = None

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---- the faults -------------------------------------------------------------------------------------------

    def _step(self, phase: str) -> int:
        assert self._trainer is not None
        # at its end the step is counted already
        return self._trainer.global_step - (phase == "batch_end")

    def _due(self, phase: str) -> list[Fault]:
        if not self._waiting or self._trainer is None:
            return []
        step = self._step(phase)
        return [f for f in self._waiting if f.phase == phase and f.step <= step]

    def _reach(self, phase: str) -> None:
        """This rank is at ``phase`` of its step: what is due happens."""
        for fault in self._due(phase):
            step = self._step(phase)
            if fault.kind == "slow":
                slept = self._slowing.setdefault(fault, set())
                if step in slept:
                    continue  # this step is replayed
                slept.add(step)
                if len(slept) == fault.steps:
                    self._finish(fault)
            else:
                self._finish(fault)
            if fault.kind == "slow" or fault in self.faults or self._others_live():
                self._happen(fault, step)

    def _finish(self, fault: Fault) -> None:
        self._waiting.remove(fault)
        self._over.add(fault)

    def _others_live(self) -> bool:
        assert self._trainer is not None
        return self._trainer.world_size > 1

    def _happen(self, fault: Fault, step: int) -> None:
        # straight to the terminal: a killed process flushes nothing
        print(
            f"fault injector: slot {self._slot}, step {step}, {fault.phase}: {fault.kind}", file=sys.stderr, flush=True
        )
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "hang":
            while True:
                time.sleep(3600)
        elif fault.kind == "raise":
            raise InjectedFault(f"injected fault: {fault}")
        else:
            time.sleep(fault.seconds)
