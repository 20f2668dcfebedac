"""The committed steps since the oldest copy that neighbours keep: what must be done again when the job goes back to it.

Only parameters and what is cut like them go back. Everything else (loops, loaders, loggers, callbacks, schedulers)
stays where it is: it has seen those steps already, and sees nothing of their second run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_ntp.lightning import private
from lightning_ntp.lightning.steps.buffer_copies import BufferSlot
from lightning_ntp.lightning.steps.manual_state import OptimizerSettings
from lightning_ntp.lightning.steps.registered_state import RegisteredState
from lightning_ntp.lightning.steps.snapshot import Restore, SnapshotRecorder
from lightning_ntp.lightning.steps.window import Window


@dataclass(eq=False)
class Past:
    """A committed step.

    Args:
        window: Its micro-batches.
        run: Runs the last of them and the update; in manual optimization the training step.
        number: The steps that were committed before it.
        restore: Puts back progress, modes and the optimizers' settings of its start.
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
        registered: State per parameter besides the optimizers'; copies of it are kept too.
    """

    def __init__(
        self,
        trainer: Trainer,
        recorder: SnapshotRecorder,
        oldest: Callable[[], int | None],
        device: torch.device,
        registered: RegisteredState | None = None,
    ) -> None:
        self._trainer, self._recorder, self._oldest, self._device = trainer, recorder, oldest, device
        self._registered = registered
        self._steps: list[Past] = []
        self._began: Restore = lambda: None
        self._known: tuple[Any, ...] | None = None
        self._values = ParameterValues()
        self._modes: Modes = ((), ())

    def begin(self) -> str:
        """A step begins: remember what it finds.

        Returns:
            Why the steps before it cannot be done again; empty if they can.
        """
        settings = OptimizerSettings(self._trainer.optimizers, self._schedulers())
        progress, modes = private.remember_loops(self._trainer), self._remember_modes()

        def restore() -> None:
            settings.restore()
            progress()
            modes()

        self._began = restore
        return self.meddled()

    def meddled(self) -> str:
        """Between two steps: has anything but steps and recoveries changed what only they may change?

        Returns:
            Why the steps before cannot be done again; empty if they can. It is said once.
        """
        if self._known is None:
            return ""
        before, known = self._known, self._look()
        self._known = known
        if before[:-2] != known[:-2]:
            return (
                "parameters were frozen or unfrozen, an optimizer was given others, or state was registered, between"
                " two steps"
            )
        if before != known:
            return "parameters were changed outside of the optimizers, between two steps"
        return ""

    def commit(self, window: Window, run: Callable[[], Any] | None, committed: int) -> None:
        """A step is done."""
        if run is None:
            raise RuntimeError("a step was committed that cannot be run again: this should be impossible")
        window.kept = None  # gradients of another step
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
        self._values.forget()
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

    def as_then(self, evaluating: private.EvaluationLoop | None) -> AbstractContextManager[None]:
        """While past steps are done again: see :func:`as_then`."""
        changing = self._steps[0].window.changing if self._steps else set()
        return as_then(self._trainer, self._recorder, changing, evaluating)

    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self._trainer.lr_scheduler_configs]

    def _look(self) -> tuple[Any, ...]:
        """What only steps and recoveries may change: equal as long as nothing else has."""
        groups = tuple(
            (id(o), tuple(len(group["params"]) for group in o.param_groups)) for o in self._trainer.optimizers
        )
        states = tuple(map(id, self._registered or ()))
        parameters = self._parameters()
        flags = tuple(p.requires_grad for p in parameters)
        return groups, states, flags, tuple(p._version for p in parameters), self._values.look(parameters)

    def _parameters(self) -> list[nn.Parameter]:
        # the recorder looks around in the first step only
        return self._recorder.parameters or list(self._trainer.lightning_module.parameters())

    def _remember_modes(self) -> Restore:
        """Which modules train (frozen statistics do not), and which parameters."""
        modules = self._recorder.modules or list(self._trainer.lightning_module.modules())
        modes, flags, restore = remember_modes(modules, self._parameters(), self._modes)
        self._modes = (modes, flags)
        return restore


Modes = tuple[tuple[bool, ...], tuple[bool, ...]]


def remember_modes(
    modules: list[nn.Module], parameters: list[nn.Parameter], known: Modes = ((), ())
) -> tuple[tuple[bool, ...], tuple[bool, ...], Restore]:
    """Which modules train, and which parameters.

    Args:
        modules: All modules.
        parameters: All parameters.
        known: What may be the same, to keep one for many steps.
    """
    modes, flags = tuple(m.training for m in modules), tuple(p.requires_grad for p in parameters)
    if (modes, flags) == known:
        modes, flags = known

    def restore() -> None:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad = flag

    return modes, flags, restore


@contextmanager
def as_then(
    trainer: Trainer,
    recorder: SnapshotRecorder,
    changing: set[BufferSlot],
    evaluating: private.EvaluationLoop | None,
) -> Iterator[None]:
    """While something is done again: training goes on as it did then, and afterwards all is as it is now.

    Args:
        trainer: The trainer.
        recorder: Takes snapshots of what steps change.
        changing: The buffers that are put back.
        evaluating: The evaluation loop that is running, if any.
    """
    module = trainer.lightning_module
    _, _, modes = remember_modes(recorder.modules or [*module.modules()], recorder.parameters or [*module.parameters()])
    stage = private.enter_training_stage(trainer)
    if evaluating is not None:
        private.back_to_training_mode(evaluating)
    with torch.inference_mode(False), torch.enable_grad():
        now = recorder.take()
        progress = private.remember_loops(trainer)
        settings = OptimizerSettings(trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs])
        try:
            yield
        finally:
            now.restore_attributes()
            now.restore_around(changing)
            settings.restore()
            progress()
            stage()
            modes()


class ParameterValues:
    """Tells whether the values of parameters are others than before.

    Versions do not: nobody counts changes that are made through ``parameter.data``, as weight clipping often is. Of
    large parameters some elements are looked at, evenly spread.
    """

    def __init__(self) -> None:
        self._samples: dict[nn.Parameter, tuple[int, Tensor]] = {}

    @torch.no_grad()
    def look(self, parameters: list[nn.Parameter]) -> bytes:
        """Equal for equal values. On a GPU it waits for the update."""
        norms = torch._foreach_norm([self._sample(p) for p in parameters]) if parameters else ()
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for norm in norms:
            kinds.setdefault(norm.dtype, []).append(norm)
        return b"".join(torch.stack(kind).double().cpu().numpy().tobytes() for kind in kinds.values())

    def forget(self) -> None:
        """Let go of what the samples were taken of."""
        self._samples.clear()

    def _sample(self, parameter: nn.Parameter) -> Tensor:
        known = self._samples.get(parameter)
        if known is not None and known[0] == parameter.data_ptr() and known[1].dtype == parameter.dtype:
            return known[1]
        values = parameter.detach()
        if values.numel() > _LOOKED_AT and values.is_contiguous():
            values = values.view(-1)[:: values.numel() // _LOOKED_AT]
        self._samples[parameter] = (parameter.data_ptr(), values)
        return values


_LOOKED_AT = 1 << 12
"""Elements of a parameter, about."""
