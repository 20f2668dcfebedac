"""What a half-run training step can have changed, remembered and put back.

Parameters and optimizer state are not part of it: automatic optimization changes them only after the vote, and manual
optimization has :mod:`lightning_ntp.lightning.steps.manual_state`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_ntp.lightning import private
from lightning_ntp.lightning.metric_states import MetricRecorder
from lightning_ntp.lightning.steps.attribute_copies import AttributeRecorder
from lightning_ntp.lightning.steps.buffer_copies import BufferCopies, BufferRecorder, BufferSlot

Restore = Callable[[], None]
"""Puts back what was remembered; may be called any number of times."""


class Snapshot:
    """The state at the beginning of one micro-batch. Made by :class:`SnapshotRecorder`."""

    def __init__(self, parts: list[Restore], attributes: Restore, buffers: BufferCopies) -> None:
        self._parts, self._attributes = parts, attributes
        self.buffers = buffers

    def restore(self) -> None:
        """Put everything back, buffers included. For before a resharding."""
        # in evaluation too: a tensor made in inference mode could never be changed in training
        with torch.inference_mode(False):
            self.buffers.restore()
            # only here: `on_topology_change` may set some, and what is replayed changes them as it did
            self._attributes()
        self.restore_around(())

    def restore_attributes(self) -> None:
        """Put back the module's plain attributes alone."""
        self._attributes()

    def restore_around(self, buffers: Iterable[BufferSlot]) -> None:
        """Put everything back, but only these buffers: a resharding may have given the others new values."""
        with torch.inference_mode(False):
            self.buffers.restore_values(buffers)
            for part in self._parts:
                part()


class SnapshotRecorder:
    """Takes snapshots of a module in training.

    Walking over all modules is too slow for every step: it is done once an epoch.

    Args:
        trainer: The trainer.
        device: Whose random state counts, besides the CPU's.
        others: Each remembers some state of the caller and returns the function that puts it back.
    """

    def __init__(self, trainer: Trainer, device: torch.device, others: Sequence[Callable[[], Restore]] = ()) -> None:
        self._trainer, self._device, self._others = trainer, device, others
        self._epoch = -1
        self.parameters: list[nn.Parameter] = []
        self.modules: list[nn.Module] = []
        self._buffers = BufferRecorder()
        self._metrics = MetricRecorder()
        self._attributes = AttributeRecorder()
        self._own: list[Any] = []

    def take(self) -> Snapshot:
        """Remember the state as it is now."""
        with torch.inference_mode(False):
            return self._take()

    def _take(self) -> Snapshot:
        trainer = self._trainer
        if trainer.current_epoch != self._epoch:
            self.look_around()
        parts = [
            remember_random_state(self._device),
            self._metrics.take(),
            private.remember_logging(trainer),
            private.remember_progress(trainer),
            private.remember_scaler(trainer.precision_plugin),
        ]
        for owner in self._own:
            parts.append(_owned(owner))
        for remember in self._others:
            parts.append(remember())
        return Snapshot(parts, self._attributes.take(), self._buffers.take())

    def committed(self) -> None:
        """The step of the last snapshot is done."""
        self._buffers.committed()

    def uncopied(self) -> str:
        """A buffer that has changed though no snapshot has its values of before; empty if there is none. Said once."""
        return self._buffers.uncopied()

    def constant_buffers(self) -> frozenset[str]:
        """Names of large buffers that no step has changed so far."""
        return self._buffers.constant()

    def look_around(self) -> None:
        """Find what there is to remember; by itself once an epoch."""
        module, self._epoch = self._trainer.lightning_module, self._trainer.current_epoch
        self.parameters, self.modules = list(module.parameters()), list(module.modules())
        self._buffers.look_around(module)
        self._metrics.look_around(module)
        self._attributes.look_around(module)
        self._own = [owner for owner in (module, *self._trainer.callbacks) if hasattr(owner, "ntp_snapshot")]  # type: ignore[attr-defined]


def remember_random_state(device: torch.device) -> Restore:
    """Remember the global random states: Python's, NumPy's, torch's on the CPU and on one device."""
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy = np.random.get_state(legacy=False)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore


def _owned(owner: Any) -> Restore:
    state = owner.ntp_snapshot()

    def restore() -> None:
        owner.ntp_restore(state)

    return restore
