"""Training jobs in which ranks die: what the ranks run, and what is compared with the undisturbed run.

Every job is data (:class:`Job`), so that it can be sent to the ranks and run a second time without its faults.
"""

from __future__ import annotations

import csv
import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.harness import Outcome, World
from tests.lightning.rigs import EndState, assert_same, slot
from tests.recovery import points
from tests.recovery.models import CONTEXT, HIDDEN, Automatic

Worlds = Callable[..., World]

EXACT = 1e-9
"""float64, relative to a tensor's largest value: sums in another order, and nothing else."""
PER_REPLICA = 2
TIMEOUT = 90.0


@dataclass(frozen=True)
class Job:
    """A training job and its faults.

    Args:
        degrees: Of the replicas at launch.
        faults: (slot, step, phase) for :class:`~lightning_ntp.callbacks.FaultInjector`; every one kills.
        deaths: (slot, point, number): the process kills itself when it comes to a point of the recovery for the
            number-th time, see :mod:`tests.recovery.points`.
        module: Class of the module: of :mod:`tests.recovery.models`, or of another one as "module:class".
        batches, epochs: How long it trains.
        gate: (step, phase) at which all ranks wait for each other and for :func:`killed_together`.
        strategy: Settings of NTPStrategy.
        trainer: Settings of the Trainer.
        settings: Of the module.
        drains: (slot that asks, slot that is to leave, steps that are done): a planned leave.
        asks_in: Where it asks: before the "training" batch, or in the middle of the "validation" that follows the step.
        shares: (slot that asks, steps that are done, counts by replica or None): samples move between replicas.
        copy_cost: What neighbours' copies may cost, as a share of the steps, if not what the package allows.
    """

    degrees: tuple[int, ...]
    faults: tuple[tuple[int, int, str], ...] = ()
    deaths: tuple[tuple[int, str, int], ...] = ()
    module: str = "Automatic"
    batches: int = 4
    epochs: int = 2
    gate: tuple[int, str] | None = None
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    drains: tuple[tuple[int, int, int], ...] = ()
    asks_in: str = "training"
    shares: tuple[tuple[int, int, dict[int, int] | None], ...] = ()
    copy_cost: float | None = None

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return len(self.degrees) * PER_REPLICA * self.batches

    @property
    def victims(self) -> set[int]:
        return {fault[0] for fault in self.faults} | {death[0] for death in self.deaths}


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Sequences, targets, and the number of the sample."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self._x = torch.randn(count, CONTEXT, HIDDEN, generator=generator, dtype=torch.float64)
        self._y = torch.randn(count, 2, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._x[index], self._y[index], index


class Ledger(Callback):
    """Notes what a committed step has trained on and logged, in memory and, for those who die, in a file."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / f"ledger-{slot()}"
        self._step = 0
        self.losses: list[float] = []
        self.logged: list[dict[str, float]] = []
        self.changes: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.losses.append(float(outputs["loss"]))
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._write(trainer, module, "committed")
            module.ids.clear()

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        self._write(trainer, module, "tried")  # a rank that leaves as planned comes no further

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self._write(trainer, module, "tried")

    def _write(self, trainer: Trainer, module: Any, what: str) -> None:
        line = {
            "what": what,
            "epoch": trainer.current_epoch,
            "step": self._step + (what == "tried"),
            "replica": trainer.strategy.replica,
            "ids": [i for part in module.ids.values() for i in part],
        }
        with open(self._file, "a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.strategy.assert_copies_equal()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_topology_change(self, change: Any) -> None:
        self.changes.append(change)


class Drains(Callback):
    """Asks for planned leaves."""

    def __init__(self, job: Job) -> None:
        self._drains = {(leaver, step) for asks, leaver, step in job.drains if asks == slot()}
        self._where = job.asks_in

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._where == "training":
            self._ask(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._where == "validation" and batch_idx == 1:
            self._ask(trainer)

    def _ask(self, trainer: Trainer) -> None:
        for leaver, step in sorted(self._drains):
            if step == trainer.global_step:
                trainer.strategy.drain(leaver, "maintenance")


class Shares(Callback):
    """Asks for samples to move between replicas."""

    def __init__(self, shares: tuple[tuple[int, int, dict[int, int] | None], ...]) -> None:
        self._shares = shares

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        first = batch_idx % trainer.accumulate_grad_batches == 0
        for asks, step, counts in self._shares if first else ():
            if (asks, step) == (slot(), trainer.global_step) and not trainer.strategy._runtime.joining:
                trainer.strategy.share_samples(counts)


class Gate(Callback):
    """At a phase of a step every rank waits until the test opens the gate."""

    def __init__(self, directory: Path, gate: tuple[int, str]) -> None:
        self._directory, (self._step, self._phase) = directory, gate
        self._trainer: Trainer | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        trainer.strategy.fault_points.append(self._reach)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._reach("data")

    def _reach(self, phase: str) -> None:
        if phase != self._phase or self._trainer is None or self._trainer.global_step != self._step:
            return
        (self._directory / f"at-{slot()}").touch()
        while not (self._directory / "open").exists():
            time.sleep(0.005)


def _module(name: str) -> type[Automatic]:
    where, _, what = name.rpartition(":")
    found: type[Automatic] = getattr(importlib.import_module(where or "tests.recovery.models"), what)
    return found


def train(job: Job, directory: str) -> dict[str, Any]:
    """One rank's part."""
    from lightning_ntp import NTPStrategy
    from lightning_ntp.callbacks import FaultInjector
    from lightning_ntp.comm import neighbour_copies

    if job.copy_cost is not None:
        neighbour_copies.COST = job.copy_cost
    points.install([death[1:] for death in job.deaths if death[0] == slot()])
    torch.manual_seed(3)
    module = _module(job.module)(**job.settings)
    end, ledger = EndState(), Ledger(Path(directory))
    faults = [{"kind": "kill", "slot": s, "step": step, "phase": phase} for s, step, phase in job.faults]
    gates = [] if job.gate is None else [Gate(Path(directory), job.gate)]
    options: dict[str, Any] = {"plugins": module.plugins()} if module.plugins() else {"precision": "64-true"}
    trainer = Trainer(
        accelerator="cpu",
        devices=sum(job.degrees) + job.strategy.get("spares", 0),
        strategy=NTPStrategy(degrees=job.degrees, **{"timeout": 30, "heartbeat": 10, **job.strategy}),
        **{
            "max_epochs": job.epochs,
            "log_every_n_steps": 1,
            "logger": CSVLogger(directory, name="", version="rows", flush_logs_every_n_steps=1),
            "default_root_dir": directory,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
            **job.trainer,
        },
        callbacks=[
            *module.extra_callbacks(directory),
            end,
            ledger,
            *gates,
            Drains(job),
            Shares(job.shares),
            FaultInjector(faults),
        ],
    )
    make = getattr(module, "loader", lambda count: DataLoader(Samples(count), batch_size=PER_REPLICA, shuffle=True))
    trainer.fit(module, make(job.samples))
    found = {
        "losses": ledger.losses,
        "logged": ledger.logged,
        "steps": trainer.global_step,
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "degrees": trainer.strategy.topology.degrees,
        "changes": len(ledger.changes),
        "bytes": sum(c.moved_bytes for c in ledger.changes),
        "parameters": end.parameters,
        "optimizers": end.optimizers,
    }
    return found


@dataclass
class Result:
    """What a job has left behind."""

    outcomes: list[Outcome]
    directory: Path

    @property
    def survivors(self) -> dict[int, dict[str, Any]]:
        return {o.slot: o.value for o in self.outcomes if o.state == "returned"}

    @property
    def first(self) -> dict[str, Any]:
        """The lowest survivor's: it is rank 0 at the end."""
        return self.survivors[min(self.survivors)]

    def rows(self) -> list[dict[str, str]]:
        """The logger's rows, but for those about the health of devices."""
        with open(self.directory / "rows" / "metrics.csv", newline="") as file:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
        return [row for row in rows if not any(key.startswith("ntp/") for key in row)]

    def samples(self) -> dict[int, list[int]]:
        """By epoch the samples that committed steps were made of."""
        dead = {outcome.slot for outcome in self.outcomes if (outcome.state, outcome.exit_code) == ("died", -9)}
        lines: list[dict[str, Any]] = []
        for path in sorted(self.directory.glob("ledger-*")):
            own = [json.loads(line) for line in path.read_text().splitlines()]
            if int(path.name.rpartition("-")[2]) in dead and own and own[-1]["what"] == "committed":
                own[-1]["what"] = "tried"  # if all who had committed it are gone, the others have begun it again
            lines += own
        seen: dict[tuple[int, int], dict[int, list[int]]] = {}
        for entry in lines:
            if entry["what"] == "committed":
                parts = seen.setdefault((entry["epoch"], entry["step"]), {})
                known = parts.setdefault(entry["replica"], entry["ids"])
                assert known == entry["ids"], f"tensor-parallel peers trained on other samples: {known}, {entry}"
        # the last try counts: earlier micro-batches of a step have tried before
        last = {(e["epoch"], e["step"], e["replica"]): e for e in lines if e["what"] == "tried"}
        for entry in last.values():
            # a replica that died in its update had voted; if the step was begun again, others have its samples
            parts = seen.get((entry["epoch"], entry["step"]), {})
            if entry["replica"] not in parts and not {*entry["ids"]} & {i for part in parts.values() for i in part}:
                parts[entry["replica"]] = entry["ids"]
        epochs: dict[int, list[int]] = {}
        for (epoch, _), parts in sorted(seen.items()):
            epochs.setdefault(epoch, []).extend(i for part in parts.values() for i in part)
        return epochs


def run(
    world: Worlds,
    job: Job,
    directory: Path,
    timeout: float = TIMEOUT,
    together: Sequence[int] = (),
    ranks: Callable[..., Any] = train,
) -> Result:
    """Run a job in processes of its own.

    Args:
        together: Slots to kill at once when all ranks are at the job's gate.
        ranks: What the ranks run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    running = world(sum(job.degrees), fresh=True).start(ranks, job, str(directory))
    if job.gate is not None:
        deadline = time.monotonic() + timeout
        while len(list(directory.glob("at-*"))) < sum(job.degrees) and time.monotonic() < deadline:
            time.sleep(0.01)
        for number in together:
            running.kill(number)
        (directory / "open").touch()
    return Result(running.survive(timeout), directory)


_undisturbed: dict[str, Result] = {}


def undisturbed(world: Worlds, job: Job, directory: Path) -> Result:
    """The same job without its faults, run once per session."""
    peaceful = replace(job, faults=(), deaths=(), gate=None, drains=(), shares=())
    key = repr(peaceful)
    if key not in _undisturbed:
        result = run(world, peaceful, directory / f"undisturbed-{len(_undisturbed)}")
        assert_returned(result, set())
        _undisturbed[key] = result
    return _undisturbed[key]


def assert_returned(result: Result, dead: set[int]) -> None:
    """Check that exactly ``dead`` died, by SIGKILL, and all others returned.

    Raises:
        AssertionError: With every rank's side.
    """
    wrong = [
        o for o in result.outcomes if (o.state, o.exit_code) != (("died", -9) if o.slot in dead else ("returned", None))
    ]
    assert not wrong, "\n".join(
        f"--- slot {o.slot}: {o.state} (exit code {o.exit_code})\n{o.error}\n{o.stacks}\n{o.output[-3000:]}"
        for o in (wrong + [o for o in result.outcomes if o not in wrong])
    )


def survives(
    world: Worlds,
    job: Job,
    directory: Path,
    degrees: Sequence[int],
    released: Sequence[int] = (),
    bound: float = EXACT,
    dropped: bool = False,
    together: Sequence[int] = (),
) -> Result:
    """Run a job with its faults and check that nobody can tell from its results.

    Args:
        degrees: Those at the end.
        released: Healthy slots that leave because their replica is dropped.
        bound: Relative.
        together: Slots to kill at once at the job's gate.
        dropped: A replica is dropped: values that only it had are not compared, but those over all replicas are.
    """
    want = undisturbed(world, job, directory)
    got = run(world, job, directory / "disturbed", together=together)
    assert_left(got, job.victims | set(together), set(released))
    first = got.first
    assert (first["rank"], first["world"], tuple(first["degrees"])) == (0, sum(degrees), tuple(degrees))
    assert first["steps"] == want.first["steps"]
    assert_same(first["parameters"], want.first["parameters"], bound, "parameters")
    assert_same(first["optimizers"], want.first["optimizers"], bound, "optimizers")
    for number, found in got.survivors.items():
        expected = want.survivors[number]
        if dropped:
            compared = [{k: v for k, v in each.items() if k == "all_loss_step"} for each in expected["logged"]]
            assert_same([{k: e[k] for k in c} for e, c in zip(found["logged"], compared, strict=True)], compared, bound)
            continue
        assert_same(found["losses"], expected["losses"], bound, f"losses of slot {number}")
        assert_same(found["logged"], expected["logged"], bound, f"logged in slot {number}")
    if not dropped:
        assert_same(numbers(got.rows()), numbers(want.rows()), 1e-6 if bound < 1e-6 else bound, "rows")
    for epoch, ids in got.samples().items():
        assert sorted(ids) == list(range(job.samples)), f"epoch {epoch} trained on {sorted(ids)}"
    return got


def assert_left(result: Result, dead: set[int], released: set[int]) -> None:
    """As :func:`assert_returned`, where healthy ranks were released too: they have left with exit code 0."""
    left = {o.slot for o in result.outcomes if (o.state, o.exit_code) == ("died", 0)}
    if released:
        assert left == released, [(o.slot, o.state, o.exit_code, o.error, o.output[-2000:]) for o in result.outcomes]
    assert_returned(Result([o for o in result.outcomes if o.slot not in released], result.directory), dead)


def numbers(rows: list[dict[str, str]]) -> list[dict[str, float]]:
    return [{k: float(v) for k, v in row.items()} for row in rows]
