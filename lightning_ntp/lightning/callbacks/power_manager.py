"""A shrunken replica keeps up: the callback that has power and samples follow the GPUs that are left."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_ntp.engine import Change
from lightning_ntp.launch import RankIdentity, is_rank, jobs
from lightning_ntp.launch.device_watch import DeviceWatch
from lightning_ntp.lightning.callbacks import carried_log
from lightning_ntp.lightning.callbacks.devices import note_device
from lightning_ntp.lightning.callbacks.logged_state import log_row, row_is_due
from lightning_ntp.lightning.planned_times import planned_times
from lightning_ntp.nvml.profiles import Profile
from lightning_ntp.power.control import Pace, split
from lightning_ntp.power.loop.settings import PowerSettings

if TYPE_CHECKING:
    from lightning_ntp.lightning.strategy import NTPStrategy

log = logging.getLogger("lightning_ntp")


class PowerManager(Callback):
    """Keeps a replica that has lost a GPU as fast as the others: by power, and by samples for what power cannot do.

    Without it a replica at 3 of 4 GPUs takes a third longer per step, and all others wait for it. The loop runs in the
    launching process (``docs/power.md``): every ``interval`` it measures how long each replica computes, raises power
    limits (and clocks that were locked) of a shrunken one within a budget, and lowers what is not needed. What heat,
    ceilings and budget leave missing is told to rank 0, which moves samples of the global batch to the other replicas.
    Limits and clocks are as at the start when the GPU returns, and when the fit ends, however it ends.

    Args:
        straggler: What may be used: ``"power+rebalance"``, ``"power"``, ``"rebalance"`` (samples only), or ``"none"``,
            which measures and logs.
        budget: What the limits of the job's GPUs on a node may add up to, watts; None: the sum of the limits at start.
        lend: Who gets what a lost GPU no longer draws: the survivors of its ``"replica"``, or its whole ``"node"``.
        lost_draw: What a lost GPU whose draw cannot be read is believed to draw, watts. None: its power is not lent.
        ceiling: The highest limit of a GPU: ``"found"``, the operator's at the start; a number of watts; or
            ``"maximum"``, what the hardware takes. Above ``"found"`` is for whoever knows the rack.
        margin: Degrees C to the slowdown temperature that a boosted GPU keeps.
        max_temperature: Degrees C that a boosted GPU does not pass, if that is less.
        levers: What may be turned: ``"power_limit"``, ``"clocks"``. Clocks only with ``locked_clocks``.
        locked_clocks: The range in MHz to which the operator has locked the graphics clocks: no call can read it. The
            upper end is raised for a boost, and put back.
        profiles: Workload power profiles (Blackwell) to request while training, by NVML's names (``"LLM_TRAINING"``)
            or numbers; none by default. ``lightning-ntp doctor`` lists what the GPUs have.
        on_denied: If limits may not be written: ``"rebalance"``: samples move instead; ``"warn"``: only said;
            ``"error"``: the job ends.
        interval: Seconds between two looks.
        socket: Of a helper that runs by itself, as root; None: a helper with the rights of this process.
        tokens_per_step: Of all replicas together, for joules per token; None: they are not logged.
        gpus: UUIDs of the devices by slot, as ``nvidia-smi -L`` prints them; None: ranks find out themselves.

    Raises:
        ValueError: If a setting is out of range; the message names it.
    """

    ntp_own_attributes = ("_directory", "_seen")

    def __init__(
        self,
        straggler: Literal["power+rebalance", "power", "rebalance", "none"] = "power+rebalance",
        budget: float | None = None,
        lend: Literal["replica", "node"] = "replica",
        lost_draw: float | None = None,
        ceiling: float | Literal["found", "maximum"] = "found",
        margin: float = 4.0,
        max_temperature: float | None = None,
        levers: Sequence[Literal["power_limit", "clocks"]] = ("power_limit", "clocks"),
        locked_clocks: Sequence[int] | None = None,
        profiles: Sequence[int | str] = (),
        on_denied: Literal["rebalance", "warn", "error"] = "rebalance",
        interval: float = 2.0,
        socket: str | Path | None = None,
        tokens_per_step: int | None = None,
        gpus: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("levers", levers),
            ("profiles", profiles),
            ("gpus", gpus),
            ("locked_clocks", locked_clocks),
        ):
            if value is not None and not isinstance(value, list | tuple):
                raise ValueError(f"{name}={value!r} must be a list")
        if tokens_per_step is not None and not (type(tokens_per_step) is int and tokens_per_step > 0):
            raise ValueError(f"tokens_per_step={tokens_per_step!r} must be a whole number above 0, or None")
        clocks: Any = None if locked_clocks is None else tuple(locked_clocks)
        self.settings = PowerSettings(
            straggler,
            budget,
            lend,
            lost_draw,
            ceiling,
            margin,
            max_temperature,
            tuple(levers),
            clocks,
            tuple(map(_profile, profiles)),
            on_denied,
            interval,
            str(socket) if isinstance(socket, Path) else socket,
            tuple(gpus or ()),
        )
        self.tokens_per_step = tokens_per_step
        self._directory: Path | None = None
        """The job's, in its ranks."""
        self._read = 0
        """How far the job's log of power was read; all ranks have the same, since they read it alike."""
        self._step = 0
        """Steps when the last batch had ended."""
        self._changed = False
        """The members have changed since rank 0 has said what there is to compute."""
        self._told_shares: dict[int, int] = {}
        self._seen = 0
        """When rank 0's newest note of paces was written, in nanoseconds."""
        self._relative: dict[int, float] = {}
        """Replica -> how slow it is, by that note."""
        self._cannot = False
        """Samples cannot be moved, and that was said."""

    def device_watch(self) -> DeviceWatch:
        """For the launcher, in the launching process."""
        from lightning_ntp.power.loop import PowerWatch

        return PowerWatch(self.settings)

    # ---- in the ranks -----------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "share_samples"):
            log.warning('PowerManager does nothing here: it takes Trainer(strategy="ntp"), whose replicas can shrink')
            return
        directory = self._directory = RankIdentity.from_environ().job_dir if is_rank() else None
        if directory is None:
            return
        self._read = carried_log.begin(jobs.power_log(directory), self._read)
        if not self.settings.gpus:
            note_device(directory, RankIdentity.from_environ().slot, trainer.strategy.root_device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen = 0
        self._note_work(trainer)

    def on_topology_change(self, change: Change) -> None:
        """What there is to compute is said anew before the next batch."""
        self._changed = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._directory is None:
            return
        if self._changed or _strategy_of(trainer).sample_shares != self._told_shares:
            self._note_work(trainer)
        self._carry(trainer)
        if trainer.is_global_zero and self.settings.moves_samples:
            self._move_samples(trainer, self._directory)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        directory, before, self._step = self._directory, self._step, trainer.global_step
        if directory is not None and row_is_due(trainer, before):
            log_row(trainer, partial(power_metrics, directory))

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._carry(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_work(trainer, training=False)
        self._carry(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._note_work(trainer, training=False)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._carry(trainer)

    def _note_work(self, trainer: Trainer, training: bool = True) -> None:
        """Let the loop know what there is to compute."""
        directory = self._directory
        if directory is None:  # perhaps of another strategy, which has no shares
            return
        strategy = _strategy_of(trainer)
        self._changed, self._told_shares = False, strategy.sample_shares
        if not trainer.is_global_zero:
            return
        note: dict[str, Any] = {"training": training}
        if training:
            topology, sharded = strategy.topology, strategy.sharded
            assert sharded is not None
            note |= {
                "planned": planned_times(sharded, topology),
                "degrees": {replica: topology.degrees[replica] for replica in topology.live_replicas},
                "samples": self._told_shares,
                "micro_batches": trainer.accumulate_grad_batches,
                "tokens": self.tokens_per_step or 0,
            }
        with contextlib.suppress(OSError):
            jobs.write_whole(jobs.work_note(directory), json.dumps(note))

    # ---- samples ------------------------------------------------------------------------------------------------

    def _move_samples(self, trainer: Trainer, directory: Path) -> None:
        """On rank 0: let the shares follow what the loop has said."""
        path, strategy = jobs.paces_note(directory), _strategy_of(trainer)
        try:
            written = path.stat().st_mtime_ns  # 2 us; asked in every step
            if written == self._seen:
                return
            told = json.loads(path.read_text(encoding="utf-8"))["relative_time"]
            self._relative = {int(replica): float(time) for replica, time in told.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none
            return
        self._seen = written
        if not self._relative and not self._shares_differ(trainer):
            return
        why = strategy.sharing_problem
        if why:
            if not self._cannot:
                self._cannot = True
                log.warning("samples stay where they are although a replica is slower: %s", why)
            return
        self._cannot = False
        counts = self._counts(trainer)
        if counts != _coming(trainer):
            strategy.share_samples(counts)

    def _counts(self, trainer: Trainer) -> dict[int, int] | None:
        """Samples per replica, by what each needs for one."""
        present = _coming(trainer)
        if not self._relative:
            return None
        paces = {replica: Pace(self._relative.get(replica, 1.0)) for replica in present}
        return split(sum(present.values()), paces, present)

    def _shares_differ(self, trainer: Trainer) -> bool:
        return len(set(_coming(trainer).values())) > 1

    # ---- what is told -------------------------------------------------------------------------------------------

    def _carry(self, trainer: Trainer) -> None:
        """Carry what the loop has said into the run's events. All ranks read it, so that any can become rank 0."""
        directory = self._directory
        if directory is None:
            return
        entries, self._read = carried_log.new_entries(jobs.power_log(directory), self._read)
        for entry in entries if trainer.is_global_zero else ():
            details = {key: entry[key] for key in ("kind", "text", "replica", "values") if key in entry}
            _strategy_of(trainer).record_event("power", monotonic=entry["monotonic"], **details)


def _coming(trainer: Trainer) -> Mapping[int, int]:
    """The shares to come: those of now say nothing if others are on their way, behind what workers have fetched."""
    return _strategy_of(trainer).coming_sample_shares


def _strategy_of(trainer: Trainer) -> NTPStrategy:
    """Of a trainer whose ranks are a job's: see :meth:`PowerManager.setup`."""
    return cast("NTPStrategy", trainer.strategy)


def _profile(name: int | str) -> int:
    if not isinstance(name, str):
        return name
    if name not in Profile.__members__:
        raise ValueError(f"profiles: {name!r} is none of {', '.join(Profile.__members__)}")
    return int(Profile[name])


def power_metrics(directory: Path) -> dict[str, float]:
    """What loggers get: watts, limits, pace and samples of every replica, and joules of a step and a token."""
    try:
        state = json.loads(jobs.power_state(directory).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    metrics = {f"ntp/power/{name}": state[name] for name in ("joules_per_step", "joules_per_token")}
    for replica, each in state["replicas"].items():
        for name in ("watts", "limit_w", "compute_s", "relative_time", "missing_percent"):
            metrics[f"ntp/power/replica{replica}/{name}"] = each[name]
    return {name: float(value) for name, value in metrics.items() if value is not None}
