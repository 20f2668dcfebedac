"""``Trainer(strategy="ntp")``: data parallelism over replicas, nonuniform tensor parallelism inside each."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ntp import engine
from lightning_ntp.comm import (
    Generation,
    GradientSync,
    Runtime,
    ShardedState,
    broadcast_start,
    runtime,
)
from lightning_ntp.launch import RankIdentity, is_rank, progress
from lightning_ntp.launch.jobs import relayout_demand
from lightning_ntp.launch.progress import Tag
from lightning_ntp.lightning import checkpoint as checkpoints
from lightning_ntp.lightning import private
from lightning_ntp.lightning.arrivals import calls
from lightning_ntp.lightning.arrivals.fit import Arrivals
from lightning_ntp.lightning.arrivals.identity import describe_job
from lightning_ntp.lightning.arrivals.told import Told
from lightning_ntp.lightning.averaging import refuse_averaging_callbacks
from lightning_ntp.lightning.batches import Batches
from lightning_ntp.lightning.checkpoint_io import WholeFileIO, put_link
from lightning_ntp.lightning.collectives import ReplicaCollectives
from lightning_ntp.lightning.data import check_sampler, seed_workers_by_replica
from lightning_ntp.lightning.draining import Draining
from lightning_ntp.lightning.environment import NTPEnvironment, device_number
from lightning_ntp.lightning.evaluation import Evaluation
from lightning_ntp.lightning.launcher import NTPLauncher
from lightning_ntp.lightning.mesh import Mesh
from lightning_ntp.lightning.metrics import count_replicas_once
from lightning_ntp.lightning.model_plan import plan_of
from lightning_ntp.lightning.optimizers import check_optimizers
from lightning_ntp.lightning.planned_changes import PlannedChanges
from lightning_ntp.lightning.preflight import check_model, check_trainer
from lightning_ntp.lightning.rank_zero import share_logger_versions
from lightning_ntp.lightning.redundancy import Redundancy
from lightning_ntp.lightning.relayout import Relayout
from lightning_ntp.lightning.sample_shares import SampleShares
from lightning_ntp.lightning.settings import (
    DEFAULT_HEARTBEAT,
    DEFAULT_TIMEOUT,
    as_timedelta,
    check_choices,
    check_counts,
    check_times,
)
from lightning_ntp.lightning.steps.attribute_copies import remember_containers
from lightning_ntp.lightning.steps.snapshot import SnapshotRecorder
from lightning_ntp.lightning.steps.transaction import Transaction
from lightning_ntp.lightning.steps.whole_state import WholeState
from lightning_ntp.lightning.stopping import StopTogether
from lightning_ntp.lightning.summary import UnshardedSummary
from lightning_ntp.lightning.survival import Survival, survival_of
from lightning_ntp.lightning.verification import Verification
from lightning_ntp.parallel import Plan, ShardedModel, TensorParallelContext, parallelize
from lightning_ntp.plan import Topology, TopologyError
from lightning_ntp.plan.policy import RecoveryPolicy
from lightning_ntp.plan.topology import as_degrees, as_size, resolve_degrees

T = TypeVar("T")


class NTPStrategy(ParallelStrategy):
    """Trains over replicas, each split over devices by tensor parallelism of any degree.

    Keyword names follow :class:`lightning.pytorch.strategies.ModelParallelStrategy`. ``batch_size`` of a dataloader
    is per replica; the global batch is that times the number of replicas.

    Args:
        tensor_parallel_size: Degree of every replica. ``"auto"``: the devices per node when there are several
            nodes; on one node two replicas when the device count is even and at least 4, else one.
        data_parallel_size: Number of replicas, or ``"auto"``.
        degrees: The degree of every replica, for replicas that differ: ``(4, 3)`` starts on 7 devices.
        plan: Module-name patterns to styles, in place of the module's ``configure_tp_plan()``.
        bucket_cap_mb: Size at which a gradient bucket is closed, in MiB.
        process_group_backend: ``"gloo"``, ``"nccl"``; chosen by the device if None.
        timeout: For collectives and for reaching the supervisor's store; seconds or a timedelta.
        start_method: How ranks start: ``"popen"`` re-runs the script, ``"spawn"`` pickles the trainer, ``"fork"``
            forks (notebooks).
        save_distributed_checkpoint: Must be False: checkpoints are single files with unsharded names and shapes.
        min_tensor_parallel_size: A replica that loses ranks shrinks down to this degree; below it, it is dropped.
        max_failures: How many failures are tolerated within ``failure_window``; any number if None. Ranks that are lost
            together are one failure.
        failure_window: Seconds or a timedelta; the whole job if None.
        heartbeat: How long a rank may show no progress while others wait for it before it is taken as hung, and killed;
            seconds or a timedelta, None for ever. Five times the longest silence that came to a good end, if that is
            more; ten times as long in the first step, evaluation batch or checkpoint. Must be less than ``timeout``.
        verify: Whether the first training step of a fit is tried out first, sharded and unsharded, and compared, and
            all copies of parameters are compared after the first two steps; an error says what is wrong. ``"auto"``:
            if the unsharded parameters and gradients take at most 512 MiB; with manual optimization only the copies.
            True: whatever the size. False: never.
        redundancy: ``"neighbor"``: every rank's shards (parameters and optimizer state) are kept in the host memory of
            a neighbour too, so that a single replica survives the loss of a rank, and several the loss of the same
            index everywhere. The copies are renewed every k steps, k chosen so that they cost under 1 % of the steps;
            after such a loss the parameters go back at most about k steps, which are done again. None: no copies.
        max_restarts: How often each slot is started again after its rank was lost, or left because its replica was
            dropped; the new rank joins the others while they train. 0: never, but for ``lightning-ntp restart SLOT``.
        restart_backoff: How long to wait before the first restart of a slot, seconds or a timedelta; twice as long
            before each further one, up to a minute.
        may_restart: Called with the slot before each restart, in a thread of the launching process: whether its device
            is fit for it. False, or a text that says why not, forbids it, and it is called again after the backoff;
            True, None or an empty text allow it.
        spares: So many of the Trainer's devices train nothing: each has a process with the model built and everything
            imported, which takes an empty place in the step that has lost it, or in the next one.

    Raises:
        ValueError: If a setting is out of range; the message names it.
    """

    strategy_name = "ntp"
    # read by Lightning 2.6.6 for strategies it does not know: without it no sampler is injected and
    # `self.log(sync_dist=True)` silently does nothing
    is_distributed = True

    def __init__(
        self,
        tensor_parallel_size: Literal["auto"] | int = "auto",
        data_parallel_size: Literal["auto"] | int = "auto",
        degrees: Sequence[int] | None = None,
        plan: Plan | None = None,
        bucket_cap_mb: float = 25,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        save_distributed_checkpoint: bool = False,
        min_tensor_parallel_size: int = 1,
        max_failures: int | None = None,
        failure_window: float | timedelta | None = None,
        heartbeat: float | timedelta | None = DEFAULT_HEARTBEAT,
        verify: Literal["auto"] | bool = "auto",
        redundancy: Literal["neighbor"] | None = None,
        max_restarts: int = 0,
        restart_backoff: float | timedelta = 1.0,
        may_restart: Callable[[int], bool | str | None] | None = None,
        spares: int = 0,
    ) -> None:
        super().__init__()
        check_counts(spares, max_restarts, bucket_cap_mb)
        check_choices(verify, redundancy, start_method, process_group_backend, save_distributed_checkpoint)
        if may_restart is not None and not callable(may_restart):
            raise ValueError(f"may_restart={may_restart!r} must be a function of a slot, or None")
        # sizes are held against the device count later; here so that a wrong number is told where it was given
        for name, size in (
            ("tensor_parallel_size", tensor_parallel_size),
            ("data_parallel_size", data_parallel_size),
        ):
            if size != "auto":
                as_size(name, size)
        self._tensor_parallel_size = tensor_parallel_size
        self._data_parallel_size = data_parallel_size
        self._degrees = None if degrees is None else as_degrees(degrees)
        self.plan = plan
        self._bucket_cap_bytes = int(bucket_cap_mb * 2**20)
        self._process_group_backend = process_group_backend
        self._timeout, silence = check_times(timeout, heartbeat)
        self._supervision: dict[str, Any] = {
            "heartbeat": silence,
            "max_restarts": max_restarts,
            "restart_backoff": as_timedelta("restart_backoff", restart_backoff),
            "may_restart": may_restart,
            "spares": spares,
        }
        """What the supervisor is told."""
        self.start_method: Literal["popen", "spawn", "fork"] = start_method
        self.num_nodes = 1
        self.sharded: ShardedModel | None = None
        self._runtime: Runtime | None = None
        self._sync: GradientSync | None = None
        self._sync_blocked = False
        self._first_steps: engine.FirstStepCheck | None = None
        self._compute_time: engine.ComputeTime | None = None
        self._verify: Literal["auto"] | bool = verify
        self._verification: Verification | None = None
        self._resumable: set[Optimizer] = set()
        self._held: dict[Optimizer, int] = {}
        """How many parameters each optimizer had when it was checked."""
        self.policy = RecoveryPolicy(min_tensor_parallel_size, max_failures, failure_window)
        self.fault_points: list[Callable[[str], None]] = []
        """Called with "sync" and "vote" inside of a step, and with "checkpoint" while one is written: for fault
        injection.
        """
        self._survival: Survival | None = None
        self._with_copies = redundancy == "neighbor"
        self._redundancy: Redundancy | None = None
        self._changes: PlannedChanges | None = None
        self._told: Told | None = None
        # methods rather than lambdas: the strategy is pickled for spawned ranks
        self._collectives = ReplicaCollectives(self._get_generation, self._get_operations, self._get_transaction)
        self._whole = WholeState(self._get_model, self._get_generation, self._collectives)
        self._batches = Batches(self._get_generation)
        self._stop = StopTogether(self._get_generation, self._leave)
        self._removed: list[tuple[int, Any]] = []
        """Checkpoints that rank 0 was to remove, with the number of operations completed before."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        # the supervisor's; a lambda could not travel to spawned ranks
        return {**super().__getstate__(), "_supervision": {**self._supervision, "may_restart": None}}

    # ---- identity ---------------------------------------------------------------------------------------------

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        # Lightning hands over the environment it detected; rank and world size must follow the generation instead
        self._cluster_environment: ClusterEnvironment | None
        if environment is None or isinstance(environment, NTPEnvironment):
            self._cluster_environment = environment
        elif environment.creates_processes_externally and not is_rank():
            self._cluster_environment = environment  # the launcher refuses it, with the reason
        else:
            self._cluster_environment = NTPEnvironment(supervises=self.start_method == "popen")

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        # the slot's own: ranks change
        return self.parallel_devices[device_number() if is_rank() else 0]

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFileIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def topology(self) -> Topology:
        """The live members; before the ranks start, what was asked for."""
        if self._runtime is not None:
            return self._runtime.generation.topology
        return self._launch_topology

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degree of every replica.

        Raises:
            TopologyError: If the sizes asked for do not multiply to the devices.
        """
        return self.topology.degrees

    @property
    def _launch_topology(self) -> Topology:
        """What was asked for, whoever of it is still alive."""
        spares: int = self._supervision["spares"]
        devices = self.num_processes - spares
        if devices < 1:
            raise TopologyError(
                f"spares={spares}: each spare needs a device of its own, beside those that train, but there are"
                f" {self.num_processes} in all: give Trainer(devices=...) more, or fewer spares"
            )
        try:
            degrees = resolve_degrees(
                devices, self.num_nodes, self._tensor_parallel_size, self._data_parallel_size, self._degrees
            )
        except TopologyError as error:
            if not spares:
                raise
            raise TopologyError(
                f"{error} (of Trainer(devices={self.num_processes}), spares={spares} wait beside those that train)"
            ) from None
        return Topology.start(degrees)

    @property
    def generation(self) -> Generation:
        """The current generation of process groups.

        Raises:
            RuntimeError: Outside of a running rank.
        """
        if self._runtime is None:
            raise RuntimeError("process groups exist only inside the ranks, once the trainer has set them up")
        return self._runtime.generation

    def _leave(self, reason: str) -> NoReturn:
        assert self._survival is not None
        self._survival.leave(reason)

    def _get_generation(self) -> Generation:
        return self.generation

    def _get_model(self) -> ShardedModel | None:
        return self.sharded

    def _get_operations(self) -> engine.Operations:
        assert self._survival is not None
        return self._survival.operations

    def _get_transaction(self) -> Transaction | None:
        return self._transaction

    @property
    def _transaction(self) -> Transaction | None:
        return self._survival.transaction if self._survival is not None else None

    @property
    def slot(self) -> int:
        """This rank's fixed place, as logs and :meth:`drain` call it; its rank may change, its slot does not."""
        return self.generation.slot

    @property
    def replica(self) -> int:
        """The replica this rank belongs to."""
        return self.generation.replica

    @property
    def device_mesh(self) -> Mesh:
        """Live view of replicas and tensor-parallel indices."""
        assert self.generation is not None and self._runtime is not None
        return Mesh(self._runtime)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # those of the launch: the sampler defines the global batches, whoever is alive to share them
        replica = self._runtime.generation.replica if self._runtime is not None else 0
        return {"num_replicas": len(self.topology.replicas), "rank": replica}

    def set_world_ranks(self) -> None:
        """Let ``rank_zero_only`` functions know the rank."""
        if self.cluster_environment is not None:
            members = self.num_processes - int(self._supervision["spares"])
            self.cluster_environment.set_world_size(members * self.num_nodes)
            private.set_rank_zero(self.global_rank)

    # ---- set up -----------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        check_trainer(self, self._layer_sync)
        self.policy.check_degrees(self.degrees)
        if self._with_copies and sum(self.degrees) == 1:
            raise ValueError(
                "redundancy='neighbor' needs a neighbour: with one device nobody is left when its rank dies; leave it"
                " out, and save checkpoints"
            )
        self._launcher = NTPLauncher(self, self.start_method, self._supervision)

    def check_before_launch(self) -> None:
        """Called by the launcher in the supervisor, before any rank starts.

        Raises:
            ValueError: If the model or its plan cannot work.
        """
        if self.lightning_module is not None:
            check_model(self, self.lightning_module)

    def judge(self, error: BaseException) -> BaseException:
        """Called by the launcher when something was raised in this rank: see :meth:`Survival.judge`."""
        return error if self._survival is None else self._survival.judge(error)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        identity = RankIdentity.from_environ()
        self._runtime = runtime.start(
            (identity.store_host, identity.store_port),
            identity.slot,
            self._launch_topology,
            self._process_group_backend or ("nccl" if self.root_device.type == "cuda" else "gloo"),
            self._timeout,
            self.root_device,
            with_copies=self._with_copies,
            joins=identity.joins,
        )
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._told = Told(self._runtime, calls.current(), trainer.state.fn == TrainerFn.FITTING)
        self.set_world_ranks()
        self.lightning_module._device_mesh = self.device_mesh  # type: ignore[assignment]
        self._runtime.repeat = self._collectives.run
        count_replicas_once()
        self._survival = survival_of(self._runtime)
        self._survival.begin(trainer, self.policy, self._follow_change, self._loaded_at)
        self._share_random_state()
        share_logger_versions(trainer, self.broadcast)
        private.patch_prepare_data(trainer, partial(self._collectives.run, "prepare_data"))
        private.patch_restore(trainer, self._restore_together)
        if self._runtime.joining:
            private.patch_resume(trainer)
        private.patch_lr_finder()
        private.patch_links(trainer, put_link, partial(self._collectives.together, "a link to a checkpoint"))

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module, fits = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if "dataloader_iter" in _step_arguments(module):
            raise TypeError(
                f"{type(module).__name__}.training_step takes a dataloader_iter: a step must be given its batch, so"
                " that it can be replayed; take (batch, batch_idx)"
            )
        if self.topology.full_degree > 1:
            refuse_averaging_callbacks(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._cut(module)
        self.model_to_device()
        assert self.sharded is not None and self._runtime is not None
        self.sharded.relayout()  # lookup tables follow the device
        if fits:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self.sharded, module)
            self._whole.forget_loaded()
            self._resumable = set()
            self._held = {optimizer: _count(optimizer) for optimizer in self.optimizers}
            if self._sync is not None:
                self._sync.close()
                self._sync = None
            if not self._runtime.joining:
                self._sync = GradientSync(self.sharded, self.generation, self._runtime.lane, self._bucket_cap_bytes)
            self._first_steps = engine.FirstStepCheck(self.sharded, self.generation)
            self._compute_time = engine.ComputeTime(self.root_device)
            self._collectives.waiting = self._compute_time.waiting
        sharded = self.sharded
        private.patch_summaries(trainer, lambda module, depth: UnshardedSummary(module, sharded, depth))
        self.setup_precision_plugin()
        private.patch_clipping(self.precision_plugin, self._clip_by_norm)
        private.patch_found_inf(self.precision_plugin, self._agree_on_overflow)
        self._batches.reset()
        self._set_up_recovery(trainer, fits)
        if self._with_copies:
            self._set_up_redundancy(fits)
        # once more: `prepare_data` and loggers run on some ranks only, and may have drawn numbers
        self._share_random_state()
        self._stop.install(trainer)

    def _set_up_recovery(self, trainer: Trainer, fits: bool) -> None:
        """From now on steps and evaluation batches are transactions."""
        survival = self._survival
        assert survival is not None
        evaluation = Evaluation(
            trainer,
            survival,
            survival.operations,
            self._get_generation,
            partial(self._stop.vote_of_replica, trainer),
            self.barrier,
            self._batches.evaluation,
            survival.rows,
            self._batches.remember,
            self.root_device,
        )
        transaction = None
        if fits:
            transaction = Transaction(
                trainer, survival, self._vote, survival.rows, self._remember_step, self.root_device
            )
            transaction.registered = self._whole.registered
            # whatever a callback does at the end, such as an upload by one rank, may take any time
            private.before_train_end(trainer, lambda: progress.current().back_to(Tag.SETUP))
            assert self.sharded is not None
            self._verification = Verification(
                self._verify, trainer, self.sharded, self._get_generation, transaction.snapshot
            )
        survival.install(evaluation, transaction)
        self._stop.riders, self._changes = [], None
        if transaction is not None:
            assert self.lightning_module is not None
            self._set_up_changes(trainer, survival, transaction)
            survival.engine.keeps_gradients = not self.lightning_module.automatic_optimization

    def _set_up_changes(self, trainer: Trainer, survival: Survival, transaction: Transaction) -> None:
        """From now on ranks can leave and join between two updates."""
        assert self._runtime is not None and self.sharded is not None and self._first_steps is not None
        assert self._told is not None and self._verification is not None
        arrivals = Arrivals(
            trainer,
            self._runtime,
            survival,
            self.sharded,
            self._states,
            self._batches,
            self._first_steps,
            self._verification,
            self._whole,
            self.root_device,
            self._told,
        )
        identity = RankIdentity.from_environ()
        demand = None if identity.job_dir is None else relayout_demand(identity.job_dir)
        changes = self._changes = PlannedChanges(
            Draining(self._runtime, survival.engine, self._leave),
            Relayout(self._runtime, survival.engine, demand),
            arrivals,
            SampleShares(self._runtime, trainer, self._batches, self.record_event),
        )
        survival.shares = changes.shares
        changes.install(transaction, self._stop)
        self._stop.drain = self._drain_self
        if self._runtime.joining:
            trainer.num_sanity_val_steps = 0

    def drain(self, slot: int, reason: str = "") -> None:
        """Let a slot leave as planned, in one of the next training steps: no step is lost and none is done again.

        Its units travel to the others beside a step, which is finished without it. The rank ends with exit code 0. On
        any rank, from any callback; a request outside of training waits for the next steps.

        Args:
            slot: Who leaves, see ``trainer.strategy.topology``.
            reason: Why, for the log.

        Raises:
            ValueError: If there is no such slot alive, or the job could not go on without it; says why.
            RuntimeError: Outside of a fit.
        """
        if self._changes is None:
            raise RuntimeError(f"drain(slot={slot}): ranks can leave as planned only while a fit is running")
        self._changes.draining.request(slot, reason)

    def relayout(self) -> None:
        """Let all slots go back to their places of the launch, in one of the next training steps.

        After losses and returns the slots of a replica may hold other parts of the model than at launch: as right, but
        perhaps not as near to those they exchange gradients with. On any rank, from any callback.

        Raises:
            RuntimeError: Outside of a fit.
        """
        if self._changes is None:
            raise RuntimeError("relayout(): slots can go back to their places only while a fit is running")
        self._changes.relayout.request()

    def share_samples(self, counts: Mapping[int, int] | None) -> None:
        """Let replicas take other numbers of samples of every global batch, from one of the next training steps on.

        The global batch and its gradient stay the same, and every sample is trained on once per epoch. The newest
        request counts; the shares hold until the next one, or until a replica comes back that they leave out. On any
        rank, from any callback of a fit, ``on_train_start`` or later.

        Args:
            counts: Live replica -> its samples of a whole batch of the dataloaders, at least one each; together as many
                as a global batch has, ``batch_size`` times the replicas of the launch. None: equally many, as in the
                launch.

        Raises:
            ValueError: If a count is wrong, or the training data do not allow it: see :attr:`sharing_problem`.
            RuntimeError: Outside of a fit.
        """
        if self._changes is None:
            raise RuntimeError("share_samples(): samples can move between replicas only while a fit is running")
        self._changes.shares.request(counts)

    @property
    def sharing_problem(self) -> str:
        """Why :meth:`share_samples` would be refused whatever the counts; empty if it would not.

        It takes a single DataLoader over a map-style dataset, with the sampler that the Trainer has put in.
        """
        if self._changes is None:
            return "samples can move between replicas only while a fit is running"
        return self._changes.shares.why_not

    @property
    def sample_shares(self) -> dict[int, int]:
        """Live replica -> its samples of a whole batch now; empty outside of a fit, or if they cannot be told."""
        return self._changes.shares.counts if self._changes is not None else {}

    @property
    def coming_sample_shares(self) -> dict[int, int]:
        """As :attr:`sample_shares`, once the changes have come that were announced, or asked for on this rank."""
        return self._changes.shares.coming if self._changes is not None else {}

    def _drain_self(self, reason: str) -> bool:
        return self._changes is not None and self._changes.may_drain(self.generation.slot, reason)

    def _set_up_redundancy(self, fits: bool) -> None:
        """From now on neighbours keep copies of each other's shards."""
        assert self.sharded is not None and self._survival is not None
        redundancy = self._redundancy = Redundancy(
            self.sharded, self._all_states, self._get_generation, self._collectives.together, self.num_processes
        )
        alone = self._runtime is None or self._runtime.joining
        if not alone:
            redundancy.check_memory(self.optimizers if fits else [])
        self._survival.engine.copies = redundancy.copies
        self._survival.renew = redundancy.renew
        if self._survival.transaction is not None:
            redundancy.keep_history(self._survival.transaction)
        self._stop.riders.append(redundancy)
        if not alone:
            redundancy.copy_now(0)

    def _all_states(self) -> list[ShardedState]:
        """What neighbours keep copies of, besides the parameters."""
        return [*(optimizer.state for optimizer in self.optimizers), *self._whole.registered]

    def _states(self) -> list[ShardedState]:
        """What moves with the parameters."""
        assert self.sharded is not None and self._survival is not None
        if any(record["loaded"] == self._survival.committed for record in self._survival.records.values()):
            return [*self._whole.registered]
        for optimizer in self.optimizers:
            checkpoints.check_optimizer_state(self.sharded, optimizer)  # in the first step nobody has looked yet
        return [*(optimizer.state for optimizer in self.optimizers), *self._whole.registered]

    def _follow_change(self) -> None:
        assert self._runtime is not None and self._survival is not None
        if self._loaded_at() == self._survival.committed:
            self._whole.load_again(self.optimizers)
        if self._sync is not None:
            self._sync.close()
        if self._transaction is not None:
            assert self.sharded is not None
            self._sync = GradientSync(self.sharded, self.generation, self._runtime.lane, self._bucket_cap_bytes)
        if self._first_steps is not None:
            self._first_steps.enter(self.generation)
        self.set_world_ranks()
        if self._changes is not None:
            self._changes.joining.hand_again()  # who was to hand the newest batch on may be gone
        for completed, path in self._removed if self.is_global_zero else ():
            if completed == self._survival.operations.completed:
                super().remove_checkpoint(path)  # the rank 0 that died may not have come to it

    def _cut(self, module: LightningModule) -> None:
        """Cut the model for this rank's place. Collective: all begin with rank 0's values."""
        assert self._survival is not None and self._runtime is not None
        recovery, slot = self._survival.engine, self._runtime.slot
        known = getattr(module, "_ntp_sharded", None)
        if isinstance(known, ShardedModel) and known.module is module:
            checkpoints.check_still_fits(known, self.generation)
            sharded = known  # `test` after `fit` in one script
        else:
            sharded = self._parallelized(module)

        def attach() -> None:
            if not sharded.is_cut:
                layout = recovery.layout
                # a spare has no place yet; any will do until it gets what it is to hold
                replica, index = layout.place(slot if slot in layout.slots else layout.slots[0])
                sharded.place.update(layout.family, layout.degrees[replica], index, self.generation.tensor_parallel)
                sharded.cut()
                module._ntp_sharded = sharded  # type: ignore[assignment]
            self.sharded = sharded
            recovery.attach(sharded, self._states)

        def start() -> None:
            if not sharded.is_cut:
                broadcast_start(sharded, self.generation)

        recovery.will_attach(attach)
        self._collectives.together("the start", start)
        recovery.catch_up()

    def _parallelized(self, module: LightningModule) -> ShardedModel:
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise RuntimeError(
                    f"the parameter {name!r} is on the meta device: create parameters with values in configure_model"
                )
        generation = self.generation
        plan = plan_of(module, self.plan) if generation.topology.full_degree > 1 else {}
        place = TensorParallelContext(
            generation.topology.family, generation.degree, generation.index, generation.tensor_parallel
        )
        return parallelize(module, plan, place)

    def _share_random_state(self) -> None:
        """Tensor-parallel peers draw the same numbers outside sharded regions, whether the user seeded or not."""

        def share() -> None:
            generation = self.generation
            if generation.degree > 1:
                states = [private.collect_rng_states() if generation.is_first_of_replica else None]
                group = generation.tensor_parallel
                dist.broadcast_object_list(states, group=group, group_src=0, device=self.root_device)
                assert states[0] is not None
                private.set_rng_states(states[0])

        self._collectives.together("the random state", share)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        kwargs = self.distributed_sampler_kwargs
        check_sampler(dataloader, kwargs["num_replicas"], kwargs["rank"])
        seed_workers_by_replica(dataloader, kwargs["rank"])
        if self._changes is not None and private.sets_up_training(self.lightning_module):
            self._changes.shares.watch(dataloader)
        return dataloader

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None and self.sharded is not None
        batches = self.lightning_module.trainer.num_training_batches
        number = -1 if math.isinf(batches) else int(batches)

        def compare() -> bool:
            return engine.all_equal(number, self.generation.world, self.root_device)

        if not self._collectives.run("comparing the numbers of batches", compare):
            raise ValueError(
                f"replicas have different numbers of training batches ({number} in replica {self.replica}): every step"
                " needs all of them. Leave the sampler to the Trainer, make yours with"
                " **trainer.distributed_sampler_kwargs, or set limit_train_batches to the smallest number"
            )
        degrees, replicas = self.degrees, len(self.topology.live_replicas)
        rank_zero_info(
            f"ntp: degrees {degrees}, {'a replica' if replicas == 1 else 'replicas'} over {sum(degrees)} devices; a"
            f" global batch is {replicas} x batch_size"
            + (
                "; with one replica nothing has a second copy, so the loss of a rank ends the job"
                " (redundancy='neighbor' keeps one)" * (replicas == 1 and not self._with_copies)
            )
        )
        if self._redundancy is not None and self._runtime is not None and not self._runtime.joining:
            self._redundancy.copy_now(0)  # with what a checkpoint or a hook has loaded meanwhile
        assert self._told is not None
        sharded, trainer = self.sharded, self.lightning_module.trainer
        self._told.training_starts(lambda: describe_job(trainer, sharded))
        if self._runtime is not None and not self._runtime.joining:  # a newcomer still sets up
            progress.current().back_to(Tag.BETWEEN)

    # ---- the step ---------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self._transaction is not None and self._runtime is not None and self.lightning_module is not None
        if self.generation.topology.world_size == 1 and not self._transaction.redoing:
            # Lightning 2.6.6 asks before a batch only where there are several ranks
            self._stop.stop_if_told(self.lightning_module.trainer)
        if self._survival is not None and self._loaded_at() != self._survival.committed:
            self._whole.forget_loaded()
        progress.current().begin(Tag.STEP)
        output = self._transaction.training_step(self._repeatable(partial(self._training_step, *args, **kwargs)))
        if not self.lightning_module.automatic_optimization:
            self._step_ends()
        return output

    def _repeatable(self, step: Callable[[], STEP_OUTPUT]) -> Callable[[], STEP_OUTPUT]:
        """The step, called several times in manual optimization, finds its batch whole each time."""
        assert isinstance(step, partial) and self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            return step  # its closure does so
        whole, first = remember_containers([*step.args, *step.keywords.values()]), True

        def repeated() -> STEP_OUTPUT:
            nonlocal first
            if not first:
                whole()
            first = False
            output: STEP_OUTPUT = step()
            return output

        return repeated

    def _training_step(self, batch: Any, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None and self._transaction is not None
        batch = self._batches.training(self.lightning_module.trainer, batch, self._transaction.batch_idx)

        def step(batch: Any) -> STEP_OUTPUT:
            return super(NTPStrategy, self).training_step(batch, *args, **kwargs)

        assert self._verification is not None
        if self._verification.due:
            assert self._first_steps is not None and self._sync is not None
            self._verification.run(step, batch, self._first_steps, self._sync)
        assert self._compute_time is not None
        self._compute_time.begin()
        return step(batch)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._compare_copies()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._changes is not None:
            self._changes.forget()
        self._compare_copies()
        if self._redundancy is not None:
            assert self._survival is not None
            self._redundancy.copy_now(self._survival.committed)

    def _compare_copies(self) -> None:
        """After the first steps: all copies must have the same bits. Collective over all members then."""
        assert self._survival is not None and self._verification is not None
        self._verification.compare_copies(self._survival.committed, partial(self._collectives.run, "comparing copies"))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._check_batch("validation", args[0])
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._check_batch("test", args[0])
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._check_batch("predict", args[0])
        output: STEP_OUTPUT = super().predict_step(*args, **kwargs)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None and self._sync is not None and self._first_steps is not None
        assert self._transaction is not None
        self._transaction.before_backward()
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        assert self._compute_time is not None
        with self._compute_time.waiting():
            share = self._batches.loss_share()
        checks = self._first_steps.begin()
        # such a backward runs without overlap: its local gradients are looked at before they are summed
        self._sync.prepare()
        if not self._sync_blocked and not checks:
            self._sync.begin()
        # the weight is in the gradient only: what the user logs is the loss of his own batch
        weighted = loss if share == 1.0 else loss * share
        try:
            self.precision_plugin.backward(weighted, self.lightning_module, optimizer, *args, **kwargs)
        except BaseException:
            self._sync.cancel()
            raise
        if checks:
            self._first_steps.run()
            if not self._sync_blocked:
                self._sync.begin()
        self._compute_time.end()
        self._reach("sync")
        if self._sync_blocked:
            self._sync.release()
        else:
            self._sync.finish()
        closure_loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients locally: the backward passes inside are synced by the next one outside."""
        self._sync_blocked, before = True, self._sync_blocked
        try:
            yield
        finally:
            self._sync_blocked = before

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: LightningModule | nn.Module | None = None, **kwargs: Any
    ) -> Any:
        def complete_closure() -> Any:
            result = closure()
            local = self._sync.local if self._sync is not None else set()
            unsynced = [p for group in optimizer.param_groups for p in group["params"] if p in local]
            if unsynced and self.sharded is not None:
                name = self.sharded.by_parameter()[unsynced[0]].name
                raise RuntimeError(
                    f"the gradient of {name!r} was not synced over the replicas: call self.manual_backward(loss)"
                    " rather than loss.backward(), and leave block_backward_sync() before the last one"
                )
            return result

        assert self._transaction is not None and self.sharded is not None and self.lightning_module is not None
        if self._held.get(optimizer) != _count(optimizer):  # by add_param_group
            check_optimizers([optimizer], self.sharded, self.lightning_module)
            self._held[optimizer] = _count(optimizer)
        step = partial(super().optimizer_step, optimizer, complete_closure, model, **kwargs)
        result = self._transaction.optimizer_step(step)
        if optimizer.state and optimizer not in self._resumable and self.sharded is not None:
            # here rather than in the first checkpoint, hours later
            checkpoints.check_optimizer_state(self.sharded, optimizer)
            self._resumable.add(optimizer)
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            self._step_ends()
        return result

    def _step_ends(self) -> None:
        assert self.lightning_module is not None
        last = self.lightning_module.trainer.is_last_batch
        progress.current().begin(Tag.EPOCH_END if last else Tag.BETWEEN)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        progress.current().beat()  # data has come
        return super().batch_to_device(batch, device, dataloader_idx)

    def _check_batch(self, stage: str, batch: Any) -> None:
        assert self.lightning_module is not None
        self._batches.check(self.lightning_module.trainer, stage, batch)

    def _vote(self) -> None:
        self._reach("vote")
        self._stop.vote()

    def _reach(self, phase: str) -> None:
        for point in self.fault_points:
            point(phase)

    def _remember_step(self) -> Callable[[], None]:
        """Remember what a step changes here: a replay must enter the same collectives again, on all ranks."""
        assert self._first_steps is not None and self._transaction is not None
        # of a later micro-batch: what the replay of the earlier ones has made it, in whatever layout it ran
        local = set(self._sync.local if self._sync is not None else ()) if self._transaction.at_start else None
        assert self._verification is not None
        others = (self._batches.remember(), self._first_steps.remember(), self._verification.remember())

        def restore() -> None:
            assert self._sync is not None
            if local is not None:
                self._sync.local = set(local)
            for put_back in others:
                put_back()

        return restore

    # ---- clipping and scaling ---------------------------------------------------------------------------------

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """The norm of the unsharded gradients, of one optimizer's parameters or of all. Call it on all ranks.

        Returns:
            A float64 tensor without dimensions, the same bits on all ranks.
        """
        assert self.sharded is not None
        parameters: Iterable[Tensor] = (e.parameter for e in self.sharded)
        if optimizer is not None:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
        return engine.gradient_norm(self.sharded, parameters, self.generation, norm_type)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self.sharded is not None
        engine.clip_gradients(
            self.sharded, self.precision_plugin.main_params(optimizer), self.generation, float(clip_val)
        )

    def _agree_on_overflow(self, found: Tensor) -> None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.generation.world)

    # ---- collectives ------------------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._runtime is not None:
            self._collectives.barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if self._runtime is None:
            return obj
        assert self._told is not None
        return self._told.broadcast(obj, lambda: self._collectives.broadcast(obj, src))

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce over replicas: tensor-parallel peers hold the same value, which counts once.

        Returns:
            A new tensor; the input stays as it is, so that an interrupted reduction can be repeated.
        """
        if not isinstance(tensor, Tensor) or self._runtime is None:
            return tensor
        return self._collectives.reduce(tensor, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._runtime is None else self._collectives.decide(decision, all)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """One row per replica, in order: tensor-parallel peers hold the same value.

        Args:
            tensor: Any shape, the same on all ranks.
            group: Must be None.
            sync_grads: Whether gradients flow back to the replicas' own tensors.
        """
        return tensor.unsqueeze(0) if self._runtime is None else self._collectives.all_gather(tensor, sync_grads)

    def repeat(self, act: Callable[[], T]) -> T:
        """Do something collective between steps, such as a forward of the model, once more if a rank is lost meanwhile.

        Call it on all ranks, in hooks: the model may be called on any number of batches inside. Random states, the
        module's modes, metrics, buffers, plain attributes and logged values are as before when it is done once more;
        files that it writes, say, are not. Inside of a step or of an evaluation batch, which are repeated as a whole,
        it is simply called.

        Args:
            act: What to do.

        Returns:
            What ``act`` has returned on this rank.

        Example::

            def on_validation_epoch_end(self):
                text = self.trainer.strategy.repeat(lambda: self.sample(self.prompt))
        """
        survival = self._survival
        if survival is None or survival.operations.inside or self._transaction is not None and self._transaction.inside:
            return act()
        assert self.lightning_module is not None
        recorder = SnapshotRecorder(self.lightning_module.trainer, self.root_device, [survival.rows.remember])
        snapshot, modes = recorder.take(), {m: m.training for m in self.lightning_module.modules()}

        def undo() -> None:
            snapshot.restore()
            for module, training in modes.items():
                module.training = training

        return self._collectives.together("something to repeat", act, undo)

    def record_event(self, event: str, **details: Any) -> None:
        """Append an event to the run's ``events.jsonl``; any rank may call it, the one that is rank 0 writes.

        Args:
            event: Its kind.
            details: More fields, see ``docs/events.md``; ``slot`` says whom it is about.
        """
        if self._survival is not None:
            self._survival.record(event, **{"step": self._survival.committed, **details})

    def whole_loss(self, loss: Tensor) -> Tensor:
        """The loss of the global batch, from this replica's loss of the last step. Call it on all ranks."""
        share = self._batches.loss_share()
        parts = torch.stack([loss.detach().double() * share, torch.tensor(share, dtype=torch.float64)])
        total = self._collectives.reduce(parts, "sum")
        return total[0] / total[1]

    # ---- state ------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The unsharded state dict on rank 0, empty elsewhere. Call it on all ranks."""
        if self.sharded is None:
            assert self.lightning_module is not None
            return self.lightning_module.state_dict()
        return self._whole.state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        # Lightning 2.6.6 loads before `setup` converts: float64 values would pass through the module's float32
        self.precision_plugin.convert_module(self.lightning_module)
        state = checkpoint["state_dict"]
        known = getattr(self.lightning_module, "_ntp_sharded", None)
        if isinstance(known, ShardedModel):
            state = checkpoints.local_state_dict(known, state)
        self.lightning_module.load_state_dict(state, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's unsharded state dict on rank 0, empty elsewhere. Call it on all ranks."""
        return self._whole.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        assert self.lightning_module is not None

        def write(content: dict[str, Any]) -> None:
            writer = self.checkpoint_io if self.is_global_zero else None
            if isinstance(writer, WholeFileIO):
                writer.half_way = partial(self._reach, "checkpoint")
            else:
                self._reach("checkpoint")
            super(NTPStrategy, self).save_checkpoint(content, filepath, storage_options)

        if self._runtime is None:
            write(checkpoint)
        else:
            with progress.current().within(Tag.CHECKPOINT):
                self._whole.save(self.lightning_module, checkpoint, write, str(filepath))

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._survival is not None:
            completed = self._survival.operations.completed
            self._removed = [(completed, filepath), *(each for each in self._removed if each[0] == completed)]
        super().remove_checkpoint(filepath)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        committed = self._survival.committed if self._survival is not None else 0
        self._whole.load_optimizers(self.optimizers, checkpoint, committed)

    def _loaded_at(self) -> int:
        return self._whole.loaded_at(self._survival.committed) if self._survival is not None else -1

    def _restore_together(self, restore: Callable[[], None]) -> None:
        """Load a checkpoint into the cut model, on all ranks, again if anybody dies meanwhile."""

        def load() -> None:
            self.barrier()  # nobody loads while others may still move what they had
            self._whole.loading = True
            restore()

        try:
            self._collectives.together("restoring a checkpoint", load)
        finally:
            self._whole.loading = False
        if self._redundancy is not None and self._survival is not None:
            self._redundancy.copy_now(self._survival.committed)  # what neighbours keep is of another course

    def register_state(self, state: ShardedState) -> Callable[[], None]:
        """Let state per parameter outside of the optimizers, such as moving averages, move when shards move.

        Change it where parameters change, in a hook on the optimizer's step (``register_step_post_hook``): what is
        changed elsewhere may be moved between a parameter's update and its own. Registered until the fit ends.

        Args:
            state: Parameter -> name -> tensor of the shape that the parameter has on this rank (or a single number).
                Tensors are replaced in it when shards move: look them up at each use. The same parameters and names on
                all ranks. Call it in ``on_fit_start`` or later.

        Returns:
            A function that takes it out again.

        Raises:
            RuntimeError: Before the model is cut.
            ValueError: If a key is no parameter of the module, or a tensor has another shape than its shard.
        """
        return self._whole.register(state)

    def full_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """State as in :meth:`register_state`, unsharded and by parameter name, on rank 0. Call it on all ranks."""
        return self._whole.full(state)

    def local_state(self, full: Mapping[str, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """Cut what :meth:`full_state` has put together to this rank's shards.

        Raises:
            ValueError: If it has a name that is no parameter.
        """
        return self._whole.local(full)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """The unsharded gradients by parameter name on rank 0, empty elsewhere. Call it on all ranks."""
        return self._whole.gradients()

    def assert_copies_equal(self) -> None:
        """Check that all replicas and copies hold the same bits. Call it on all ranks.

        Raises:
            AssertionError: Naming the parameters that differ.
        """
        self._whole.check_copies()

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            private.restore_signal_handlers(self.lightning_module.trainer)
        self._stop.uninstall()
        self._whole.registered.clear()
        if self._changes is not None:
            self._changes.shares.end()
        self._stop.riders, self._changes = [], None
        if self._survival is not None:
            if self._is_done():
                # nobody leaves while others may still need what it holds
                self.barrier("teardown")
            self._survival.end()
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        super().teardown()

    def _is_done(self) -> bool:
        """Whether the run ends in good order, on all ranks alike."""
        module = self.lightning_module
        return (
            module is not None
            and module._trainer is not None
            and module.trainer.state.status == TrainerStatus.RUNNING
            and self.sharded is not None
        )


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _step_arguments(module: LightningModule) -> tuple[str, ...]:
    code = getattr(module.training_step, "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()
