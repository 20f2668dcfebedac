"""The unsharded model, put together from shards and cut to them: what checkpoints hold and what users look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_ntp import engine
from lightning_ntp.comm import Generation, ShardedState, gather_full
from lightning_ntp.lightning import checkpoint as checkpoints
from lightning_ntp.lightning import private
from lightning_ntp.lightning.checkpoint_io import CheckpointError, newest_checkpoint, why_not_written
from lightning_ntp.lightning.collectives import ReplicaCollectives
from lightning_ntp.lightning.steps.registered_state import RegisteredState, full_state, local_state
from lightning_ntp.parallel import ShardedModel

_GONE = 2
"""What was gathered is gone with the generation: gather again."""


class WholeState:
    """Gathers whole states on rank 0 and cuts them to shards. The strategy's methods of the same names say more.

    Args:
        model: Gives the cut model; None before it is cut.
        generation: Gives the current generation.
        collectives: Gathers once more if anybody dies meanwhile.
    """

    def __init__(
        self,
        model: Callable[[], ShardedModel | None],
        generation: Callable[[], Generation],
        collectives: ReplicaCollectives,
    ) -> None:
        self._model, self._generation, self._collectives = model, generation, collectives
        self.registered = RegisteredState()
        self._resumed: list[Mapping[str, Any]] = []
        self._resumed_at = 0
        self.loading = False
        """All ranks are about to load a checkpoint or have begun to: their optimizer states may differ."""
        self._gathered = (0, "")
        """The identity of the last state dict, and the generation that it was gathered in."""

    @property
    def _cut(self) -> ShardedModel:
        model = self._model()
        if model is None:
            raise RuntimeError("the model is not cut yet: call this in on_fit_start or later")
        return model

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of the module, on rank 0."""
        model = self._cut
        state = self._collectives.gather_for_rank_zero(lambda: checkpoints.full_state_dict(model, self._generation()))
        self._gathered = (id(state), self._generation().name)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Of an optimizer, on rank 0."""
        model = self._cut
        inner = getattr(optimizer, "optimizer", optimizer)  # a LightningOptimizer wraps the real one
        return self._collectives.gather_for_rank_zero(
            lambda: checkpoints.full_optimizer_state(model, inner, self._generation())
        )

    def save(
        self, module: LightningModule, checkpoint: dict[str, Any], write: Callable[[dict[str, Any]], None], path: str
    ) -> None:
        """Write a checkpoint on rank 0. If a rank is lost meanwhile, rank 0 may be another one, with nothing to save or
        half a file: then it is gathered and written once more.

        Args:
            module: Of the running trainer.
            checkpoint: What this rank was given to save.
            write: Writes it, on rank 0.
            path: Where.

        Raises:
            CheckpointError: If rank 0 could not write it, on all ranks.
        """
        failure: list[str] = []

        def is_gone() -> bool:
            state, generation = self._gathered
            return state == id(checkpoint.get("state_dict")) and generation != self._generation().name

        def state() -> int:
            return _GONE if is_gone() else len(failure)

        while True:
            if self._collectives.highest(state) != _GONE:
                try:
                    write(checkpoint)
                except OSError as error:
                    failure.append(f"slot {self._generation().slot} could not write it: {why_not_written(error)}")
                found = self._collectives.highest(state)
                if found != _GONE:
                    break
            failure.clear()
            checkpoint = private.dump_checkpoint(module.trainer, "optimizer_states" not in checkpoint)
        if found:
            # known to rank 0 alone, unless that has died since
            why = self._collectives.broadcast(failure[0] if failure else "it could not be written", 0)
            raise CheckpointError(
                f"the checkpoint {path} was not saved: {why}. Any other rank would meet the same, so the job ends; a"
                " file that was there before is as it was. See to the directory, then start again"
                f" ({newest_checkpoint(module.trainer)})"
            )

    def load_optimizers(self, optimizers: list[Optimizer], checkpoint: Mapping[str, Any], committed: int) -> None:
        """Cut the optimizer states of a checkpoint.

        Args:
            optimizers: They get them.
            checkpoint: The checkpoint.
            committed: The steps that are done.
        """
        self._resumed, self._resumed_at = list(checkpoint["optimizer_states"]), committed
        for optimizer, state in zip(optimizers, self._resumed, strict=True):
            optimizer.load_state_dict(checkpoints.local_optimizer_state(self._cut, optimizer, state))

    def load_again(self, optimizers: list[Optimizer]) -> None:
        """After a change: the loaded optimizer states, cut for the present layout. Does nothing if there are none.

        Learning rates stay as they are: they may have been set since.
        """
        for optimizer, state in zip(optimizers, self._resumed, strict=True) if self._resumed else ():
            local = checkpoints.local_optimizer_state(self._cut, optimizer, state)
            optimizer.load_state_dict({**local, "param_groups": optimizer.state_dict()["param_groups"]})

    def loaded_at(self, committed: int) -> int:
        """How many steps were done when optimizer states were loaded; -1 if they were not. Ranks load them at different
        moments, so until a step is done they are loaded again after a change, rather than moved.

        Args:
            committed: The steps that are done.
        """
        if self.loading:
            return committed
        return self._resumed_at if self._resumed else -1

    def forget_loaded(self) -> None:
        """A step is done, or there are new optimizers."""
        self._resumed = []

    # ---- for users --------------------------------------------------------------------------------------------

    def register(self, state: ShardedState) -> Callable[[], None]:
        self.registered.add(self._cut, state)
        return lambda: self.registered.remove(state)

    def full(self, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        model = self._cut
        return self._collectives.gather_for_rank_zero(lambda: full_state(model, state, self._generation()))

    def local(self, full: Mapping[str, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        return local_state(self._cut, full)

    def gradients(self) -> dict[str, Tensor | None]:
        generation = self._generation()
        gathered = {
            e.name: gather_full(e, e.parameter.grad, generation) if e.parameter.grad is not None else None
            for e in self._cut
        }
        return gathered if generation.rank == 0 else {}

    def check_copies(self) -> None:
        differing = engine.differing_copies(self._cut, self._generation())
        if differing:
            raise AssertionError(f"copies have different bits: {', '.join(differing)}")
