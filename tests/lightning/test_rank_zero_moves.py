"""Rank 0 is killed in the middle of a step: loggers, bars and callbacks go on in the survivor that becomes rank 0.

Everything is compared with the undisturbed run of the same script.
"""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_ntp.callbacks import Fault, FaultInjector
from lightning_ntp.engine.events import read_events
from tests.harness import Outcome
from tests.lightning.rigs import Regression, Worlds, assert_same, loader, make_trainer, relative, slot

DEGREES = (2, 1)
STEPS, BATCHES = 10, 4
"""Optimizer steps until EarlyStopping ends the run at the latest, and batches of an epoch."""
EXACT = 1e-9
"""float64; after the loss, sums are done in the order of another degree."""

BARS = {"tqdm": TQDMProgressBar, "rich": RichProgressBar}


class Logging(Regression):
    """Logs in every way, and has a scheduler that the monitor can watch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Looks(Callback):
    """What the trainer is right after the change, and whether a bar shows."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_topology_change(self, change: Any) -> None:
        assert self.trainer.progress_bar_callback is not None
        self.seen.append(
            {
                "world_size": self.trainer.world_size,
                "global_rank": self.trainer.global_rank,
                "is_global_zero": self.trainer.is_global_zero,
                "rank_zero_only": rank_zero_only.rank,
                "bar": self.trainer.progress_bar_callback.is_enabled,
                "degrees": change.after.degrees,
                "lost": change.lost,
            }
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainer = trainer


def train(output: str, bar: str, faults: list[Fault], *more: Callback) -> dict[str, Any]:
    """What a rank runs."""
    checkpoint = ModelCheckpoint(
        f"{output}/best", monitor="val", save_top_k=2, save_last=True, filename="{step}", every_n_train_steps=None
    )
    looks, stopping = Looks(), EarlyStopping("val", patience=3)
    trainer = make_trainer(
        DEGREES,
        max_steps=STEPS,
        max_epochs=-1,
        logger=[CSVLogger(output, version=0), TensorBoardLogger(output, version="board")],
        callbacks=[BARS[bar](), checkpoint, stopping, LearningRateMonitor("step"), looks, FaultInjector(faults), *more],
        enable_checkpointing=True,
        enable_progress_bar=True,
        log_every_n_steps=1,
        val_check_interval=2,
        num_sanity_val_steps=0,
        default_root_dir=output,
    )
    trainer.fit(Logging(), loader(DEGREES, 4 * BATCHES), loader(DEGREES, 4))
    return {
        "seen": looks.seen,
        "steps": trainer.global_step,
        "best": Path(checkpoint.best_model_path).name,
        "score": float(checkpoint.best_model_score),  # type: ignore[arg-type]
        "stopping": stopping.state_dict()["wait_count"],
    }


def rows_of(output: Path) -> list[dict[str, float]]:
    with open(output / "lightning_logs/version_0/metrics.csv", newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def scalars_of(output: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(output / "lightning_logs/board"))
    board.Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def checkpoints_of(output: Path) -> dict[str, dict[str, Any]]:
    return {path.name: torch.load(path, weights_only=True) for path in (output / "best").glob("*.ckpt")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Worlds], tuple[Path, dict[str, Any]]]:
    found: list[tuple[Path, dict[str, Any]]] = []

    def run(world: Worlds) -> tuple[Path, dict[str, Any]]:
        if not found:
            output = tmp_path_factory.mktemp("undisturbed")
            found.append((output, world(sum(DEGREES)).run(train, str(output), "tqdm", [])[0]))
        return found[0]

    return run


def survivors(outcomes: list[Outcome], lost: int = 0) -> list[Outcome]:
    for outcome in outcomes:
        expected = "died" if outcome.slot == lost else "returned"
        assert outcome.state == expected, f"slot {outcome.slot}: {outcome.state}\n{outcome.error}\n{outcome.output}"
    return [outcome for outcome in outcomes if outcome.slot != lost]


CASES = [
    ("tqdm", Fault("kill", 0, 3, "backward")),
    ("rich", Fault("kill", 0, 4, "vote")),
    ("tqdm", Fault("kill", 0, 5, "update")),
    ("rich", Fault("kill", 0, 6, "data")),
]


@pytest.mark.parametrize(("bar", "fault"), CASES, ids=lambda value: str(getattr(value, "phase", value)))
def test_rank_zero_dies_and_everything_that_only_it_does_goes_on(
    bar: str, fault: Fault, world: Worlds, undisturbed: Any, tmp_path: Path
) -> None:
    whole, ended = undisturbed(world)
    left = survivors(world(sum(DEGREES)).start(train, str(tmp_path), bar, [fault]).survive())
    for outcome in left:
        result = outcome.value
        (seen,) = result.pop("seen")
        assert seen == {
            "world_size": 2,
            "global_rank": outcome.slot - 1,
            "is_global_zero": outcome.slot == 1,
            "rank_zero_only": outcome.slot - 1,
            "bar": outcome.slot == 1,
            "degrees": (1, 1),
            "lost": (0,),
        }
        assert_same(result, {k: v for k, v in ended.items() if k != "seen"}, EXACT)
    assert_same(rows_of(tmp_path), rows_of(whole), EXACT)
    got, want = scalars_of(tmp_path), scalars_of(whole)
    assert_same(got, want, 1e-6)  # TensorBoard keeps float32
    compare_checkpoints(checkpoints_of(tmp_path), checkpoints_of(whole))
    printed = left[0].output
    assert "Epoch" in printed, printed  # the bar
    assert "slot 1 is rank 0 now" in printed
    names = [event["event"] for event in read_events(tmp_path / "lightning_logs/version_0/events.jsonl")]
    # who dies in its update has voted, so others may have committed the step
    ends = {"change", "replay", *(("forward",) if fault.phase == "update" else ())}
    assert names[0] == "death" and names[-1] in ends and names.count("change") == 1


class DiesSaving(Callback):
    """Kills slot 0 in its second checkpoint, when the model is gathered and nothing is written yet."""

    saves = 0

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.saves += 1
        if slot() == 0 and self.saves == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed_in_a_save(output: str) -> dict[str, Any]:
    return train(output, "tqdm", [], DiesSaving())


def test_a_checkpoint_in_which_rank_zero_dies_is_whole(world: Worlds, undisturbed: Any, tmp_path: Path) -> None:
    whole, ended = undisturbed(world)
    left = survivors(world(sum(DEGREES)).start(train_until_killed_in_a_save, str(tmp_path)).survive())
    assert [outcome.value["best"] for outcome in left] == [ended["best"]] * 2
    compare_checkpoints(checkpoints_of(tmp_path), checkpoints_of(whole))
    assert_same(rows_of(tmp_path), rows_of(whole), EXACT)


def compare_checkpoints(got: dict[str, dict[str, Any]], want: dict[str, dict[str, Any]]) -> None:
    assert got.keys() == want.keys()
    for name, saved in got.items():
        for key in ("global_step", "epoch", "loops"):
            assert_same(saved[key], want[name][key], EXACT, f"{name}[{key}]")
        for key, value in want[name]["state_dict"].items():
            assert relative(saved["state_dict"][key], value) < EXACT, (name, key)
        moments = want[name]["optimizer_states"][0]["state"]
        for number, values in moments.items():
            for key, value in values.items():
                assert_same(saved["optimizer_states"][0]["state"][number][key], value, EXACT, f"{name}: {key}")
