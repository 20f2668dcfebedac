"""Every touch of a private part of Lightning, each with the version it was read in (2.6.6).

``tests/lightning/test_private.py`` fails loudly when one of them changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import (
    _collect_rng_states,  # 2.6.6: dict of python, numpy, torch and CUDA states
    _set_rng_states,
    pl_worker_init_function,
)
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning_utilities.core.rank_zero import rank_zero_only


def set_rank_zero(rank: int) -> None:
    """Let ``rank_zero_only`` functions know the rank. 2.6.6: Lightning re-exports this one function."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def collect_rng_states() -> dict[str, Any]:
    return _collect_rng_states(include_cuda=False)


def set_rng_states(states: dict[str, Any]) -> None:
    _set_rng_states(states)


def worker_init_function(replica: int) -> Callable[[int], None]:
    """Seed data workers by replica. 2.6.6: ``_auto_add_worker_init_fn`` would seed them by global rank."""
    return partial(pl_worker_init_function, rank=replica)


def replace_stop_broadcasts(trainer: Trainer, vote: Callable[[], None]) -> None:
    """Replace Lightning's own handling of SIGTERM among ranks.

    2.6.6: ``_TrainingEpochLoop._broadcast_sigterm_tensor`` broadcasts before every batch on the world group and
    swallows errors; ``_SignalConnector._sigterm_notifier_fn`` broadcasts inside a signal handler.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = vote  # type: ignore[method-assign]
    trainer._signal_connector._sigterm_notifier_fn = lambda signum, _: None  # type: ignore[method-assign]


def restore_signal_handlers(trainer: Trainer) -> None:
    """Put back the handlers that Lightning found when it registered its own.

    2.6.6: ``Trainer._teardown`` does this after ``strategy.teardown``, and so would put our own handler back after
    we have taken it away. Done twice it changes nothing.
    """
    trainer._signal_connector.teardown()


def mark_sigterm_received(trainer: Trainer) -> None:
    """2.6.6: read by the loops through ``Trainer.received_sigterm``."""
    trainer._signal_connector.received_sigterm = True


def patch_clipping(plugin: Precision, clip: Callable[[Any, float], None]) -> None:
    """Clip by the norm of the unsharded gradients.

    Patched on the instance: a subclass would change the plugin's key in checkpoints. 2.6.6:
    ``Precision.clip_gradients`` calls ``self.clip_grad_by_norm(optimizer, clip_val)``.
    """
    plugin.clip_grad_by_norm = clip  # type: ignore[method-assign,assignment]


def patch_found_inf(plugin: Precision, agree: Callable[[torch.Tensor], None]) -> None:
    """Let all ranks agree whether scaled gradients overflowed.

    torch 2.13: ``GradScaler.unscale_`` and, for optimizers that unscale themselves, ``_check_inf_per_device`` store
    the local finding in ``_per_optimizer_states[id(optimizer)]["found_inf_per_device"]``.
    """
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is None or getattr(scaler, "_ntp_agrees", False):
        return
    unscale, check = scaler.unscale_, scaler._check_inf_per_device

    def agree_on(optimizer: torch.optim.Optimizer) -> None:
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            agree(found)

    def unscale_(optimizer: torch.optim.Optimizer) -> None:
        unscale(optimizer)
        agree_on(optimizer)

    def check_inf_per_device(optimizer: torch.optim.Optimizer) -> Any:
        result = check(optimizer)
        agree_on(optimizer)
        return result

    scaler.unscale_ = unscale_  # type: ignore[method-assign]
    scaler._check_inf_per_device = check_inf_per_device  # type: ignore[method-assign]
    scaler._ntp_agrees = True  # type: ignore[attr-defined]
