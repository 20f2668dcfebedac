"""The Lightning side of launching: what happens in a rank, what in the supervisor, and what comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_missing_main_guard,
    _disable_module_memory_sharing,
)
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.connectors.signal_connector import _SIGNUM
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_ntp.launch import Outcome, Supervisor, is_rank
from lightning_ntp.launch.call import Call
from lightning_ntp.launch.device_watch import DeviceWatch
from lightning_ntp.launch.device_watches import DeviceWatches
from lightning_ntp.launch.report import install_excepthook, report
from lightning_ntp.launch.run import result_of
from lightning_ntp.launch.supervisor import StartMethod
from lightning_ntp.lightning.arrivals import calls
from lightning_ntp.lightning.private import is_tuner_exit


class LaunchableStrategy(Protocol):
    """What the launcher asks of a strategy."""

    @property
    def num_processes(self) -> int:
        """How many processes to start, spares included."""

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Consulted for whether another launcher has started this process."""

    @property
    def accelerator(self) -> Accelerator | None: ...

    def check_before_launch(self) -> None:
        """Raise what can be known to be wrong before any rank starts."""

    def set_world_ranks(self) -> None:
        """Take rank and world size from the environment. Called in a rank whose strategy came by pickle or fork."""

    def judge(self, error: BaseException) -> BaseException:
        """What to raise for an exception in this rank. Does not return if the others go on without it."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model's state, on slot 0 at least. Collective; called after ``teardown``."""


class NTPLauncher(_Launcher):
    """Makes the launching process a supervisor that trains nothing; all ranks are its children's.

    Args:
        strategy: its ``num_processes`` says how many processes to start.
        start_method: as in :class:`~lightning_ntp.launch.Supervisor`.
        options: further keyword arguments of :class:`~lightning_ntp.launch.Supervisor` (grace periods, ``cold``).
    """

    def __init__(
        self,
        strategy: LaunchableStrategy,
        start_method: StartMethod = "popen",
        options: dict[str, Any] | None = None,
    ) -> None:
        self._strategy = strategy
        self._start_method: StartMethod = start_method
        self._options = dict(options or {})
        self._supervisor: Supervisor | None = None
        self._already_fit = False
        install_excepthook()

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._start_method == "fork"

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function`` in every rank.

        In a rank it is simply called. In the supervisor, ``"popen"`` never returns: it leaves with SystemExit and the
        job's exit code. The others return what slot 0 returned and bring the trained weights, the trainer's state
        and the logged metrics back.

        Raises:
            SystemExit: the job has ended (``"popen"``), or was stopped by SIGTERM.
            RanksFailedError: it failed (``"spawn"``, ``"fork"``).
            RuntimeError: another launcher (torchrun, SLURM) has already started this process as one of several.
        """
        if is_rank():
            _check_missing_main_guard()
            run = partial(_run_in_this_rank, self._strategy, function, args, kwargs)
            return calls.run(function, run, trainer)
        environment = self._strategy.cluster_environment
        if environment is not None and environment.creates_processes_externally and environment.world_size() > 1:
            raise RuntimeError(
                f"This process was started by another launcher ({type(environment).__name__}), which ends all ranks"
                " when one of them dies. Start the script once, with plain `python`: the strategy starts the ranks."
            )
        try:
            self._strategy.check_before_launch()
        except BaseException:
            if trainer is not None:
                _neutralise(trainer)
            raise
        if self._start_method == "popen":
            self._run_script(trainer)
        return self._run_call(function, args, kwargs, trainer)

    @override
    def kill(self, signum: _SIGNUM) -> None:
        """Pass a signal on to the ranks. Does nothing in a rank: the supervisor signals all of them."""
        if self._supervisor is not None:
            self._supervisor.kill(int(signum))

    def __getstate__(self) -> dict[str, Any]:
        # the supervisor's; a lambda could not travel to spawned ranks
        options = {name: value for name, value in self._options.items() if name != "may_restart"}
        return {**self.__dict__, "_supervisor": None, "_options": options}

    def _run_script(self, trainer: pl.Trainer | None) -> None:
        outcome = self._supervise(None, trainer)
        if outcome.cause is not None:
            sys.stdout.flush()
            print(outcome.describe(), end="", file=sys.stderr, flush=True)
        raise SystemExit(outcome.exit_code)

    def _run_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trainer: pl.Trainer | None
    ) -> Any:
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            if self._already_fit:
                raise NotImplementedError(
                    "This Trainer has already been fit by ranks that returned to the caller, and its loops' progress"
                    " stayed with them. Make a new Trainer and continue with `fit(ckpt_path=...)`."
                )
            self._already_fit = True
        snapshot = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        call = Call(_run_and_collect, (self, trainer, function, args, kwargs, snapshot))
        try:
            output = result_of(self._supervise(call, trainer))
        except BaseException:
            if trainer is not None:
                _neutralise(trainer)
            raise
        if trainer is None:
            return output
        _bring_back(output, trainer)
        return output.trainer_results

    def _supervise(self, call: Call | None, trainer: pl.Trainer | None) -> Outcome:
        try:
            ranks = self._strategy.num_processes - int(self._options.get("spares", 0))
            watch = _device_watch(trainer)
            self._supervisor = Supervisor(ranks, self._start_method, call, **self._options, watch=watch)
            return self._supervisor.run()
        finally:
            self._supervisor = None
            if trainer is not None and call is None:
                _neutralise(trainer)


def _device_watch(trainer: pl.Trainer | None) -> DeviceWatch | None:
    """What callbacks want watched from here."""
    callbacks = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    found = [callback for callback in callbacks if hasattr(callback, "device_watch")]
    kinds = [type(callback) for callback in found]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"callbacks has {kinds.count(kind)} {kind.__name__}: one of each kind; give it all of it")
    if not found:
        return None
    watches: list[DeviceWatch] = [callback.device_watch() for callback in found]
    return watches[0] if len(watches) == 1 else DeviceWatches(watches)


class _WorkerOutput(NamedTuple):
    """What slot 0 sends back to the caller."""

    best_model_path: str | None
    weights: dict[str, Any] | None
    """The whole model's, by its unsharded names; only after ``fit``."""
    trainer_state: TrainerState
    trainer_results: Any
    callback_metrics: dict[str, Any]


def _run_in_this_rank(
    strategy: LaunchableStrategy, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if is_tuner_exit(error):
            raise
        # Before the caller runs callbacks: one of them may wait for a peer that never comes, or end the process.
        cause = strategy.judge(error)
        report(cause)
        if cause is not error:
            raise cause from error
        raise


def _run_and_collect(
    launcher: NTPLauncher,
    trainer: pl.Trainer | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    snapshot: _GlobalStateSnapshot | None,
) -> Any:
    """In a rank: run ``function`` and gather what the caller wants back. Collective: the weights may be sharded."""
    if snapshot is not None:
        snapshot.restore()
        if isinstance(launcher._strategy.accelerator, CPUAccelerator):
            args, kwargs = _disable_module_memory_sharing((args, kwargs))
    launcher._strategy.set_world_ranks()
    if trainer is None:
        return move_data_to_device(_run_in_this_rank(launcher._strategy, function, args, kwargs), "cpu")
    # The one which encloses the launch runs in the caller's process; exceptions are for the ranks' callbacks to see.
    # It leads back into `launch`, which in a rank just calls the function.
    results = _call_and_handle_interrupt(trainer, function, *args, **kwargs)
    weights = launcher._strategy.lightning_module_state_dict() if trainer.state.fn == TrainerFn.FITTING else None
    checkpoint = trainer.checkpoint_callback
    best = getattr(checkpoint, "best_model_path", None) if checkpoint is not None else None
    metrics = apply_to_collection(trainer.callback_metrics, Tensor, lambda tensor: tensor.detach().cpu())
    output = _WorkerOutput(best, weights, trainer.state, results, dict(metrics))
    return move_data_to_device(output, "cpu")


def _bring_back(output: _WorkerOutput, trainer: pl.Trainer) -> None:
    checkpoint = trainer.checkpoint_callback
    if checkpoint is not None and hasattr(checkpoint, "best_model_path"):
        checkpoint.best_model_path = str(output.best_model_path)
    if output.weights is not None:
        # Not strict: layers may have been added or removed in the ranks.
        trainer.lightning_module.load_state_dict(output.weights, strict=False)
    trainer.state = output.trainer_state
    trainer.callback_metrics.update(output.callback_metrics)


def _neutralise(trainer: pl.Trainer) -> None:
    """Nothing of the user's may run in the supervisor when the launch raises.

    Lightning treats the SystemExit like any exception: ``OnExceptionCheckpoint`` would save the supervisor's untrained
    weights, loggers would mark the run as failed.
    """
    trainer.callbacks = []  # type: ignore[attr-defined]
    trainer.loggers = []
    trainer.datamodule = None  # type: ignore[attr-defined]
