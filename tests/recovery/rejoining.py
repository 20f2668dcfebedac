"""Jobs whose dead ranks are started again and come back, under the package's own supervisor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.lightning.rigs import EndState, assert_same, slot
from tests.recovery.fates import Fate, WaitsForNewcomers, begin_life, install
from tests.recovery.jobs import EXACT, PER_REPLICA, Job, Ledger, Samples, Shares, Worlds, _module, numbers, undisturbed
from tests.recovery.models import Automatic
from tests.recovery.returning_models import Saves
from tests.recovery.supervised import Supervised, SupervisingProcess, holdings

_SETTLE_SECONDS = 2.0
OPTIONS: dict[str, Any] = {"max_restarts": 20, "restart_backoff": timedelta(0)}
"""Of the supervisor."""


class NewcomersLedger(Ledger):
    """Of the step in which this rank joins, it has what a peer has given it, of another replica perhaps."""

    ntp_own_attributes = ("_file", "_joined_in")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._joined_in = -1

    def on_topology_change(self, change: Any) -> None:
        super().on_topology_change(change)
        if slot() in change.after.slots and slot() not in change.before.slots:
            self._joined_in = change.step + 1

    def _write(self, trainer: Trainer, module: Any, what: str) -> None:
        if self._step + (what == "tried") != self._joined_in:
            super()._write(trainer, module, what)


def train_and_return(job: Job, waits: Sequence[int], directory: str, fates: Sequence[Fate] = ()) -> dict[str, Any]:
    """One rank's part."""
    from lightning_ntp import NTPStrategy
    from lightning_ntp.callbacks import FaultInjector
    from lightning_ntp.comm import neighbour_copies

    if job.copy_cost is not None:
        neighbour_copies.COST = job.copy_cost
    install(fates, begin_life(Path(directory)))
    torch.manual_seed(3)
    module = _module(job.module)(**job.settings)
    end, ledger = EndState(), NewcomersLedger(Path(directory))
    faults = [{"kind": "kill", "slot": s, "step": step, "phase": phase} for s, step, phase in job.faults]
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
            WaitsForNewcomers(waits),
            Shares(job.shares),
            FaultInjector(faults),
        ],
    )
    make = getattr(module, "loader", lambda count: DataLoader(Samples(count), batch_size=PER_REPLICA, shuffle=True))
    trainer.fit(module, make(job.samples))
    if isinstance(module, Saves):
        trainer.save_checkpoint(Path(directory) / "end.ckpt")
    return {
        "losses": ledger.losses,
        "logged": ledger.logged,
        "steps": trainer.global_step,
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "degrees": trainer.strategy.topology.degrees,
        "changes": len(ledger.changes),
        # who has come too late has passed over the fit
        "parameters": getattr(end, "parameters", {}),
        "optimizers": getattr(end, "optimizers", []),
        "joined": not trainer.strategy._runtime.joining,
        "slot": slot(),
        "replicas": trainer.strategy.topology.replicas,
        "held": module.counted.found if isinstance(module, Watched) else {},
    }


def returns(
    supervising: SupervisingProcess,
    world: Worlds,
    job: Job,
    waits: Sequence[int],
    directory: Path,
    fates: Sequence[Fate] = (),
    *,
    bound: float = EXACT,
    degrees: tuple[int, ...] | None = None,
    partial: bool = False,
    there: set[int] | None = None,
    want: Job | None = None,
    **options: Any,
) -> Supervised:
    """Run a job whose dead ranks come back, and check that nobody can tell from its results.

    Args:
        waits: Before which steps to wait until everybody is back.
        fates: What else befalls whom.
        bound: Relative.
        degrees: Those at the end, empty for any; those of the launch by default, and then everybody must be back.
        there: Who must be there at the end, if not all slots of the launch.
        partial: A replica was gone for a while: values that only it had are not compared.
        want: What it is compared with, if not the same job without its faults.
        options: Of the supervisor, or of :meth:`SupervisingProcess.run`.

    Raises:
        AssertionError: With everybody's side.
    """
    alone = {key: value for key, value in job.strategy.items() if key != "spares"}
    expects = undisturbed(world, replace(want or job, strategy=alone), directory)
    arguments = (job, tuple(waits), str(directory / "job"), tuple(fates))
    got = supervising.run(sum(job.degrees), directory / "job", train_and_return, *arguments, **{**OPTIONS, **options})
    assert got.code == 0, f"{got.cause}\n{got.output}\n{[o.stacks for o in got.outcomes]}"
    # of Python's own, of whoever is killed while it has workers
    assert not [name for name in got.left if not name.startswith("pymp-")]
    print(got.output)
    for outcome in got.outcomes:
        if outcome.state == "returned" and not outcome.value["joined"]:
            outcome.state = "died"  # it has come when the fit was over
    assert got.survivors, got.output
    first = got.first
    if degrees is None:
        degrees = job.degrees
        assert {*got.survivors} == ({*range(sum(job.degrees))} if there is None else there), got.output
    if degrees:
        assert tuple(first["degrees"]) == degrees, got.output
        assert (first["rank"], first["world"]) == (0, sum(degrees)), got.output
    assert first["steps"] == expects.first["steps"]
    assert_same(first["parameters"], expects.first["parameters"], bound, "parameters")
    assert_same(first["optimizers"], expects.first["optimizers"], bound, "optimizers")
    for number, found in got.survivors.items():
        if number not in expects.survivors:
            continue  # a spare, which was in no replica before
        expected = expects.survivors[number]
        if partial:
            shared = [{k: v for k, v in each.items() if k == "all_loss_step"} for each in expected["logged"]]
            logged = [{k: e[k] for k in s} for e, s in zip(found["logged"], shared, strict=True)]
            assert_same(logged, shared, bound, f"logged in slot {number}")
            continue
        assert_same(found["losses"], expected["losses"], bound, f"losses of slot {number}")
        assert_same(found["logged"], expected["logged"], bound, f"logged in slot {number}")
    if not partial:
        assert_same(numbers(got.rows()), numbers(expects.rows()), 1e-6 if bound < 1e-6 else bound, "rows")
    epochs = got.samples()
    assert len(epochs) == job.epochs
    for epoch, ids in epochs.items():
        assert sorted(ids) == list(range(job.samples)), f"epoch {epoch} trained on {sorted(ids)}"
    return got


class Census(Callback):
    """Counts what this process holds before some steps, once what ends in the background has ended.

    Args:
        steps: Before which.
    """

    ntp_own_attributes = ("found",)

    def __init__(self, steps: Iterable[int]) -> None:
        self._steps = set(steps)
        self.found: dict[int, dict[str, Any]] = {}

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step in self._steps and step not in self.found and not trainer.strategy._runtime.joining:
            time.sleep(_SETTLE_SECONDS)  # all at once: they wait for each other in the step
            self.found[step] = holdings()


class Watched(Automatic):
    """Counts what each process holds.

    Args:
        census: Before which steps.
    """

    def __init__(self, census: tuple[int, ...], **settings: Any) -> None:
        super().__init__(**settings)
        self._census = census

    def extra_callbacks(self, directory: str) -> list[Callback]:
        self.counted = Census(self._census)
        return [self.counted]
