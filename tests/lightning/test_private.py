"""Every private part of Lightning and torch that the package touches is still there, and still called where we say.

When one of these fails after an upgrade, look at `lightning_ntp/lightning/private.py` and where it is used.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities import seed
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import lightning_ntp
from lightning_ntp.lightning import metric_states, private, private_fetching, private_loops
from lightning_ntp.lightning.arrivals import calls

PACKAGE = Path(lightning_ntp.__file__).parent


def source(of: Callable[..., Any]) -> str:
    """The code of a function without its whitespace."""
    return "".join(inspect.getsource(of).split())


def parameters(of: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(of).parameters)


def test_random_states_are_collected_and_set_as_dicts() -> None:
    assert parameters(seed._collect_rng_states) == ["include_cuda"]
    states = seed._collect_rng_states(include_cuda=False)
    assert states.keys() == {"torch", "python", "numpy"}
    torch.rand(1)
    seed._set_rng_states(states)
    assert torch.equal(torch.get_rng_state(), states["torch"])


def test_the_end_of_training_is_told_to_callbacks_first_and_from_one_place() -> None:
    code = source(importlib.import_module("lightning.pytorch.loops.fit_loop")._FitLoop.on_run_end)
    assert code.index("_call_callback_hooks") < code.index("_call_strategy_hook")
    assert "self.on_run_end()" in source(importlib.import_module("lightning.pytorch.loops.fit_loop")._FitLoop.run)


def test_a_checkpoint_is_dumped_before_the_strategy_saves_it() -> None:
    code = source(pl.Trainer.save_checkpoint)
    dumped = "checkpoint=self._checkpoint_connector.dump_checkpoint(weights_only)"
    assert code.index(dumped) < code.index("self.strategy.save_checkpoint(checkpoint,filepath")
    # by this a repeated dump knows what was asked for, and what rank 0 has of the model
    connector = importlib.import_module("lightning.pytorch.trainer.connectors.checkpoint_connector")
    code = source(connector._CheckpointConnector.dump_checkpoint)
    assert '"state_dict":self._get_lightning_module_state_dict()' in code
    assert "ifnotweights_only:" in code and 'checkpoint["optimizer_states"]=' in code


def test_a_checkpoint_that_is_gone_is_none_for_who_gets_its_state_from_others(tmp_path: Path) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    connector = trainer._checkpoint_connector
    with pytest.raises(FileNotFoundError):
        connector.resume_start(tmp_path / "gone.ckpt")
    private.patch_resume(trainer)
    connector.resume_start(tmp_path / "gone.ckpt", weights_only=True)
    assert connector._loaded_checkpoint == {}
    torch.save({"state_dict": {}, "pytorch-lightning_version": pl.__version__}, tmp_path / "there.ckpt")
    connector.resume_start(tmp_path / "there.ckpt", weights_only=True)
    assert "state_dict" in connector._loaded_checkpoint
    code = source(type(connector)._restore_modules_and_callbacks)
    assert "self.resume_start(checkpoint_path,weights_only=weights_only)" in code
    for part in ("model", "datamodule", "callbacks", "training_state", "optimizers_and_schedulers"):
        assert "ifnotself._loaded_checkpoint:return" in source(getattr(connector, f"restore_{part}")), part


def test_the_lr_finder_takes_losses_from_a_callback_and_restores_by_the_connector() -> None:
    finder = importlib.import_module("lightning.pytorch.tuner.lr_finder")
    callback = finder._LRCallback.on_train_batch_end
    callback = getattr(callback, "_ntp_inner", callback)
    assert parameters(callback) == ["self", "trainer", "pl_module", "outputs", "batch", "batch_idx"]
    assert 'loss_tensor=outputsifisinstance(outputs,torch.Tensor)elseoutputs["loss"]' in source(callback)
    code = source(finder._lr_find)
    assert code.count("trainer._checkpoint_connector.restore(ckpt_path)") == 1
    assert "trainer.callbacks=[_LRCallback(" in source(finder).replace("\n", "")
    # what leaves `fit` when a tuner is done
    call = importlib.import_module("lightning.pytorch.trainer.call")
    assert "except_TunerExitException:" in source(call._call_and_handle_interrupt)


def test_rank_zero_alone_links_a_checkpoint_and_all_wait_for_it() -> None:
    link = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint._link_checkpoint
    assert parameters(link) == ["trainer", "filepath", "linkpath"]
    assert source(link).endswith("trainer.strategy.barrier()") and "os.symlink(" in source(link)


def test_worker_seeds_depend_on_the_rank_given() -> None:
    assert parameters(seed.pl_worker_init_function) == ["worker_id", "rank"]
    connector = importlib.import_module("lightning.pytorch.trainer.connectors.data_connector")
    code = source(connector._process_dataloader)
    # ours, set in process_dataloader, comes first; Lightning then leaves a worker_init_fn alone
    assert code.index("strategy.process_dataloader(") < code.index("_auto_add_worker_init_fn(")
    assert "anddataloader.worker_init_fnisNone:" in source(connector._auto_add_worker_init_fn)


def test_rank_zero_only_is_one_function_for_everybody() -> None:
    assert rank_zero.rank_zero_only is rank_zero_only
    before = getattr(rank_zero_only, "rank", None)
    private.set_rank_zero(3)
    try:
        assert rank_zero.rank_zero_only.rank == 3
        assert rank_zero_only(lambda: "ran")() is None
    finally:
        rank_zero_only.rank = before  # type: ignore[attr-defined]


def test_the_epoch_loop_asks_for_sigterm_before_every_batch() -> None:
    assert parameters(_TrainingEpochLoop._broadcast_sigterm_tensor) == ["self"]
    code = source(_TrainingEpochLoop.advance)
    assert code.index("self._broadcast_sigterm_tensor()") < code.index("next(data_fetcher)")
    assert code.count("_broadcast_sigterm_tensor") == 1


def test_the_signal_connector_handles_sigterm_by_a_method_of_its_own() -> None:
    assert parameters(_SignalConnector._sigterm_notifier_fn) == ["self", "signum", "_"]
    assert "sigterm_handlers:list[_HANDLER]=[self._sigterm_notifier_fn]" in source(
        _SignalConnector.register_signal_handlers
    )
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert trainer.received_sigterm is False
    private.mark_sigterm_received(trainer)
    assert trainer.received_sigterm is True


def test_lightning_restores_signal_handlers_after_the_strategys_teardown() -> None:
    code = source(pl.Trainer._teardown)
    assert code.index("self.strategy.teardown()") < code.index("self._signal_connector.teardown()")
    assert "self._original_handlers={}" in source(_SignalConnector.teardown), "so calling it twice does no harm"


def test_clipping_by_norm_goes_through_the_plugins_method() -> None:
    assert parameters(Precision.clip_grad_by_norm) == ["self", "optimizer", "clip_val"]
    assert "self.clip_grad_by_norm(optimizer,clip_val)" in source(Precision.clip_gradients)
    assert "super().clip_gradients(" in source(MixedPrecision.clip_gradients)
    plugin, called = Precision(), []
    private.patch_clipping(plugin, lambda optimizer, value: called.append(value))
    plugin.clip_gradients(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0), 0.5)
    assert called == [0.5]


def test_the_grad_scaler_keeps_what_it_found_by_optimizer_and_device() -> None:
    scaler, p = torch.amp.GradScaler("cpu", init_scale=4.0), torch.ones(2, requires_grad=True)
    optimizer, agreed = torch.optim.SGD([p], lr=1.0), []
    plugin = MixedPrecision("16-mixed", "cpu", scaler)

    def agree(found: torch.Tensor) -> None:
        agreed.append(float(found))
        found.fill_(1.0)  # another rank has overflowed

    private.patch_found_inf(plugin, agree)
    private.patch_found_inf(plugin, agree)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert agreed == [0.0], "asked once"
    assert torch.equal(p.detach(), torch.ones(2)) and scaler.get_scale() == 2.0, "the step was skipped on that word"
    for method in ("unscale_", "_check_inf_per_device"):
        assert "found_inf_per_device" in source(getattr(torch.amp.GradScaler, method))
    assert "self._check_inf_per_device(optimizer)" in source(torch.amp.GradScaler.step)


def test_summary_callbacks_ask_a_method_for_their_summary_which_adds_up_numbers_of_parameters() -> None:
    code = source(ModelSummary.on_fit_start)
    assert "model_summary=self._summary(trainer,pl_module)" in code and "model_summary.total_parameters" in code
    assert RichModelSummary.on_fit_start is ModelSummary.on_fit_start
    assert ModelSummary(max_depth=2)._max_depth == 2
    code = source(Summary._get_summary_data)
    assert "map(get_human_readable_count,self.param_nums)" in code
    assert "self.total_parameters-self.total_layer_params" in code
    assert "returnsum(self.param_nums)" in source(Summary.total_layer_params.fget)
    code = source(pl.Trainer._run)
    assert code.index("self.strategy.setup(self)") < code.index('"on_fit_start"')


def test_the_module_reads_its_mesh_from_an_attribute() -> None:
    assert "returnself._device_mesh" in source(pl.LightningModule.device_mesh.fget)
    assert pl.LightningModule()._device_mesh is None
    assert pl.LightningModule()._trainer is None


def test_the_trainer_sets_up_in_the_order_the_strategy_counts_on() -> None:
    code = source(pl.Trainer._run)
    order = [
        "self.strategy.setup_environment()",
        "self._data_connector.prepare_data()",
        "_call_setup_hook(self)",
        "_call_configure_model(self)",
        "self._checkpoint_connector._restore_modules_and_callbacks(ckpt_path,weights_only)",
        "self.strategy.setup(self)",
        "self._signal_connector.register_signal_handlers()",
    ]
    assert [code.index(part) for part in order] == sorted(code.index(part) for part in order)


def test_a_step_of_automatic_optimization_is_made_of_the_parts_that_are_taken_over() -> None:
    code = source(_AutomaticOptimization.run)
    assert "closure=self._make_closure(" in code and "self._optimizer_step(batch_idx,closure)" in code
    assert parameters(_AutomaticOptimization._optimizer_step) == [
        "self",
        "batch_idx",
        "train_step_and_backward_closure",
    ]
    closure = Closure(lambda: None, lambda: None, lambda: None)  # type: ignore[arg-type, return-value]
    assert all(callable(getattr(closure, name)) for name in ("_step_fn", "_backward_fn", "_zero_grad_fn"))
    assert parameters(Precision._after_closure) == ["self", "model", "optimizer"]
    assert "self._after_closure(model,optimizer)" in source(Precision._wrap_closure)
    assert "self._after_closure(model,optimizer)" in source(MixedPrecision.optimizer_step)


def test_a_closure_is_bound_to_the_arguments_of_its_step() -> None:
    code = source(_AutomaticOptimization._make_step_fn)
    assert "returnpartial(self._training_step,kwargs)" in code
    loop = source(_TrainingEpochLoop._build_kwargs)
    assert 'kwargs["batch"]=batch' in loop
    assert "OrderedDict" in source(_TrainingEpochLoop.advance)


def test_where_a_fit_is_is_told_by_these_counters() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    trackers = [fit.epoch_progress, loop.batch_progress, loop.scheduler_progress]
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    for tracker in (*trackers, loop.manual_optimization.optim_step_progress, optimizer.step, optimizer.zero_grad):
        assert hasattr(tracker.total, "completed") and hasattr(tracker.current, "completed")
    assert {"_batches_that_stepped"} <= vars(loop).keys() and "_combined_loader" in vars(fit)
    trainer.state.stage = RunningStage.VALIDATING
    back = private.enter_training_stage(trainer)
    assert trainer.training
    back()
    assert trainer.validating


def test_a_fetched_batch_is_brought_to_the_device_in_three_steps() -> None:
    code = source(_TrainingEpochLoop.advance)
    steps = ("convert_input(batch)", "_on_before_batch_transfer(batch,dataloader_idx=0)", '"batch_to_device",batch')
    assert [code.index(s) for s in steps] == sorted(code.index(s) for s in steps)


def test_data_are_prepared_by_the_first_local_rank_after_the_environment_is_set_up() -> None:
    connector = importlib.import_module("lightning.pytorch.trainer.connectors.data_connector")._DataConnector
    code = source(connector.prepare_data)
    assert "local_rank_zero=trainer.local_rank==0" in code and "with_InfiniteBarrier():" in code
    assert parameters(connector.prepare_data) == ["self"]


def test_evaluation_loops_are_made_of_the_parts_that_are_taken_over() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    loops = private.evaluation_loops(trainer)
    assert [type(loop) for loop in loops] == [_EvaluationLoop] * 3 + [_PredictionLoop]
    arguments = ["self", "batch", "batch_idx", "dataloader_idx", "dataloader_iter"]
    for kind, step, end in (
        (_EvaluationLoop, "_evaluation_step", "_store_dataloader_outputs"),
        (_PredictionLoop, "_predict_step", "on_run_end"),
    ):
        assert parameters(getattr(kind, step)) == arguments
        code = source(inspect.getclosurevars(kind.run).nonlocals["loop_run"])
        assert f"self.{step}(batch,batch_idx,dataloader_idx,dataloader_iter)" in code
        assert code.count("self.setup_data()") == 1 and parameters(kind.setup_data) == ["self"]
        assert code.index("self.setup_data()") < code.index("self.reset()") < code.index(f"self.{step}(")
        # whatever is made of the results of a dataloader comes after it
        assert code.rindex(f"self.{step}(") < code.rindex(f"self.{end}()")
    # all metrics are computed when the hooks hear of it, which may save checkpoints
    code = source(_EvaluationLoop.on_run_end)
    ends = (
        "self._on_evaluation_epoch_end()",
        "update_eval_epoch_metrics()",
        "log_eval_end_metrics(",
        "self._on_evaluation_end()",
    )
    assert [code.index(part) for part in ends] == sorted(code.index(part) for part in ends)
    for loop, names in (
        (loops[0], ("_has_run", "_seen_batches_per_dataloader", "_logged_outputs")),
        (loops[3], ("_predictions", "epoch_batch_indices")),
    ):
        assert set(names) <= vars(loop).keys()
        assert {"_module_mode", "_combined_loader", "batch_progress"} <= vars(loop).keys()
        assert isinstance(loop.max_batches, list)


def test_predict_gets_a_sampler_and_a_batch_sampler_of_lightnings_own() -> None:
    data = importlib.import_module("lightning.pytorch.utilities.data")
    connector = importlib.import_module("lightning.pytorch.trainer.connectors.data_connector")
    assert "UnrepeatedDistributedSamplerWrapper(" in source(connector._get_distributed_sampler)
    assert "_IndexBatchSamplerWrapper(" in source(data._dataloader_init_kwargs_resolve_sampler)
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(5)), 2, False)
    wrapped = _IndexBatchSamplerWrapper(sampler)
    assert (wrapped.batch_size, wrapped.drop_last, wrapped.sampler) == (2, False, sampler.sampler)  # type: ignore[attr-defined]
    assert private.counts_indices(wrapped) and [next(iter(wrapped))] == wrapped.seen_batch_indices


def test_metrics_gather_by_a_function_that_their_module_names() -> None:
    code = source(torchmetrics.Metric.sync)
    assert "ifdist_sync_fnisNone:dist_sync_fn=gather_all_tensors" in code
    assert "gather_all_tensors" in vars(torchmetrics.metric)


def test_the_places_where_a_step_leaves_traces_are_where_we_look() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    connector = trainer._logger_connector
    for name in ("_current_fx", "_first_loop_iter", "_progress_bar_metrics", "_logged_metrics", "_callback_metrics"):
        assert name in connector.__dict__, name
    assert "_results" in dir(trainer)
    module = pl.LightningModule()
    assert module._param_requires_grad_state == {} and module._current_fx_name is None
    for name in ("batch", "batch_size", "dataloader_idx"):
        assert name in _ResultCollection(True).__dict__, name
    scaler = torch.amp.GradScaler("cpu")
    assert {"_scale", "_growth_tracker", "_per_optimizer_states"} <= scaler.__dict__.keys()


def test_loops_keep_where_they_are_in_trackers_and_plain_attributes() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=2, min_epochs=1)
    trainer.fit_loop.epoch_loop.min_steps = 1
    state = private_loops.where_loops_are(trainer)
    assert [set(each) for each in state["progress"]] == [
        {"epoch_progress"},
        {"batch_progress", "scheduler_progress"},
        {"optim_progress"},
        {"optim_step_progress"},
        {"batch_progress"},
    ]
    of_all = {"_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"}
    assert [set(each) - of_all for each in state["plain"]] == [
        {"max_epochs", "min_epochs", "_last_train_dl_reload_epoch", "_restart_stage"},
        {"max_steps", "min_steps", "_batches_that_stepped", "_skip_next_val", "_restart_stage"},
        {"_skip_backward"},
        set(),
        {"_has_run", "_last_val_dl_reload_epoch", "_restart_stage"},
    ]
    assert all(of_all <= set(each) for each in state["plain"])
    times = {"_last_val_time", "_train_start_time"}
    assert set(private_loops._OF_TRAINER) - times <= vars(trainer).keys()
    fit, evaluation = (importlib.import_module(f"lightning.pytorch.loops.{n}_loop") for n in ("fit", "evaluation"))
    assert "trainer._last_val_time=trainer._train_start_time" in source(fit._FitLoop.setup_data)
    assert "self.trainer._last_val_time=now" in source(evaluation._EvaluationLoop.on_run_end)


def test_every_training_batch_is_taken_from_the_fetcher_that_the_epoch_loop_is_given() -> None:
    fit, evaluation = (importlib.import_module(f"lightning.pytorch.loops.{n}_loop") for n in ("fit", "evaluation"))
    assert source(fit._FitLoop.advance).count("self.epoch_loop.run(self._data_fetcher)") == 1
    assert parameters(_TrainingEpochLoop.run) == ["self", "data_fetcher"]
    code = source(_TrainingEpochLoop.advance)
    taken = "batch,_,__=next(data_fetcher)"
    assert code.count(taken) == 1 and code.count("next(data_fetcher)") == 2  # the other is for a dataloader_iter
    assert code.index(taken) < code.index("self.batch_progress.is_last_batch=data_fetcher.done")
    assert 'trainer,"on_train_batch_start"' in code[code.index(taken) :]
    assert parameters(_TrainingEpochLoop._should_accumulate) == ["self"]
    # what a newcomer does by itself: the epoch of its sampler, validation data or not, and the way out
    assert "_set_sampler_epoch(dl,self.epoch_progress.current.processed)" in source(fit._FitLoop.on_advance_start)
    assert "trainer.val_dataloadersisNone" in source(fit._FitLoop.on_run_start)
    assert "self.setup_data()" in source(evaluation._EvaluationLoop)
    assert pl.Trainer(accelerator="cpu", logger=False).fit_loop._combined_loader is None
    assert isinstance(private_fetching.leave_fit(), Exception) and private.is_tuner_exit(private_fetching.leave_fit())
    assert pl.Trainer._fit_impl.__name__ == calls._FIT and "self._fit_impl," in source(pl.Trainer.fit)


def test_a_training_loader_is_the_strategys_before_its_first_batch_is_drawn() -> None:
    fit = importlib.import_module("lightning.pytorch.loops.fit_loop")
    code = source(fit._FitLoop.setup_data)
    assert "stage=RunningStage.TRAINING" in code
    assert code.index("_process_dataloader(trainer,trainer_fn,stage,dl)") < code.index("iter(self._data_fetcher)")
    # within a fit, validation has a stage of its own, also while its data are set up
    assert "trainer.validating=Trueself.epoch_loop.val_loop.setup_data()trainer.training=True" in source(
        fit._FitLoop.on_run_start
    )
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    assert trainer.state.stage is None and private.sets_up_training(None) is False


@pytest.mark.parametrize("workers", [0, 1])
def test_what_draws_the_batches_of_a_pass_is_found(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks the batch sampler for one pass after the other, and the pass for indices, here and not in a worker."""
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", True)
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    assert private_fetching.drawing(trainer) is None
    passes: list[Any] = []

    class Passes(BatchSampler):
        def __iter__(self) -> Any:
            passes.append(iter([[0], [1]]))
            return passes[-1]

    loader = DataLoader(TensorDataset(torch.arange(2)), num_workers=workers)
    assert isinstance(loader.batch_sampler, BatchSampler)
    loader.batch_sampler.__class__ = Passes
    combined = trainer.fit_loop._combined_loader = CombinedLoader(loader, "max_size_cycle")
    before = None
    for _ in range(2):
        batches = iter(combined)
        drawing = private_fetching.drawing(trainer)
        assert drawing is passes[-1] and drawing is not before
        assert [next(batches)[0][0].tolist(), next(batches)[0][0].tolist()] == [[0], [1]]
        assert next(passes[-1], None) is None
        before = drawing
    trainer.fit_loop._combined_loader = CombinedLoader([loader, loader], "max_size_cycle")
    iter(trainer.fit_loop._combined_loader)
    assert private_fetching.drawing(trainer) is None
    trainer.fit_loop._combined_loader.reset()
    combined.reset()


def test_an_entry_of_what_is_logged_is_made_as_we_make_it() -> None:
    code = source(_ResultCollection.log)
    assert (
        "meta.sync=_Sync(_should=sync_dist,fn=sync_dist_fn,_group=sync_dist_group,rank_zero_only=rank_zero_only)"
        in code
    )
    assert "self[key]=metric" in code and "metric=_ResultMetric(meta,isinstance(value,Tensor))" in code
    assert "sync_dist_fn=trainer.strategy.reduce" in source(pl.LightningModule.log)
    taken = code[code.index("meta=_Metadata(") : code.index("meta.sync=")]
    assert all(f"{name}=" in taken for name in parameters(_Metadata) if name != "_sync")
    assert parameters(_Sync) == ["fn", "_should", "rank_zero_only", "_op", "_group"]
    metric = _ResultMetric(_Metadata("training_step", "loss"), True)
    assert set(private_loops._VALUES) <= vars(metric).keys()
    assert vars(metric)["_defaults"].keys() == {"value", "cumulated_batch_size"}
    assert "self.has_reset=True" in source(_ResultMetric.reset)
    assert set(private_loops._CONNECTOR) <= vars(pl.Trainer(accelerator="cpu", logger=False)._logger_connector).keys()
    # what is reduced at the end of an epoch: what was logged in it, in the order of the collection
    assert "inself.items()ifnotv.has_resetand" in source(_ResultCollection.valid_items)


def test_the_grad_scaler_makes_its_tensors_in_the_first_backward() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert vars(scaler)["_scale"] is None and vars(scaler)["_growth_tracker"] is None
    scaler.scale(torch.ones(1))
    assert float(vars(scaler)["_scale"]) == scaler.get_scale() and int(vars(scaler)["_growth_tracker"]) == 0


def test_metrics_keep_their_counts_where_we_look() -> None:
    metric = torchmetrics.MeanSquaredError()
    assert {*metric_states._COUNTS, *metric_states._OF_METRICS - vars(torch.nn.Module()).keys()} <= vars(metric).keys()
    assert set(metric_states._OF_COLLECTIONS) <= vars(torchmetrics.MetricCollection([metric])).keys()


def test_the_mean_of_an_epoch_divides_by_the_reduced_number_of_samples() -> None:
    """The strategy's `reduce` gives the mean of whole numbers as a fraction and returns a new tensor."""
    code = source(_ResultMetric.compute)
    assert "value=self.meta.sync(self.value.clone())" in code
    assert "cumulated_batch_size=self.meta.sync(self.cumulated_batch_size)" in code


def test_copies_and_norms_of_many_tensors_are_made_at_once() -> None:
    several = [torch.tensor([3.0, 4.0]), torch.tensor([5.0])]
    copies = torch._foreach_clone(several)
    assert all(torch.equal(a, b) and a is not b for a, b in zip(several, copies, strict=True))
    assert [norm.item() for norm in torch._foreach_norm(several)] == [5.0, 5.0]
    version = several[0]._version
    several[0].add_(1)
    assert several[0]._version == version + 1


def test_the_strategy_overrides_what_exists_and_takes_the_same_arguments() -> None:
    from lightning_ntp import NTPStrategy

    # what replaces a method under the same name must be able to stand in for it
    for name, method in inspect.getmembers(NTPStrategy, inspect.isfunction):
        base = getattr(ParallelStrategy, name, None) or getattr(Strategy, name, None)
        if base is None or name == "__init__" or method is base:
            continue
        taken = inspect.signature(method).parameters
        if any(p.kind is p.VAR_POSITIONAL for p in taken.values()):
            continue
        missing = [p for p in parameters(base) if p not in taken and p not in ("args", "kwargs")]
        assert not missing, f"NTPStrategy.{name} does not take {missing}"


def _private_names(path: Path) -> set[str]:
    """Private names that a file imports from, or asks of, Lightning and torch objects."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("lightning", "torch"):
            found |= {alias.name for alias in node.names if alias.name.startswith("_")}
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                found.add(node.attr)
    return found


_CHECKED_ABOVE: dict[str, set[str]] = {
    "private.py": {
        "_collect_rng_states",
        "_set_rng_states",
        "_broadcast_sigterm_tensor",
        "_signal_connector",
        "_sigterm_notifier_fn",
        "_check_inf_per_device",
        "_per_optimizer_states",
        "_ntp_agrees",  # our own mark on the scaler
        "_after_closure",
        "_on_before_batch_transfer",
        "_backward_fn",
        "_batches_that_stepped",
        "_current_fx_name",
        "_logger_connector",
        "_checkpoint_connector",
        "_LRCallback",
        "_TunerExitException",
        "_link_checkpoint",
        "_ntp_inner",  # our own mark on the callback
        "_make_closure",
        "_optimizer_step",
        "_param_requires_grad_state",
        "_results",
        "_step_fn",
        "_zero_grad_fn",
        "_EvaluationLoop",
        "_PredictionLoop",
        "_IndexBatchSamplerWrapper",
        "_combined_loader",
        "_data_connector",
        "_module_mode",
        "_on_evaluation_end",
        "_max_depth",
        "_summary",
    },
    "private_loops.py": {
        "_BaseProgress",
        "_Metadata",
        "_ResultMetric",
        "_Sync",
        "_logger_connector",
        "_results",
        "_seen_batches_per_dataloader",
    },
    "private_fetching.py": {
        "_DataFetcher",
        "_TunerExitException",
        "_combined_loader",
        "_iterator",
        "_should_accumulate",
    },
    "strategy.py": {
        "_device_mesh",
        "_trainer",
        "_ntp_sharded",  # our own mark on the module
    },
    # what these touch is checked by tests of what they are for: launching, metrics, loggers, snapshots
    "launcher.py": {
        "_GlobalStateSnapshot",
        "_Launcher",
        "_SIGNUM",
        "_call_and_handle_interrupt",
        "_check_missing_main_guard",
        "_disable_module_memory_sharing",
        "_strategy",
    },
    "metric_states.py": {"_defaults"},
    "rank_zero.py": {
        "_ExperimentWriter",
        "_batches_that_stepped",
        "_experiment",
        "_kwargs",
        "_ntp_rows",
        "_rewrite_with_new_header",
        "_update",
        "_version",
    },
    "steps/buffer_copies.py": {"_buffers", "_copies", "_foreach_clone", "_version"},
    "steps/history.py": {"_foreach_norm", "_version"},
    "steps/manual_state.py": {"_foreach_clone"},
    # no parts of others: Python's, and our own
    "arrivals/newcomer.py": {"_exit"},
    "callbacks/interrupted_update.py": {"_getframe", "_groups"},
    "survival.py": {"_exit", "_runtime"},
}
"""What each file touches; every other one touches nothing."""


_FILES = sorted(str(path.relative_to(PACKAGE / "lightning")) for path in (PACKAGE / "lightning").rglob("*.py"))


@pytest.mark.parametrize("name", _FILES)
def test_private_parts_are_touched_only_where_a_test_here_looks(name: str) -> None:
    """A new touch belongs into private.py, and a check of it in here."""
    unchecked = _private_names(PACKAGE / "lightning" / name) - _CHECKED_ABOVE.get(name, set())
    assert not unchecked, f"{name} touches {sorted(unchecked)}"
