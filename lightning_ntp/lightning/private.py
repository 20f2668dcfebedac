"""Every touch of a private part of Lightning, each with the version it was read in (2.6.6).

``tests/lightning/test_private.py`` fails loudly when one of them changes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import (
    _collect_rng_states,  # 2.6.6: dict of python, numpy, torch and CUDA states
    _set_rng_states,
    pl_worker_init_function,
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks import ModelSummary as SummaryCallback
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.exceptions import _TunerExitException
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


def patch_summaries(trainer: Trainer, summarize: Callable[[LightningModule, int], Any]) -> None:
    """Let ``summarize(module, max_depth)`` make what the summary callbacks print.

    2.6.6: ``ModelSummary.on_fit_start``, which RichModelSummary inherits, asks ``self._summary(trainer, module)``. The
    strategy has set up by then, and the model is cut.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SummaryCallback):
            callback._summary = partial(_summary, summarize, callback._max_depth)  # type: ignore[method-assign]


def _summary(summarize: Callable[[LightningModule, int], Any], depth: int, trainer: Trainer, module: Any) -> Any:
    return summarize(module, depth)


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


# ---- what a training step changes, remembered; each function returns the one that puts it back ---------------------


def remember_logging(trainer: Trainer) -> Callable[[], None]:
    """What ``self.log`` has gathered.

    2.6.6: ``_ResultMetric`` assigns new values rather than change them in place, so shallow copies suffice.
    ``_call_lightning_module_hook`` and its like do not put ``_current_fx_name`` back after an exception.
    """
    module, connector, results = trainer.lightning_module, trainer._logger_connector, trainer._results
    name, names = module._current_fx_name, ("_current_fx", "_first_loop_iter")
    connected = {k: getattr(connector, k) for k in names}
    shown = {k: dict(getattr(connector, k)) for k in ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")}
    logged = {} if results is None else {k: (m, dict(m.__dict__)) for k, m in results.items()}
    batch = {} if results is None else {k: getattr(results, k) for k in ("batch", "batch_size", "dataloader_idx")}

    def restore() -> None:
        module._current_fx_name = name
        connector.__dict__.update(connected)
        connector.__dict__.update({k: dict(v) for k, v in shown.items()})
        if results is None:
            return
        for key in [k for k in results if k not in logged]:
            del results[key]
        for key, (metric, attributes) in logged.items():
            results[key] = metric
            metric.__dict__.clear()
            metric.__dict__.update(attributes)
        results.__dict__.update(batch)

    return restore


def _remember_counters(*trackers: Any) -> Callable[[], None]:
    saved = [(tracker, dict(tracker.__dict__)) for tracker in trackers]

    def restore() -> None:
        for tracker, counts in saved:
            tracker.__dict__.update(counts)

    return restore


def remember_progress(trainer: Trainer) -> Callable[[], None]:
    """Progress counters that closures and manual steps increment. 2.6.6: not the optimizer's, see below."""
    loop = trainer.fit_loop.epoch_loop
    cleared, manual = loop.automatic_optimization.optim_progress.optimizer.zero_grad, loop.manual_optimization
    steps = manual.optim_step_progress
    return _remember_counters(cleared.total, cleared.current, steps.total, steps.current)


def remember_batch(trainer: Trainer) -> Callable[[], None]:
    """What ``_AutomaticOptimization._optimizer_step`` changes around the module's ``optimizer_step`` (2.6.6)."""
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    counters = _remember_counters(steps.total, steps.current)
    module = trainer.lightning_module
    name = module._current_fx_name

    def restore() -> None:
        counters()
        module._current_fx_name = name

    return restore


def remember_loops(trainer: Trainer) -> Callable[[], None]:
    """Where the loops of a fit are: what ``global_step``, ``current_epoch`` and the like are told by (2.6.6).

    The epochs of the samplers too, for whoever asks which samples a batch had: running iterators have drawn theirs.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    optimizers, manual = loop.automatic_optimization.optim_progress.optimizer, loop.manual_optimization
    trackers = [fit.epoch_progress, loop.batch_progress, loop.scheduler_progress, manual.optim_step_progress]
    counters = _remember_counters(
        loop.batch_progress,
        *(part for tracker in [*trackers, optimizers.step, optimizers.zero_grad] for part in _parts(tracker)),
    )
    stepped, name = loop._batches_that_stepped, trainer.lightning_module._current_fx_name
    loaders = fit._combined_loader.flattened if fit._combined_loader is not None else []
    samplers: list[Any] = [getattr(loader, "sampler", None) for loader in loaders]
    epochs = [(s, s.epoch) for s in samplers if hasattr(s, "set_epoch") and hasattr(s, "epoch")]

    def restore() -> None:
        counters()
        loop._batches_that_stepped = stepped
        trainer.lightning_module._current_fx_name = name
        for sampler, epoch in epochs:
            sampler.set_epoch(epoch)

    return restore


def _parts(tracker: Any) -> tuple[Any, Any]:
    return tracker.total, tracker.current


def without_sync(trainer: Trainer) -> AbstractContextManager[None]:
    """What the loop runs a micro-batch in that others of its step follow.

    2.6.6: ``_block_parallel_sync_behavior`` of ``_AutomaticOptimization.run``.
    """
    strategy = trainer.strategy
    return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()


def sets_up_training(module: LightningModule | None) -> bool:
    """Whether the dataloader that is being set up is one of training. 2.6.6: the stage says so; evaluation has its own,
    within a fit too.
    """
    return module is not None and module.trainer.state.stage == RunningStage.TRAINING


def enter_training_stage(trainer: Trainer) -> Callable[[], None]:
    """From now on what is logged goes to the training loop; the result goes back. 2.6.6: told by the state's stage."""
    before = trainer.state.stage
    trainer.state.stage = RunningStage.TRAINING

    def back() -> None:
        trainer.state.stage = before

    return back


def remember_scaler(plugin: Precision) -> Callable[[], None]:
    """The GradScaler of 16-mixed. torch 2.13: ``update`` changes both tensors in place."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return lambda: None
    tensors = {k: None if (t := getattr(scaler, k)) is None else t.clone() for k in ("_scale", "_growth_tracker")}
    stages = {k: dict(v) for k, v in scaler._per_optimizer_states.items()}

    def restore() -> None:
        for k, tensor in tensors.items():
            setattr(scaler, k, None if tensor is None else tensor.clone())
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update({k: dict(v) for k, v in stages.items()})

    return restore


def remember_toggled(module: Any) -> Callable[[], None]:
    """2.6.6: ``toggle_optimizer`` keeps the flags that it will put back in ``_param_requires_grad_state``."""
    flags = dict(module._param_requires_grad_state)

    def restore() -> None:
        module._param_requires_grad_state = dict(flags)

    return restore


def stop_profiling(trainer: Trainer, action: str) -> None:
    """2.6.6: ``Trainer.profiler`` is set by a connector, unseen by type checkers."""
    trainer.profiler.stop(action)  # type: ignore[attr-defined]


# ---- where a training step is taken over -----------------------------------------------------------------------------


def closure_functions(closure: Closure) -> tuple[Any, Any, Any]:
    """2.6.6: the training step, the backward and the zero_grad of a closure; the latter two may be None."""
    return closure._step_fn, closure._backward_fn, closure._zero_grad_fn


def closure_arguments(closure: Closure) -> dict[str, Any]:
    """2.6.6: what the training step is called with, ``batch`` among it: the one argument bound to ``_step_fn``."""
    step = closure._step_fn
    arguments = step.args[0] if isinstance(step, partial) and step.args else {}
    return arguments if isinstance(arguments, dict) else {}


def patch_automatic_optimization(
    trainer: Trainer,
    wrap: Callable[[Closure], Closure],
    optimize: Callable[[Callable[[int, Any], None], int, Any], None],
) -> Callable[[], None]:
    """Let closures and the optimizer step of automatic optimization pass through us; the result undoes it.

    2.6.6: ``_AutomaticOptimization.run`` calls ``self._make_closure``, then the closure alone (accumulating) or
    ``self._optimizer_step(batch_idx, closure)``.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    kind = type(loop)

    def make_closure(*args: Any, **kwargs: Any) -> Closure:
        return wrap(kind._make_closure(loop, *args, **kwargs))

    def optimizer_step(batch_idx: int, train_step_and_backward_closure: Any) -> None:
        optimize(partial(kind._optimizer_step, loop), batch_idx, train_step_and_backward_closure)

    loop._make_closure = make_closure  # type: ignore[method-assign]
    loop._optimizer_step = optimizer_step  # type: ignore[method-assign]

    def undo() -> None:
        loop.__dict__.pop("_make_closure", None)
        loop.__dict__.pop("_optimizer_step", None)

    return undo


def patch_after_closure(plugin: Precision, vote: Callable[[], None]) -> Callable[[], None]:
    """Call ``vote`` once hooks and clipping are done and nothing but the update is left; the result undoes it.

    2.6.6: ``Precision`` (through ``_wrap_closure``) and ``MixedPrecision`` both call ``self._after_closure``.
    """
    inner = type(plugin)._after_closure

    def after_closure(*args: Any, **kwargs: Any) -> None:
        inner(plugin, *args, **kwargs)
        vote()

    plugin._after_closure = after_closure  # type: ignore[method-assign]

    def undo() -> None:
        plugin.__dict__.pop("_after_closure", None)

    return undo


def patch_prepare_data(trainer: Trainer, repeat: Callable[[Callable[[], None]], None]) -> None:
    """Prepare data once more if a rank is lost meanwhile: it may have been the one that prepared them.

    2.6.6: ``_DataConnector.prepare_data`` lets the other ranks wait in a process group that it makes for itself. Called
    in ``Trainer._run``, after ``strategy.setup_environment``.
    """
    connector = trainer._data_connector
    prepare = partial(type(connector).prepare_data, connector)
    connector.prepare_data = partial(repeat, prepare)  # type: ignore[method-assign]


def patch_restore(trainer: Trainer, together: Callable[[Callable[[], None]], None]) -> None:
    """Let all ranks load a checkpoint together when that happens in the middle of a run.

    2.6.6: the learning-rate finder calls ``_CheckpointConnector.restore`` once it is done, and nobody else does here.
    """
    connector = trainer._checkpoint_connector
    restore = partial(type(connector).restore, connector)

    def restore_together(*args: Any, **kwargs: Any) -> None:
        together(partial(restore, *args, **kwargs))

    connector.restore = restore_together  # type: ignore[method-assign]


def patch_resume(trainer: Trainer) -> None:
    """In a newcomer, resume from a checkpoint only if it is still there: its state comes from its peers.

    2.6.6: ``_restore_modules_and_callbacks`` calls ``resume_start``, which loads the file. What restores parts of it
    does nothing if none was loaded.
    """
    connector = trainer._checkpoint_connector
    resume = partial(type(connector).resume_start, connector)

    def resume_if_there(*args: Any, **kwargs: Any) -> None:
        with suppress(FileNotFoundError):
            resume(*args, **kwargs)

    connector.resume_start = resume_if_there  # type: ignore[method-assign]


def patch_lr_finder() -> None:
    """Let the learning-rate finder look at the loss of the global batch, whichever rank is rank 0, where the strategy
    has a method ``whole_loss``.

    2.6.6: ``_LRCallback.on_train_batch_end`` takes the loss out of ``outputs``, each rank its own, and the results of
    rank 0 count.
    """
    inner = _LRCallback.on_train_batch_end
    if hasattr(inner, "_ntp_inner"):
        return

    def on_train_batch_end(
        self: Any, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        if outputs and hasattr(trainer.strategy, "whole_loss"):
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
            outputs = {"loss": trainer.strategy.whole_loss(loss)}
        inner(self, trainer, pl_module, outputs, *args, **kwargs)

    on_train_batch_end._ntp_inner = inner  # type: ignore[attr-defined]
    _LRCallback.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]


def is_tuner_exit(error: BaseException) -> bool:
    """2.6.6: what the tuner raises, on all ranks, to leave ``fit`` when it is done. No error."""
    return isinstance(error, _TunerExitException)


def patch_links(
    trainer: Trainer, put_link: Callable[[str, str], None], together: Callable[[Callable[[], None]], None]
) -> None:
    """Make the link ``last.ckpt`` once more if a rank is lost meanwhile: it may have been the one that makes it.

    2.6.6: ``ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)`` does so on rank 0, removing what is there
    first, then all ranks meet in a barrier.

    Args:
        trainer: Its callbacks are patched, but for those with a method of their own.
        put_link: Makes a link to the first path at the second one.
        together: Calls a function on all ranks, again if anybody dies meanwhile, and waits for all.
    """

    def link(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if os.path.abspath(filepath) != os.path.abspath(linkpath):
            together(lambda: put_link(filepath, linkpath) if trainer.is_global_zero else None)

    for callback in trainer.checkpoint_callbacks:
        if getattr(type(callback), "_link_checkpoint", None) is ModelCheckpoint._link_checkpoint:
            callback._link_checkpoint = link  # type: ignore[attr-defined]


def before_train_end(trainer: Trainer, act: Callable[[], None]) -> None:
    """Call ``act`` after the last step of a fit, before any hook hears that training ends.

    2.6.6: ``_FitLoop.on_run_end`` calls ``on_train_end`` of the callbacks, then of the module and of the strategy.
    """
    loop = trainer.fit_loop
    end = partial(type(loop).on_run_end, loop)

    def on_run_end() -> None:
        act()
        end()

    loop.on_run_end = on_run_end  # type: ignore[method-assign]


def dump_checkpoint(trainer: Trainer, weights_only: bool) -> dict[str, Any]:
    """The content of a checkpoint. 2.6.6: ``Trainer.save_checkpoint`` calls this, then ``strategy.save_checkpoint``."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only)


def prepare_batch(trainer: Trainer, batch: Any) -> Any:
    """Bring a fetched batch to the device as the training loop does.

    2.6.6: ``_TrainingEpochLoop.advance`` converts the input and calls ``_on_before_batch_transfer`` and
    ``batch_to_device``.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


# ---- where evaluation is taken over ---------------------------------------------------------------------------------

EvaluationLoop = _EvaluationLoop | _PredictionLoop


def evaluation_loops(trainer: Trainer) -> list[EvaluationLoop]:
    """2.6.6: the loops of validation in a fit, of validate, of test and of predict."""
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]


def patch_evaluation(
    loop: EvaluationLoop,
    run: Callable[[Callable[[], Any]], Any],
    set_up: Callable[[Callable[[], None]], None],
    step: Callable[..., None],
    end: Callable[[], None],
    results: Callable[[], None],
) -> Callable[[], None]:
    """Let an evaluation loop, its parts and the end of each dataloader pass through us; the result undoes it.

    2.6.6: ``run`` calls ``setup_data`` (in a fit it does nothing the second time), fetches batches, calls
    ``_evaluation_step`` (``_predict_step``) with (batch, batch_idx, dataloader_idx, dataloader_iter) for each,
    ``_store_dataloader_outputs`` after the last one of a dataloader and ``on_run_end`` after the last one of all. There
    evaluation computes and logs the metrics of the epoch, then calls ``_on_evaluation_end``, whose hooks may save
    checkpoints.

    Args:
        loop: The loop.
        run: Called with the loop's own ``run``.
        set_up: Called with the loop's own ``setup_data``. A fit calls it before the loop runs, too.
        step: Called with the loop's own step, then its arguments.
        end: Called when all batches of a dataloader are done, before anything is made of their results.
        results: Called when all metrics are computed, before the hooks that hear of it. Not in prediction.
    """
    kind = type(loop)
    name = "_predict_step" if isinstance(loop, _PredictionLoop) else "_evaluation_step"
    after = "on_run_end" if isinstance(loop, _PredictionLoop) else "_store_dataloader_outputs"

    def ended() -> Any:
        end()
        return getattr(kind, after)(loop)

    patched = {
        "run": partial(run, partial(kind.run, loop)),
        "setup_data": partial(set_up, loop.setup_data),
        name: partial(step, partial(getattr(kind, name), loop)),
        after: ended,
    }
    if isinstance(loop, _EvaluationLoop):
        hooks_hear = partial(_EvaluationLoop._on_evaluation_end, loop)

        def computed(*args: Any, **kwargs: Any) -> None:
            results()
            hooks_hear(*args, **kwargs)

        patched["_on_evaluation_end"] = computed
    loop.__dict__.update(patched)

    def undo() -> None:
        for each in patched:
            loop.__dict__.pop(each, None)

    return undo


def remember_evaluation(loop: EvaluationLoop) -> Callable[[], None]:
    """What one batch changes in an evaluation loop (2.6.6)."""
    progress = loop.batch_progress
    counters = _remember_counters(progress, progress.total, progress.current)
    names = ("_has_run", "_seen_batches_per_dataloader", "_logged_outputs", "_predictions", "epoch_batch_indices")
    saved = {k: _copy_lists(loop.__dict__[k]) for k in names if k in loop.__dict__}

    def restore() -> None:
        counters()
        loop.__dict__.update({k: _copy_lists(v) for k, v in saved.items()})

    return restore


def back_to_training_mode(loop: EvaluationLoop) -> None:
    """2.6.6: the modes of the modules from before ``run``, which is about to begin again."""
    loop._module_mode.restore(loop.trainer.lightning_module)


def loader_of(loop: EvaluationLoop, dataloader_idx: int) -> tuple[Any, float]:
    """2.6.6: a dataloader of the loop as it is iterated over, and the number of its batches that are used."""
    assert loop._combined_loader is not None
    limits = loop.max_batches
    limit = limits[dataloader_idx] if isinstance(limits, list) else limits
    return loop._combined_loader.flattened[dataloader_idx], limit


def is_prediction_sampler(sampler: object) -> bool:
    """2.6.6: the sampler that predict gets, which repeats no sample to make parts equal."""
    return type(sampler) is UnrepeatedDistributedSamplerWrapper


def counts_indices(batch_sampler: object) -> bool:
    """2.6.6: the batch sampler that predict gets, which notes the samples of its batches in ``seen_batch_indices``."""
    return type(batch_sampler) is _IndexBatchSamplerWrapper


def _copy_lists(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy_lists(each) if isinstance(each, list) else each for each in value]
    return copy.copy(value)
