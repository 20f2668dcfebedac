"""The micro-batches of one optimizer step: what must run again when the step is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor, nn

from lightning_ntp.lightning import private
from lightning_ntp.lightning.steps.attribute_copies import remember_containers
from lightning_ntp.lightning.steps.buffer_copies import BufferSlot
from lightning_ntp.lightning.steps.manual_state import ManualState
from lightning_ntp.lightning.steps.snapshot import Restore, Snapshot


class ReplayClosure(Closure):
    """Runs one micro-batch through the transaction: an interruption inside is recovered from before it returns.

    Args:
        inner: Lightning's own closure.
        run: The transaction's way to run it.
        before_backward: Called once the old gradients are cleared.
    """

    def __init__(
        self, inner: Closure, run: Callable[[ReplayClosure], ClosureResult], before_backward: Callable[[], None]
    ) -> None:
        step, backward, zero_grad = private.closure_functions(inner)
        self._run, self._arguments = run, private.closure_arguments(inner)

        def backward_after_clearing(loss: Tensor) -> None:
            before_backward()
            backward(loss)

        super().__init__(step, None if backward is None else backward_after_clearing, zero_grad)
        self._whole: Restore | None = None
        self.progress: Restore = lambda: None
        """Puts back where the loops were at its start."""
        self.opens_window = zero_grad is not None or backward is None
        """Whether nothing of earlier micro-batches is needed: gradients are cleared, or there are none."""

    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._run(self)

    def rerun(self) -> ClosureResult:
        """The micro-batch itself."""
        if self._whole is not None:
            self._whole()
        else:
            self._whole = remember_containers(self._arguments.get("batch"))
        return Closure.closure(self)

    def forget(self) -> None:
        """Let go of a result whose step will be replayed: its loss holds on to the graph."""
        self._result = None

    @property
    def result(self) -> Any:
        """What Lightning has not asked for yet; None if it has, or if nothing ran."""
        return self._result

    @result.setter
    def result(self, result: Any) -> None:
        self._result = result

    def move_batch(self, device: torch.device) -> None:
        """Keep the batch elsewhere until it is needed again."""
        if "batch" not in self._arguments:
            return
        batch, whole = self._arguments["batch"], self._whole
        now = remember_containers(batch)
        if whole is not None:
            whole()
        self._arguments["batch"], self._whole = move_data_to_device(batch, device), None
        now()  # hooks after the step look at what the step has made of it

    def let_go_of_graph(self) -> None:
        """Keep the result but not its graph, which would know parameters by their old shapes."""
        if self._result is not None:
            self._result.closure_loss = None
            self._result.extra = recursive_detach(self._result.extra)


@dataclass
class Entry:
    """One run of one micro-batch."""

    closure: ReplayClosure | None
    """None in manual optimization."""
    snapshot: Snapshot
    batch_idx: int
    """The number of its batch in the epoch."""


@dataclass(eq=False)
class Window:
    """One optimizer step; in manual optimization one training step."""

    entries: list[Entry] = field(default_factory=list)
    position: int = 0
    """How many entries are done; less than all of them while a step is replayed."""
    closures: list[ReplayClosure] = field(default_factory=list)
    kept: dict[nn.Parameter, Tensor] | None = None
    """Gradients from before the first backward: what zero_grad has left. None until then."""
    manual: ManualState | None = None
    changing: set[BufferSlot] = field(default_factory=set)
    """Buffers that this step changes."""
    run: Callable[[], Any] | None = None
    """Runs the last micro-batch and the update; in manual optimization the training step."""
    past: bool = False
    """Whether what is done again lies in the past, and what has come after it stays."""

    def keep_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called before every backward."""
        if self.kept is None:
            self.kept = {p: p.grad.detach().clone() for p in parameters if p.grad is not None}

    def drop_gradients(self, parameters: Iterable[nn.Parameter], cleared: set[nn.Parameter]) -> None:
        """Go back to the gradients from before the first backward.

        Args:
            parameters: All parameters.
            cleared: Those whose gradients the step begins to clear anyway.
        """
        kept, self.kept = self.kept, None
        for parameter in parameters:
            if kept is not None:
                parameter.grad = kept.get(parameter)
            elif parameter in cleared:
                parameter.grad = None

    def restore_start(self) -> None:
        """Put back the state from before the first micro-batch, in the layout of then."""
        for entry in self.entries:
            if entry.closure is not None:
                entry.closure.forget()
        if self.manual is not None:
            self.manual.restore()
        if self.past:
            return  # its snapshots are of earlier layouts; each micro-batch puts back what it needs
        if self.entries:
            self.note_changing()
            self.entries[0].snapshot.restore()

    def note_changing(self) -> None:
        """Find the buffers that this step changes. Before anything moves."""
        first = self.entries[0].snapshot
        self.changing |= first.buffers.changed()
        for entry in self.entries[1:]:
            self.changing |= first.buffers.differing(entry.snapshot.buffers)

    def restore(self, position: int) -> None:
        """Put back the state from before one micro-batch, in whatever layout parameters have now."""
        snapshot = self.entries[position].snapshot
        if self.past:
            snapshot.restore_attributes()
        snapshot.restore_around(self.changing)
