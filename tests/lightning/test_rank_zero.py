"""A survivor that becomes rank 0 goes on with the loggers and the progress bar of the one that died.

One process plays both, one after the other: first the rank 0 that dies, then a survivor, which runs the same steps
without writing until it takes over. Loggers, bars and callbacks are Lightning's own.
"""

from __future__ import annotations

import csv
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ntp.lightning.rank_zero import (
    remember_rows,
    share_logger_versions,
    take_over_rank_zero,
)

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")

STEPS, BATCHES = 10, 4
"""Optimizer steps of a run, and batches of an epoch."""


@pytest.fixture(autouse=True)
def rank() -> Iterator[None]:
    before = rank_zero_only.rank
    yield
    rank_zero_only.rank = before


class Ranked(SingleDeviceStrategy):
    """The rank is whatever ``rank_zero_only`` says at the moment."""

    @property
    def global_rank(self) -> int:
        return rank_zero_only.rank

    @global_rank.setter
    def global_rank(self, rank: int) -> None: ...

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        remember_rows(trainer)


class Net(LightningModule):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(size, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.layer(batch[0]) - 1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Death(RuntimeError):
    pass


class Dies(Callback):
    """Rank 0 dies in a hook of a step."""

    def __init__(self, hook: str, step: int) -> None:
        def die(trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == step:
                raise Death

        setattr(self, hook, die)


class TakesOver(Callback):
    """A survivor replays the step ``step``, as rank 0."""

    def __init__(self, step: int, check: Callable[[Trainer], None] | None = None) -> None:
        self.step, self.check = step, check

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            assert rank_zero_only.rank > 0
            rank_zero_only.rank = 0
            take_over_rank_zero(trainer)
            if self.check is not None:
                self.check(trainer)


def run(rank: int, loggers: list[Any], *callbacks: Callback, module: LightningModule | None = None) -> Trainer:
    rank_zero_only.rank = rank
    trainer = Trainer(
        accelerator="cpu",
        strategy=Ranked(torch.device("cpu")),
        logger=loggers,
        callbacks=list(callbacks),
        max_steps=STEPS,
        log_every_n_steps=1,
        val_check_interval=2,
        num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=any(isinstance(c, TQDMProgressBar | RichProgressBar) for c in callbacks),
        enable_model_summary=False,
    )
    data = torch.linspace(0, 1, 3 * BATCHES).view(BATCHES, 3)
    loaders = [DataLoader(TensorDataset(data)) for _ in range(2)]
    try:
        trainer.fit(module or Net(), *loaders)
    except Death:
        pass
    return trainer


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def loggers_in(path: Path) -> list[Any]:
    return [CSVLogger(path, version=0), TensorBoardLogger(path, version="board")]


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(path))
    board.Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def next_second() -> None:
    """TensorBoard reads files in the order of their names, which begin with the second they were made in."""
    time.sleep(1.01 - time.time() % 1)


DEATHS = {
    "level": ("on_before_backward", 5),
    "in its first batch hook": ("on_train_batch_start", 5),
    "before it logged the last committed step": ("on_train_batch_end", 5),
    "before it logged a validation": ("on_validation_epoch_start", 6),
    "after it logged a step that is replayed": ("on_train_batch_start", 6),
    "ahead, after it logged a validation": ("on_before_backward", 8),
}


@pytest.mark.parametrize("case", DEATHS)
def test_every_row_is_logged_once_whenever_rank_zero_dies(case: str, tmp_path: Path) -> None:
    hook, step = DEATHS[case]
    # who is ahead has committed a step that the survivors have not; who died after a step's end has them behind him
    takes_over = step - 1 if "replayed" in case or "ahead" in case else step
    monitor = LearningRateMonitor
    run(0, loggers_in(tmp_path / "whole"), monitor("step"))
    run(0, loggers_in(tmp_path / "broken"), monitor("step"), Dies(hook, step))
    next_second()
    run(1, loggers_in(tmp_path / "broken"), monitor("step"), TakesOver(takes_over))
    whole, broken = (tmp_path / name / "lightning_logs" for name in ("whole", "broken"))
    assert rows_of(broken / "version_0" / "metrics.csv") == rows_of(whole / "version_0" / "metrics.csv")
    assert {row["step"] for row in rows_of(whole / "version_0" / "metrics.csv")} == {str(n) for n in range(STEPS)}
    assert scalars(broken / "board") == scalars(whole / "board")
    assert not list(broken.glob("version_1"))
    assert len(list((broken / "board").glob("events.*"))) == 2


def test_the_hyperparameters_of_the_dead_rank_are_kept(tmp_path: Path) -> None:
    run(0, [CSVLogger(tmp_path, version=0)], Dies("on_train_batch_start", 3))
    trainer = run(1, [CSVLogger(tmp_path, version=0)], TakesOver(3))
    assert trainer.logger is not None
    trainer.logger.log_hyperparams({"more": 1})
    saved = yaml.safe_load((tmp_path / "lightning_logs" / "version_0" / "hparams.yaml").read_text())
    assert saved == {"size": 3, "more": 1}


def test_steps_of_the_users_own_are_not_taken_for_uncommitted_ones(tmp_path: Path) -> None:
    class Samples(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("step", 1000.0 * (self.trainer.global_step + 1))
            return loss

    for name in ("whole", "broken"):
        run(
            0,
            loggers_in(tmp_path / name),
            *([Dies("on_before_backward", 5)] if name == "broken" else []),
            module=Samples(),
        )
    next_second()
    run(1, loggers_in(tmp_path / "broken"), TakesOver(5), module=Samples())
    whole, broken = (tmp_path / name / "lightning_logs" for name in ("whole", "broken"))
    assert rows_of(broken / "version_0" / "metrics.csv") == rows_of(whole / "version_0" / "metrics.csv")
    assert scalars(broken / "board") == scalars(whole / "board")


@pytest.mark.parametrize("torn", [b"0,0.5", b"0,0.5,\xff\xfe"])
def test_a_line_that_was_cut_off_is_dropped(torn: bytes, tmp_path: Path) -> None:
    run(0, [CSVLogger(tmp_path / "whole", version=0)])
    run(0, [CSVLogger(tmp_path, version=0)], Dies("on_before_backward", 5))
    metrics = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    metrics.write_bytes(metrics.read_bytes() + torn)
    run(1, [CSVLogger(tmp_path, version=0)], TakesOver(5))
    assert rows_of(metrics) == rows_of(tmp_path / "whole" / "lightning_logs" / "version_0" / "metrics.csv")


@pytest.mark.parametrize("left", ["nothing", "half a header"])
def test_a_rank_that_dies_before_its_first_whole_line_leaves_nothing_to_keep(left: str, tmp_path: Path) -> None:
    directory = tmp_path / "lightning_logs" / "version_0"
    if left == "half a header":
        directory.mkdir(parents=True)
        (directory / "metrics.csv").write_text("epoch,lo")
    run(1, [CSVLogger(tmp_path, version=0)], TakesOver(0))
    run(0, [CSVLogger(tmp_path / "whole", version=0)])
    assert rows_of(directory / "metrics.csv") == rows_of(tmp_path / "whole/lightning_logs/version_0/metrics.csv")


def test_whenever_a_writer_is_killed_no_row_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a writer that gets a new column writes the whole file anew: what is on disk meanwhile must be whole too
    metrics = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    write, left = csv.DictWriter.writerows, []

    def spy(self: Any, rows: Any) -> None:
        left.append(metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
        write(self, rows)

    monkeypatch.setattr(csv.DictWriter, "writerows", spy)
    run(0, [CSVLogger(tmp_path, version=0)], Dies("on_before_backward", 5))
    run(1, [CSVLogger(tmp_path, version=0)], LearningRateMonitor("step"), TakesOver(5))
    assert left == sorted(left)
    assert len(left) > STEPS


class Full(Callback):
    """No file can grow beyond 80 bytes from one step to another."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (80, resource.RLIM_INFINITY))
        if trainer.global_step == self.last:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("columns", [(), (LearningRateMonitor("step"),)])
def test_rows_wait_while_the_disk_is_full(
    columns: tuple[Callback, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(0, [CSVLogger(tmp_path / "whole", version=0)], *columns)
    run(0, [CSVLogger(tmp_path, version=0)], *columns, Full(3, 7))
    directory = tmp_path / "lightning_logs" / "version_0"
    assert rows_of(directory / "metrics.csv") == rows_of(tmp_path / "whole/lightning_logs/version_0/metrics.csv")
    assert sorted(path.name for path in directory.iterdir()) == ["hparams.yaml", "metrics.csv"]
    said = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert said == [
        f"{directory}/metrics.csv cannot be written: File too large (EFBIG); training goes on, and rows wait"
        " in memory until it can"
    ]


def test_a_fabric_csv_logger_appends_too(tmp_path: Path) -> None:
    class Plain(Net):
        def __init__(self) -> None:
            LightningModule.__init__(self)  # no hyperparameters: this logger refuses them
            self.layer = torch.nn.Linear(3, 1, bias=False)
            torch.nn.init.ones_(self.layer.weight)

    def both(path: Path) -> list[Any]:
        return [CSVLogger(path, version=0), FabricCSVLogger(path / "fabric", version=0)]

    for name in ("whole", "broken"):
        run(0, both(tmp_path / name), *([Dies("on_train_batch_end", 5)] if name == "broken" else []), module=Plain())
    run(1, both(tmp_path / "broken"), TakesOver(5), module=Plain())
    whole, broken = (tmp_path / name / "fabric/lightning_logs/version_0/metrics.csv" for name in ("whole", "broken"))
    assert rows_of(broken) == rows_of(whole)


def test_all_ranks_go_by_the_versions_of_rank_zero(tmp_path: Path) -> None:
    for name in ("version_0", "version_1"):
        (tmp_path / "lightning_logs" / name).mkdir(parents=True)
    rank_zero, survivor = (
        Trainer(accelerator="cpu", logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]) for _ in range(2)
    )
    told: list[Any] = []
    share_logger_versions(rank_zero, lambda versions: told.append(versions) or versions)
    (tmp_path / "lightning_logs" / "version_2").mkdir()  # rank 0 has begun to write
    share_logger_versions(survivor, lambda versions: told[0])
    assert [logger.version for logger in survivor.loggers] == [2, 2]
    assert survivor.loggers[0].log_dir == rank_zero.loggers[0].log_dir


# ---- progress bars ---------------------------------------------------------------------------------------------------


def test_tqdm_goes_on_at_the_right_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar()

    def check(trainer: Trainer) -> None:
        assert bar.is_enabled
        assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (2, BATCHES)
        assert not bar.train_progress_bar.disable
        assert bar.train_progress_bar.desc.startswith("Epoch 1")

    run(1, [], bar, TakesOver(6, check))
    printed = capsys.readouterr().out
    assert "Epoch 1:  50%" in printed and "Epoch 1: 100%" in printed and "Epoch 2" in printed
    assert "Epoch 0" not in printed


def test_rich_goes_on_at_the_right_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = RichProgressBar()

    def check(trainer: Trainer) -> None:
        task = bar.train_progress_bar
        assert bar.is_enabled
        assert (task.completed, task.total) == (2, BATCHES)
        assert task.description.startswith("Epoch 1")
        assert bar.progress is not None and bar.progress.live.is_started

    run(1, [], bar, TakesOver(6, check))
    assert "Epoch 2" in capsys.readouterr().out
    assert bar.progress is not None and not bar.progress.live.is_started


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_bar_that_the_user_switched_off_stays_off(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bar = kind(refresh_rate=0)
    run(1, [], bar, TakesOver(6))
    assert "Epoch" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_bar_started_between_validation_batches_shows_validation_and_training(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    class InValidation(Callback):
        def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step == 6 and rank_zero_only.rank:
                rank_zero_only.rank = 0
                take_over_rank_zero(trainer)

    run(1, [], kind(), InValidation())
    printed = capsys.readouterr().out
    assert "Epoch 2" in printed and "Epoch 0" not in printed


# ---- callbacks that need nothing -------------------------------------------------------------------------------------


def test_checkpoints_and_early_stopping_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def callbacks(name: str) -> tuple[ModelCheckpoint, EarlyStopping]:
        checkpoint = ModelCheckpoint(tmp_path / name, monitor="val", save_top_k=2, save_last=True, filename="{step}")
        return checkpoint, EarlyStopping("val", patience=2)

    whole, broken = callbacks("whole"), callbacks("broken")
    first = run(0, [], *whole)
    second = run(1, [], *broken, TakesOver(5))
    assert first.global_step == second.global_step

    def state(callback: ModelCheckpoint) -> dict[str, Any]:
        def names(value: Any) -> Any:
            if isinstance(value, dict):
                return {names(k): names(v) for k, v in value.items()}
            return value.rpartition("/")[2] if isinstance(value, str) else value

        return {key: names(value) for key, value in callback.state_dict().items() if key != "dirpath"}

    assert state(broken[0]) == state(whole[0])
    assert state(whole[0])["best_model_path"] and state(whole[0])["last_model_path"] == "last.ckpt"
    assert broken[1].state_dict() == whole[1].state_dict()
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    # what was saved before the loss was the dead rank's to write, and is not played here
    assert {path.name for path in (tmp_path / "broken").iterdir()} == {
        n for n in names if n not in ("step=2.ckpt", "step=4.ckpt")
    }
    assert "last.ckpt" in names
