"""The committed steps since the oldest copy that neighbours keep: what must be done again when the job goes back to it.

Only parameters and what is cut like them go back. Everything else (loops, loaders, loggers, callbacks, schedulers)
stays where it is: it has seen those steps already, and sees nothing of their second run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_ntp.lightning import private
from lightning_ntp.lightning.buffer_copies import BufferSlot
from lightning_ntp.lightning.manual_state import OptimizerSettings
from lightning_ntp.lightning.snapshot import Restore, SnapshotRecorder
from lightning_ntp.lightning.window import Window


@dataclass(eq=False)
class Past:
    """A committed step.

    Args:
        window: Its micro-batches.
        run: Runs the last of them and the update; in manual optimization the training step.
        number: The steps that were committed before it.
        restore: Puts back progress and the optimizers' settings of its start.
    """

    window: Window
    run: Callable[[], Any]
    number: int
    restore: Restore


class History:
    """Keeps committed steps, and the state of now while they are done again.

    Args:
        trainer: The trainer.
        recorder: Takes snapshots of what steps change.
        oldest: Gives the step of the oldest copy; None if there is none.
        device: The rank's, where batches are while a step runs.
    """

    def __init__(
        self,
        trainer: Trainer,
        recorder: SnapshotRecorder,
        oldest: Callable[[], int | None],
        device: torch.device,
    ) -> None:
        self._trainer, self._recorder, self._oldest, self._device = trainer, recorder, oldest, device
        self._steps: list[Past] = []
        self._began: Restore = lambda: None
        self._known: tuple[Any, ...] | None = None

    def begin(self) -> str:
        """A step begins: remember what it finds.

        Returns:
            Why the steps before it cannot be done again; empty if they can.
        """
        settings = OptimizerSettings(self._trainer.optimizers, self._schedulers())
        progress = private.remember_loops(self._trainer)

        def restore() -> None:
            settings.restore()
            progress()

        self._began = restore
        known, self._known = self._known, self._look()
        if known is None or known == self._known:
            return ""
        if known[:-1] != self._known[:-1]:
            return "parameters were frozen or unfrozen, or an optimizer was given others, between two steps"
        return "parameters were changed outside of the optimizers, between two steps"

    def commit(self, window: Window, run: Callable[[], Any] | None, committed: int) -> None:
        """A step is done."""
        if run is None:
            raise RuntimeError("a step was committed that cannot be run again: this should be impossible")
        self._steps.append(Past(window, run, committed - 1, self._began))
        if self._device.type != "cpu":
            for closure in window.closures:
                closure.move_batch(torch.device("cpu"))  # there may be many
        self.forget_old()

    def forget_old(self) -> None:
        """Drop what no copy needs any more."""
        oldest = self._oldest()
        self._steps = [] if oldest is None else [past for past in self._steps if past.number >= oldest]

    def settle(self) -> None:
        """Parameters are as a step has left them, or as a change has moved them."""
        self._known = self._look()

    def note_changing(self) -> None:
        """Before anything moves: find the buffers that the steps change."""
        entries = [entry for past in self._steps for entry in past.window.entries]
        if not entries:
            return
        first = entries[0].snapshot.buffers
        changing: set[BufferSlot] = first.changed()
        for entry in entries[1:]:
            changing |= first.differing(entry.snapshot.buffers)
        for past in self._steps:
            past.window.changing |= changing

    def since(self, step: int) -> list[Past]:
        """The steps after ``step`` committed ones.

        Raises:
            RuntimeError: If one of them was not kept.
        """
        found = [past for past in self._steps if past.number >= step]
        if [past.number for past in found] != list(range(step, step + len(found))):
            raise RuntimeError(f"the steps after {step} were not all kept: this should be impossible, please report it")
        return found

    @contextmanager
    def as_then(self, evaluating: private.EvaluationLoop | None) -> Iterator[None]:
        """While past steps are done again: training goes on as it did, and afterwards all is as it is now.

        Args:
            evaluating: The evaluation loop that is running, if any.
        """
        trainer = self._trainer
        module, changing = trainer.lightning_module, self._steps[0].window.changing if self._steps else set()
        modes = [(each, each.training) for each in module.modules()]
        stage = private.enter_training_stage(trainer)
        if evaluating is not None:
            private.back_to_training_mode(evaluating)
        with torch.inference_mode(False), torch.enable_grad():
            now = self._recorder.take()
            progress = private.remember_loops(trainer)
            settings = OptimizerSettings(trainer.optimizers, self._schedulers())
            try:
                yield
            finally:
                now.restore_attributes()
                now.restore_around(changing)
                settings.restore()
                progress()
                stage()
                for each, training in modes:
                    each.training = training

    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self._trainer.lr_scheduler_configs]

    def _look(self) -> tuple[Any, ...]:
        """What only steps and recoveries may change: equal as long as nothing else has."""
        groups = tuple(
            (id(o), tuple(len(group["params"]) for group in o.param_groups)) for o in self._trainer.optimizers
        )
        parameters: list[nn.Parameter] = self._recorder.parameters
        flags = tuple(p.requires_grad for p in parameters)
        return groups, flags, tuple(p._version for p in parameters)
