"""Whole scripts, from setup to predict, with faults anywhere; and what is compared with the undisturbed run."""

from __future__ import annotations

import csv
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.aggregation import CatMetric

from tests.lightning.rigs import EndState, assert_same, largest_difference, slot
from tests.recovery.fates import Fate, WaitsForNewcomers, begin_life, install
from tests.recovery.jobs import EXACT, PER_REPLICA, Result, Samples, Worlds, assert_left, numbers
from tests.recovery.models import Automatic
from tests.recovery.places import Death, Places, befall

_END_SECONDS = 20.0
"""For all ranks to end once one has raised: one may be connecting to a dead peer, which takes up to 10 s."""


@dataclass(frozen=True)
class Script:
    """Fit with validation and checkpoints, then test and predict."""

    degrees: tuple[int, ...]
    deaths: tuple[Death, ...] = ()
    faults: tuple[tuple[int, int, str], ...] = ()
    """(slot, step, phase) for FaultInjector."""
    timed: tuple[tuple[int, float], ...] = ()
    """(slot, seconds after the fit has started)."""
    kinds: tuple[tuple[int, str], ...] = ()
    """(slot, kind of its faults, of :data:`tests.recovery.places.KINDS`); those who are not named are killed."""
    batches: int = 3
    more: int = 0
    """Samples beyond whole batches, in validation, test and predict."""
    redundancy: Literal["neighbor"] | None = None
    fates: tuple[Fate, ...] = ()
    """Of processes that are started again, and of those that let them in."""
    waits: tuple[int, ...] = ()
    """Before which steps all ranks wait until everybody is back."""
    patience: float | None = None
    """For so many seconds, and then they go on; None for ever."""
    trainer: tuple[tuple[str, Any], ...] = ()
    """More settings of the Trainer."""

    @property
    def victims(self) -> set[int]:
        return {each[0] for each in (*self.deaths, *self.faults, *self.timed, *self.fates)}

    def kind(self, number: int) -> str:
        """What happens to a slot."""
        return dict(self.kinds).get(number, "kill")

    def of_kind(self, *kinds: str) -> set[int]:
        """The victims to whom one of these happens."""
        return {number for number in self.victims if self.kind(number) in kinds}


class Timed(Callback):
    """Lets a fault happen to this process some time after the fit has started."""

    ntp_own_attributes = ("_times", "_kind")

    def __init__(self, times: Iterable[tuple[int, float]], kind: str = "kill") -> None:
        self._times = [seconds for victim, seconds in times if victim == slot()]
        self._kind = kind

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        for seconds in self._times:
            timer = threading.Timer(seconds, befall, (self._kind,))
            timer.daemon = True
            timer.start()


class Recoveries(Callback):
    """Notes of every recovery how long it took, and how much of that since the last of its losses was known.

    Survivors cannot go on without a rank that hangs, so if one is lost meanwhile, they wait until the other is found.
    """

    def __init__(self, directory: str) -> None:
        self._file = Path(directory) / f"recoveries-{slot()}"

    def on_topology_change(self, change: Any) -> None:
        from lightning_ntp.comm import runtime

        current, now = runtime.current(), time.monotonic()
        if current is None or change.left:  # a planned leave is no recovery
            return
        known = [gone.at for gone in current.membership.roster.departures if gone.slot in change.lost]
        whole = sum(change.seconds.values())
        with open(self._file, "a") as file:
            file.write(json.dumps((whole, min(whole, now - max(known, default=0.0)))) + "\n")


def recoveries(directory: Path) -> list[tuple[float, float]]:
    """What :class:`Recoveries` has noted, of all ranks."""
    return [json.loads(line) for path in directory.glob("recoveries-*") for line in path.read_text().splitlines()]


class Evaluated(Automatic):
    """Logs in evaluation in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = CatMetric()
        self.mean, self.highest = MeanMetric(), MaxMetric()
        self.outputs: list[float] = []

    def _evaluate(self, name: str, batch: Any, batch_idx: int) -> Tensor:
        loss, size = self.loss(batch, batch_idx), len(batch[2])
        self.log(f"{name}_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=size)
        self.log(f"{name}_samples", float(size), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.mean.update(loss, size)
        self.highest.update(loss)
        self.seen.update(batch[2].double())
        self.log(f"{name}_mean", self.mean, batch_size=size)
        self.log(f"{name}_highest", self.highest, batch_size=size)
        self.outputs.append(float(loss))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        everyone = self.all_gather(torch.tensor(float(len(batch[2])), dtype=torch.float64))
        self.log("together", everyone.sum(), reduce_fx="sum", batch_size=1)
        self._evaluate("test", batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"ids": batch[2], "out": self.net(batch[0])}

    def _end(self, name: str) -> None:
        self.log(f"{name}_outputs", float(len(self.outputs)), sync_dist=True)
        self.log(f"{name}_ids", self.seen.compute().unique().sum())
        self.seen.reset()
        self.outputs.clear()

    def on_validation_epoch_end(self) -> None:
        self._end("val")

    def on_test_epoch_end(self) -> None:
        self._end("test")


def whole_script(script: Script, directory: str) -> dict[str, Any]:
    """One rank's part."""
    from lightning_ntp import NTPStrategy
    from lightning_ntp.callbacks import FaultInjector

    install(script.fates, life := begin_life(Path(directory)))
    if life:  # its faults have befallen the process before it
        script = replace(script, deaths=(), faults=(), timed=())
    torch.manual_seed(3)
    replicas, kind = len(script.degrees), script.kind(slot())
    module, end = Evaluated(), EndState()
    checkpoints = ModelCheckpoint(Path(directory) / "saved", monitor="val_loss", save_last=True, save_top_k=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=sum(script.degrees),
        strategy=NTPStrategy(degrees=script.degrees, timeout=30, heartbeat=10, redundancy=script.redundancy),
        precision="64-true",
        **{"max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 2, **dict(script.trainer)},
        log_every_n_steps=1,
        logger=CSVLogger(directory, name="", version="rows", flush_logs_every_n_steps=1),
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            end,
            checkpoints,
            EarlyStopping("val_loss", patience=50),
            Timed(script.timed, kind),
            Places(script.deaths, kind),
            Recoveries(directory),
            WaitsForNewcomers(script.waits)
            if script.patience is None
            else WaitsForNewcomers(script.waits, script.patience, or_go_on=True),
            FaultInjector(
                [{"kind": script.kind(s), "slot": s, "step": step, "phase": p} for s, step, p in script.faults]
            ),
        ],
    )
    count = replicas * PER_REPLICA * script.batches
    trained = DataLoader(Samples(count), batch_size=PER_REPLICA, shuffle=True)
    evaluated = DataLoader(Samples(count + script.more), batch_size=PER_REPLICA)
    trainer.fit(module, trained, evaluated)
    fitted = {k: float(v) for k, v in trainer.callback_metrics.items()}
    tested = trainer.test(module, evaluated, verbose=False)
    predicted = trainer.predict(module, evaluated)
    return {
        "fitted": fitted,
        "tested": {k: float(v) for k, v in tested[0].items()},
        "predicted": {int(i): out for each in predicted for i, out in zip(each["ids"], each["out"], strict=True)},
        "times": [int(i) for each in predicted for i in each["ids"]],
        "replica": trainer.strategy.replica,
        "parameters": end.parameters,
        "optimizers": end.optimizers,
        "best": Path(checkpoints.best_model_path).name,
        "score": float(checkpoints.best_model_score),
        "degrees": trainer.strategy.topology.degrees,
        "slot": slot(),
        "joined": not trainer.strategy._runtime.joining,
    }


@dataclass
class Found:
    survivors: dict[int, dict[str, Any]]
    directory: Path

    @property
    def first(self) -> dict[str, Any]:
        return self.survivors[min(self.survivors)]

    @property
    def over(self) -> set[int]:
        """Replicas whose last rank died when nobody needed it any more: all had passed the last operation."""
        return {r for r, degree in enumerate(self.first["degrees"]) if degree} - {
            found["replica"] for found in self.survivors.values()
        }

    def rows(self) -> list[dict[str, float]]:
        with open(self.directory / "rows" / "metrics.csv", newline="") as file:
            return numbers([{k: v for k, v in row.items() if v} for row in csv.DictReader(file)])

    def predictions(self) -> dict[int, Tensor]:
        """By sample; each must have been made once."""
        replicas = {found["replica"]: found for found in self.survivors.values()}
        times = sorted(i for found in replicas.values() for i in found["times"])
        assert times == sorted(set(times)), f"predicted more than once: {times}"
        return {i: out for found in replicas.values() for i, out in found["predicted"].items()}


def run_script(
    world: Worlds, script: Script, directory: Path, ranks: Callable[..., dict[str, Any]] = whole_script
) -> Result:
    """Run a script in processes of its own. Nobody looks for hangs there: see :mod:`tests.recovery.supervised`.

    Args:
        ranks: What the ranks run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    running = world(sum(script.degrees), fresh=True).start(ranks, script, str(directory))
    return Result(running.survive(100, _END_SECONDS), directory)


_undisturbed: dict[Script, Found] = {}


def undisturbed(world: Worlds, script: Script, directory: Path) -> Found:
    """The same script without its faults, run once per session."""
    quiet = replace(script, deaths=(), faults=(), timed=(), kinds=(), fates=(), waits=(), patience=None)
    if quiet not in _undisturbed:
        result = run_script(world, quiet, directory / f"undisturbed-{len(_undisturbed)}")
        assert_left(result, set(), set())
        _undisturbed[quiet] = Found(result.survivors, result.directory)
    return _undisturbed[quiet]


def survives(
    world: Worlds,
    script: Script,
    directory: Path,
    degrees: tuple[int, ...],
    ranks: Callable[..., dict[str, Any]] = whole_script,
) -> None:
    """Run a script with its faults and check that nobody can tell from its results."""
    want = undisturbed(world, script, directory)
    result = run_script(world, script, directory / "disturbed", ranks)
    assert_left(result, script.victims, set())
    got = Found(result.survivors, result.directory)
    assert got.first["degrees"] == degrees
    compare(got, want, script.victims)


def compare(got: Found, want: Found, dead: set[int], partial: bool = False) -> float:
    """Check that a script has given the numbers of the undisturbed one.

    Args:
        dead: Who has died.
        partial: A replica was gone for a while: what only it had gathered in training is not compared.

    Returns:
        The largest relative difference of any tensor or number, those of the logger's rows left out: they are float32.

    Raises:
        AssertionError: Naming the first that is not.
    """
    largest = 0.0

    def same(one: Any, other: Any, where: str) -> None:
        nonlocal largest
        assert_same(one, other, EXACT, where)
        largest = max(largest, largest_difference(one, other))

    dropped = 0 in got.first["degrees"]
    # unsharded at the end of the fit, on the rank 0 of then
    whole = ("parameters", "optimizers") if got.first["parameters"] else ()
    assert whole or 0 in dead
    for part in ("score", *whole):
        same(got.first[part], want.first[part], part)
    for part in () if dropped else ("tested",) if partial else ("fitted", "tested"):
        # by slot: what a replica logs for itself is another number in each
        same(got.first[part], want.survivors[min(got.survivors)][part], part)
    if dropped:
        # torchmetrics keeps float32 whatever the precision, and others sum the batches of a replica that is gone
        assert_same(got.first["tested"]["test_mean"], want.first["tested"]["test_mean"], 1e-6, "test_mean")
        for key in ("test_samples", "test_ids", "test_loss_epoch"):
            same(got.first["tested"][key], want.first["tested"][key], key)
    elif not partial:
        assert_same(got.rows(), want.rows(), 1e-6, "rows")
    assert got.first["best"] == want.first["best"]
    made, expected = got.predictions(), want.predictions()
    if got.over:  # its predictions went with it
        expected = {i: out for i, out in expected.items() if i in made}
    same(made, expected, "predictions")
    saved = sorted(p.name for p in (got.directory / "saved").iterdir())
    assert saved == sorted(p.name for p in (want.directory / "saved").iterdir())
    for name in saved:
        one, other = (torch.load(d / "saved" / name, weights_only=False) for d in (got.directory, want.directory))
        same(one["state_dict"], other["state_dict"], f"{name}: parameters")
        same(one["optimizer_states"][0]["state"], other["optimizer_states"][0]["state"], name)
    return largest
