"""The first training step of a fit, tried out before it is made: sharded and unsharded, and then compared.

See :mod:`lightning_ntp.engine.verification` for what is compared. Here: running the user's step twice so that nobody
notices, and the comparison of all copies after the first updates.
"""

from __future__ import annotations

import copy
import logging
import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_ntp import engine
from lightning_ntp.comm import Generation, GradientSync, Interrupted, gather_whole
from lightning_ntp.lightning.steps.attribute_copies import remember_attributes
from lightning_ntp.lightning.steps.snapshot import Snapshot
from lightning_ntp.parallel import ShardedModel, unsharded, without_dropout

log = logging.getLogger("lightning_ntp")

Verify = Literal["auto"] | bool
AUTO_BYTES = 512 * 2**20
"""Unsharded parameters and gradients up to this size are verified without being asked."""
COMPARED_STEPS = 2
"""Copies are compared after so many steps: the first update of many optimizers has no history yet."""


class Verification:
    """Verifies the first step and the first updates of a fit. One per fit.

    Args:
        verify: What the user wants: see :class:`NTPStrategy`.
        trainer: The trainer, its module set up.
        model: The cut model.
        generation: Gives the current generation.
        snapshot: Remembers what a step can change.

    Raises:
        ValueError: If it is to be verified and cannot be.
    """

    def __init__(
        self,
        verify: Verify,
        trainer: Trainer,
        model: ShardedModel,
        generation: Callable[[], Generation],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._verify, self._trainer, self._model = verify, trainer, model
        self._generation, self._snapshot = generation, snapshot
        automatic, topology = trainer.lightning_module.automatic_optimization, generation().topology
        if verify is True and not automatic:
            raise ValueError(
                "verify=True, but with manual optimization a training step changes parameters, so it cannot be tried"
                " out first. Leave verify='auto', which then only compares the copies after the first steps; to verify"
                " the plan, fit once with a training_step that returns its loss"
            )
        wanted = verify is True or (verify == "auto" and 2 * _bytes(model) <= AUTO_BYTES)
        self.due = wanted and automatic and max(topology.live_degrees) > 1
        """Whether the next training step is the first one, and to be verified."""
        self._compared = 0 if wanted and topology.world_size > 1 else COMPARED_STEPS

    def remember(self) -> Callable[[], None]:
        """Remember whether the step was verified; the result puts it back: a replay must do alike on all ranks."""
        due = self.due

        def restore() -> None:
            self.due = due

        return restore

    def known(self) -> tuple[bool, int]:
        """What all ranks have verified alike, for a newcomer."""
        return self.due, self._compared

    def know(self, known: tuple[bool, int]) -> None:
        """In a newcomer: take over what :meth:`known` has said."""
        self.due, self._compared = known

    def compare_copies(self, committed: int, collectively: Callable[[Callable[[], list[str]]], list[str]]) -> None:
        """Compare the bits of all copies, after the first steps. Collective over all members then; between steps.

        Args:
            committed: The steps that are done; the same on all ranks.
            collectively: Runs a collective, again if anybody dies meanwhile.

        Raises:
            CopiesDifferError: If they differ.
        """
        if self._compared >= min(committed, COMPARED_STEPS):
            return
        self._compared = committed
        differing = collectively(lambda: engine.differing_copies(self._model, self._generation()))
        known = self._model.by_name()
        engine.check_copies([name for name in differing if not _rounds_by_place(known[name].parameter)], committed)

    def run(
        self, step: Callable[[Any], STEP_OUTPUT], batch: Any, check: engine.FirstStepCheck, sync: GradientSync
    ) -> None:
        """Try out the step. Collective over all members; leaves everything as it was.

        Args:
            step: The training step as Lightning calls it, without its backward.
            batch: Its batch.
            check: Looks at the sharded gradients too: where it finds something it can say more.
            sync: Notices gradients that arrive.

        Raises:
            VerificationError: If the sharded model computes something else than the unsharded one.
            RuntimeError: If the user insists on it and the unsharded model fails.
        """
        model, generation = self._model, self._generation()
        whole: engine.Pass | None = None
        drawn, drew, failure = 0, 0, None
        with without_dropout(model.module):
            put_back = self._remember(check, sync)  # here: dropout stays off when attributes are put back
            try:
                loss = self._backward(step, batch)
                if check.begin():
                    check.run()
                sharded = engine.sharded_pass(model, loss, generation)
                drawn = _random_state(generation.device)
                del loss
                put_back()
                try:
                    with unsharded(model, gather_whole(model, generation)):
                        loss = self._backward(step, batch)
                        whole = engine.unsharded_pass(model, loss, generation)
                        drew = _random_state(generation.device)
                        del loss
                except Interrupted:
                    raise
                except Exception as error:  # out of memory, say: no fault of the plan, and others wait to hear of it
                    failure = f"{type(error).__name__}: {error}"
            finally:
                put_back()
        self._compare(sharded, whole, drawn == drew, failure)
        self.due = False
        if generation.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks as large as whole tensors fit nothing that comes later

    def _compare(self, sharded: engine.Pass, whole: engine.Pass | None, alike: bool, failure: str | None) -> None:
        """Compare the passes of all ranks and raise together. Collective over all members."""
        generation, plugin = self._generation(), self._trainer.precision_plugin
        half = "16" in str(plugin.precision) or "transformer" in str(plugin.precision)
        bound = engine.tolerance((e.parameter for e in self._model), sharded.loss, half, generation.device)
        found = [0.0] * (1 + len(sharded.gradients))
        if whole is not None and alike:
            found = engine.deviations(sharded, whole, bound, overflows=getattr(plugin, "scaler", None) is not None)
        failed, drew, bound, *found = engine.agree(
            [float(whole is None), float(whole is not None and not alike), bound, *found], generation
        )
        if failed:
            reason = failure or "on another rank"
            if self._verify is True:
                raise RuntimeError(
                    f"verify=True, but the unsharded model fails in the first training step ({reason}): leave"
                    " verify='auto', use a smaller batch, or verify a smaller model"
                )
            if failure or generation.rank == 0:
                log.warning("the first step was not verified: unsharded, the model fails in it (%s)", reason)
        elif drew:
            if generation.rank == 0:
                log.info(
                    "the first step was not verified: sharded and unsharded, it draws different random numbers (inside"
                    " of a planned block, for something else than dropout)"
                )
        else:
            engine.check_deviations(self._model, found, bound)

    def _remember(self, check: engine.FirstStepCheck, sync: GradientSync) -> Callable[[], None]:
        """Remember all that a forward and a backward change."""
        parts = [self._snapshot().restore, check.remember(), remember_attributes(self._model.module)]
        gradients = {entry.parameter: entry.parameter.grad for entry in self._model}
        local = set(sync.local)

        def put_back() -> None:
            for part in parts:
                part()
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            sync.local = set(local)

        return put_back

    def _backward(self, step: Callable[[Any], STEP_OUTPUT], batch: Any) -> Tensor:
        """The step and its backward, without hooks; the gradients of before are set aside by :meth:`_remember`."""
        for entry in self._model:
            entry.parameter.grad = None
        output = step(_copied(batch))
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step must return its loss, alone or in a dict as 'loss'; it returned {output!r}")
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        self._trainer.lightning_module.backward(loss if scaler is None else scaler.scale(loss))
        return loss


def _rounds_by_place(parameter: Tensor) -> bool:
    """Whether updates of equal numbers may differ: torch's CPU kernels for 16 bits round the last elements of a tensor
    otherwise than the rest (2.13: they are added in 16 bits, the others in vectors of float32).
    """
    return parameter.device.type == "cpu" and parameter.element_size() == 2


def _bytes(model: ShardedModel) -> int:
    return sum(entry.shape.numel() * entry.parameter.element_size() for entry in model)


def _copied(batch: Any) -> Any:
    """A batch of its own: steps may change theirs."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # it may hold anything
        return batch


def _random_state(device: torch.device) -> int:
    """A checksum of the global random states."""
    parts = [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()]
    parts.append(repr(np.random.get_state(legacy=False)).encode())
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return zlib.crc32(b"".join(parts))
