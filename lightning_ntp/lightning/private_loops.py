"""Where Lightning's loops are and what they have logged, as values that another trainer takes over.

Private parts of Lightning used here were read in 2.6.6; ``tests/lightning/test_private.py`` fails when one changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

_OWN = ("max_batches", "verbose", "inference_mode")
"""Of the loops: what each trainer finds out by itself."""
_OF_TRAINER = (
    "should_stop",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "check_val_every_n_epoch",
    "log_every_n_steps",
    "reload_dataloaders_every_n_epochs",
    # time.monotonic(): the same clock for all processes of a machine
    "_last_val_time",
    "_train_start_time",
)


def _loops(trainer: Trainer) -> list[Any]:
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    return [fit, epoch, epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop]


def where_loops_are(trainer: Trainer) -> dict[str, Any]:
    """Progress, stages and limits of the loops of a fit; nothing that loaders or their iterators tell.

    2.6.6: a loop keeps its counts in trackers (``_BaseProgress``) and everything else in plain numbers and texts.
    """
    loops = _loops(trainer)
    return {
        "progress": [{k: v.state_dict() for k, v in vars(o).items() if isinstance(v, _BaseProgress)} for o in loops],
        "plain": [
            {k: v for k, v in vars(o).items() if type(v) in (bool, int, float, str) and k not in _OWN} for o in loops
        ],
        "seen": dict(trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader),
        "trainer": {k: v for k, v in vars(trainer).items() if k in _OF_TRAINER},
    }


def put_loops(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Let the loops go on from there."""
    for loop, progress, plain in zip(_loops(trainer), state["progress"], state["plain"], strict=True):
        for name, counts in progress.items():
            getattr(loop, name).load_state_dict(counts)
        vars(loop).update(plain)
    seen = trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader
    seen.clear()
    seen.update(state["seen"])
    vars(trainer).update(state["trainer"])


# ---- what self.log has gathered -------------------------------------------------------------------------------------

_VALUES = ("value", "cumulated_batch_size", "has_reset", "_computed", "_forward_cache", "_update_count")
_CONNECTOR = ("_current_fx", "_first_loop_iter", "_progress_bar_metrics", "_logged_metrics", "_callback_metrics")


def logged_values(trainer: Trainer) -> dict[str, Any]:
    """What callbacks and loggers are shown. 2.6.6: kept by the logger connector."""
    return {k: getattr(trainer._logger_connector, k) for k in _CONNECTOR}


def put_logged_values(trainer: Trainer, values: Mapping[str, Any]) -> None:
    vars(trainer._logger_connector).update(values)


def _results(trainer: Trainer) -> dict[str, Any]:
    epoch = trainer.fit_loop.epoch_loop
    return {"training": epoch._results, "validation": epoch.val_loop._results}


def logged_entries(trainer: Trainer) -> tuple[dict[str, list[str]], dict[str, dict[str, Any]]]:
    """What ``self.log`` accumulates in training and validation.

    Returns:
        The keys of both collections, in order: at the end of an epoch entries are reduced in this order. And the
        entries, by collection and key.
    """
    orders: dict[str, list[str]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for stage, results in _results(trainer).items():
        orders[stage] = list(results)
        for key, metric in results.items():
            meta, sync = metric.meta, metric.meta.sync
            entries[f"{stage} {key}"] = {
                "meta": {f.name: getattr(meta, f.name) for f in fields(meta) if f.name != "_sync"},
                "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_group": sync.group},
                "is_tensor": metric.is_tensor,
                "values": {k: vars(metric)[k] for k in _VALUES if k in vars(metric)},
            }
    return orders, entries


def put_logged_entries(
    trainer: Trainer, orders: Mapping[str, list[str]], entries: Mapping[str, Mapping[str, Any]], fresh: bool
) -> None:
    """Make the entries that another trainer has, reduced by this trainer's strategy.

    Args:
        trainer: The trainer.
        orders: The keys of both collections.
        entries: Those that could be carried; of others the trainer keeps its own, if it has them.
        fresh: Whether sums over replicas begin at zero here. Entries that are not reduced stay: nobody else counts
            them. Those that were logged in this epoch are marked so still, or this rank would reduce fewer than others.
    """
    for stage, results in _results(trainer).items():
        made = {key: _made(trainer, entries[f"{stage} {key}"]) for key in orders[stage] if f"{stage} {key}" in entries}
        kept = {key: made.get(key, results.get(key)) for key in orders[stage]}
        results.clear()
        results.update({key: metric for key, metric in kept.items() if metric is not None})
        for metric in made.values() if fresh else ():
            if metric.is_tensor and metric.meta.sync.should and metric.meta.on_epoch:
                _begin_at_zero(metric)


def _made(trainer: Trainer, entry: Mapping[str, Any]) -> _ResultMetric:
    """2.6.6: as ``_ResultCollection.log`` does, with ``sync_dist_fn=strategy.reduce`` from ``LightningModule.log``."""
    meta = _Metadata(**entry["meta"])
    meta.sync = _Sync(fn=trainer.strategy.reduce, **entry["sync"])
    metric = _ResultMetric(meta, entry["is_tensor"])
    vars(metric).update(entry["values"])
    return metric


def _begin_at_zero(metric: _ResultMetric) -> None:
    """2.6.6: as ``_ResultMetric.reset``, but for ``has_reset`` and ``_forward_cache``, the value of the last step."""
    vars(metric)["_computed"] = None
    for name, default in vars(metric)["_defaults"].items():
        value = vars(metric)[name]
        vars(metric)[name] = default.detach().clone().to(value.device, value.dtype)


# ---- the scaler -----------------------------------------------------------------------------------------------------


def scaler_state(plugin: Precision) -> dict[str, Any] | None:
    """Of the GradScaler of 16-mixed; None if there is none. torch 2.13: the tensors are made by the first backward."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return None
    tensors: dict[str, torch.Tensor | None] = {k: getattr(scaler, k) for k in ("_scale", "_growth_tracker")}
    return {"state": scaler.state_dict(), "tensors": tensors}


def put_scaler_state(plugin: Precision, state: Mapping[str, Any] | None) -> None:
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or state is None:
        return
    if state["state"]:  # empty when scaling is disabled
        scaler.load_state_dict(state["state"])
    vars(scaler).update(state["tensors"])
