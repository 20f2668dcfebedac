"""What a survivor does when it becomes rank 0: it goes on with the dead one's loggers and progress bar.

Everything that only rank 0 does is here: ``rank_zero_only`` functions, ``ModelCheckpoint`` and ``EarlyStopping`` follow
by themselves once the rank is set, because their state is the same on all ranks.

A rank logs a step's rows after that step's update. When rank 0 dies, it may have logged the rows of a step that all
others replay, or not those of a step that all others have committed. Other ranks therefore remember what rank 0 should
have logged since the last update, and the new rank 0 drops the former and adds the latter.

Private parts of Lightning used here were read in 2.6.6.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger as FabricCSVLogger
from lightning.fabric.loggers.csv_logs import _ExperimentWriter as FabricWriter
from lightning.fabric.loggers.tensorboard import TensorBoardLogger as FabricTensorBoardLogger
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter
from lightning.pytorch.loggers.logger import Logger

from lightning_ntp.lightning.checkpoint_io import why_not_written

log = logging.getLogger("lightning_ntp")


def share_logger_versions(trainer: Trainer, broadcast: Callable[[Any], Any]) -> None:
    """Let all ranks know rank 0's logger versions. Call it on all ranks, before loggers make their directories.

    A logger looks for the next free version when it is first asked, so a rank that asks after rank 0 has begun to write
    gets another one, and would go on in another directory.

    Args:
        trainer: The trainer.
        broadcast: Gives rank 0's value on all ranks.
    """
    versions = broadcast([logger.version if hasattr(logger, "_version") else None for logger in trainer.loggers])
    for logger, version in zip(trainer.loggers, versions, strict=True):
        if version is not None:
            logger._version = version  # type: ignore[attr-defined]


def remember_rows(trainer: Trainer) -> None:
    """Let this rank remember what is logged in the newest step. Call it on all ranks when the trainer is set up.

    From then on rank 0 writes CSV and TensorBoard files out at every call: what only its memory holds dies with it.
    Others may stand before the logger afterwards, if they put back what they found.
    """
    for logger in trainer.loggers:
        rows = _rows_of(logger)
        if rows is None:
            rows = logger._ntp_rows = _Rows(trainer, logger)  # type: ignore[attr-defined]
            logger.log_metrics = rows  # type: ignore[method-assign]
        rows.trainer = trainer
        if isinstance(logger, FabricCSVLogger) and logger._experiment is not None:
            _write_whole_rows(logger._experiment)


def take_over_rank_zero(trainer: Trainer, loggers: Sequence[Logger] = (), running: bool = True) -> None:
    """Go on with loggers and progress bar where the rank 0 that died has left them.

    Call it once ``rank_zero_only.rank``, ``trainer.global_rank`` and ``trainer.world_size`` are the new ones, and after
    the interrupted step was undone, before it goes on: what this rank has logged is kept, what it will log is dropped.

    Args:
        trainer: The trainer.
        loggers: More than the trainer has now: a learning-rate finder takes them away while it runs.
        running: Whether its loops run already. If not, they will show the progress bar; the files of an earlier run in
            the same script are gone on with in any case.
    """
    # 2.6.6: `_LoggerConnector.log_metrics` takes this number unless the user logs a "step"
    next_step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in (*trainer.loggers, *(each for each in loggers if each not in trainer.loggers)):
        if isinstance(logger, FabricCSVLogger):
            _go_on_in_csv(logger, _rows_of(logger), next_step)
        elif isinstance(logger, FabricTensorBoardLogger):
            _go_on_in_tensorboard(logger, _rows_of(logger), next_step)
    if trainer.progress_bar_callback is not None:
        if running:
            _show(trainer.progress_bar_callback, trainer)
        else:
            trainer.progress_bar_callback.enable()


def hand_over_rank_zero(trainer: Trainer) -> None:
    """In a rank that is rank 0 no more, since a lower slot has joined: what is in its memory goes to the files."""
    for logger in trainer.loggers:
        if isinstance(logger, FabricCSVLogger | FabricTensorBoardLogger) and logger._experiment is not None:
            logger._experiment.flush() if hasattr(logger._experiment, "flush") else logger._experiment.save()
            logger._experiment = None
    if trainer.progress_bar_callback is not None:
        trainer.progress_bar_callback.disable()


# ---- what was logged -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    metrics: dict[str, Any]
    step: int | None


@dataclass
class _Rows:
    """Stands in for a logger's ``log_metrics``: does the same, and remembers the rows since the last optimizer step."""

    trainer: Trainer
    logger: Logger
    count: int = 0
    """Rows logged so far."""
    told: bool = False
    """That they cannot be written."""
    highest: int = -1
    """The highest step of the rows that are not remembered any more."""
    before: list[_Row] = field(default_factory=list)
    """The rows of the optimizer step before; rank 0 had logged them."""
    newest: list[_Row] = field(default_factory=list)
    at: int = -1
    """The optimizer steps that were done when the newest were logged."""

    def __call__(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.trainer.global_step != self.at:
            self.highest = max([self.highest, *_steps(self.before)])
            self.before, self.newest, self.at = self.newest, [], self.trainer.global_step
        self.count += 1
        self.newest.append(_Row(dict(metrics), step))
        self.write(self.newest[-1])

    def write(self, row: _Row) -> None:
        """Log a row, in rank 0. If a file cannot be written, training goes on: the next rank 0 would meet the same."""
        file = isinstance(self.logger, FabricCSVLogger | FabricTensorBoardLogger)
        try:
            type(self.logger).log_metrics(self.logger, metrics=row.metrics, step=row.step)
            if file:
                self.logger.save()
        except OSError as error:
            if not file:
                raise
            if not self.told:
                self.told = True
                log.warning("%s cannot be written: %s; training goes on", self.logger.log_dir, why_not_written(error))


def _rows_of(logger: Logger) -> _Rows | None:
    return getattr(logger, "_ntp_rows", None)


_REMEMBERED = ("count", "highest", "before", "newest", "at")


def stand_ins(trainer: Trainer) -> list[Callable[..., None] | None]:
    """What stands in for each logger's ``log_metrics`` since :func:`remember_rows`; None where nothing does."""
    return [_rows_of(logger) for logger in trainer.loggers]


def remembered_rows(trainer: Trainer) -> list[dict[str, Any] | None]:
    """What this rank remembers for each logger, for a rank that has not seen it."""
    found = [_rows_of(logger) for logger in trainer.loggers]
    return [None if rows is None else {k: getattr(rows, k) for k in _REMEMBERED} for rows in found]


def put_remembered_rows(trainer: Trainer, remembered: Sequence[dict[str, Any] | None]) -> None:
    """Remember what another rank does: any rank may be rank 0 later."""
    for logger, values in zip(trainer.loggers, remembered, strict=True):
        rows = _rows_of(logger)
        if rows is not None and values is not None:
            vars(rows).update(values)


def _steps(rows: list[_Row]) -> list[int]:
    return [row.step for row in rows if row.step is not None]


# ---- CSV -------------------------------------------------------------------------------------------------------------


def _go_on_in_csv(logger: FabricCSVLogger, rows: _Rows | None, next_step: int) -> None:
    """Open a writer on the file as it is: one that is made in the ordinary way deletes it (2.6.6)."""
    directory = Path(logger.log_dir)
    if "://" in logger.log_dir:
        raise NotImplementedError(f"{logger.log_dir}: another rank can go on with a metrics.csv on a local disk only")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FabricWriter.NAME_METRICS_FILE
    with tempfile.TemporaryDirectory() as empty:
        writer = (ExperimentWriter if isinstance(logger, CSVLogger) else FabricWriter)(empty)
    writer.log_dir, writer.metrics_file_path = logger.log_dir, str(path)
    _write_whole_rows(writer)
    logger._experiment = writer
    if isinstance(writer, ExperimentWriter):
        hparams = directory / ExperimentWriter.NAME_HPARAMS_FILE
        if hparams.exists():
            writer.hparams = load_hparams_from_yaml(str(hparams), use_omegaconf=False)
    logged = rows.count if rows is not None else 0
    writer.metrics_keys, kept = _cut(path, lambda kept, step: kept > logged and step is not None and step >= next_step)
    if rows is not None and kept < logged:
        for row in rows.newest[-(logged - kept) :]:
            rows.write(row)
    elif rows is not None:
        rows.count = kept


def _cut(path: Path, goes: Callable[[int, int | None], bool]) -> tuple[list[str], int]:
    """Cut a half-written last line off a CSV file, and rows at its end.

    Args:
        path: The file; it may be missing.
        goes: Whether the last row goes, given how many rows there are and its step.

    Returns:
        The columns, and how many rows stay.
    """
    if not path.exists():
        return [], 0
    data = path.read_bytes()
    end, kept = data.rfind(b"\n") + 1, data.count(b"\n") - 1
    if not end:
        path.unlink()  # not even the header is whole
        return [], 0
    columns = next(csv.reader([data[: data.index(b"\n")].decode()]))
    while kept > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        row = dict(zip(columns, next(csv.reader([data[start:end].decode()]), []), strict=False))
        try:
            step = int(float(row.get("step") or "nan"))
        except ValueError:
            step = None
        if not goes(kept, step):
            break
        end, kept = start, kept - 1
    if end < len(data):
        os.truncate(path, end)
    return columns, kept


def _write_whole_rows(writer: FabricWriter) -> None:
    """Let a writer that gets new columns put the new file in place of the old one at once, and keep rows in memory that
    a full disk does not take.

    2.6.6: ``_ExperimentWriter._rewrite_with_new_header`` empties the file first; killed then, everything would be lost.
    ``save`` forgets its ``metrics`` once they are written, and has taken their columns into ``metrics_keys`` before.
    """
    if "://" in writer.log_dir:
        return
    path = Path(writer.metrics_file_path)
    size, told = 0, False

    def rewrite(columns: list[str]) -> None:
        nonlocal size
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        beside = path.with_name(f".{path.name}.new")
        try:
            with open(beside, "w", newline="") as file:
                new = csv.DictWriter(file, fieldnames=columns)
                new.writeheader()
                new.writerows(rows)
            size = beside.stat().st_size
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def save() -> None:
        nonlocal size, told
        existed, columns = path.exists(), list(writer.metrics_keys)
        size = path.stat().st_size if existed else 0
        try:
            type(writer).save(writer)
            told = False
        except OSError as error:
            writer.metrics_keys = columns
            with contextlib.suppress(OSError):
                os.truncate(path, size) if existed else path.unlink()  # no half rows
            if not told:
                told = True
                log.warning(
                    "%s cannot be written: %s; training goes on, and rows wait in memory until it can",
                    path,
                    why_not_written(error),
                )

    writer._rewrite_with_new_header = rewrite  # type: ignore[method-assign,assignment]
    writer.save = save  # type: ignore[method-assign]


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def _go_on_in_tensorboard(logger: FabricTensorBoardLogger, rows: _Rows | None, next_step: int) -> None:
    """Another event file in the same directory. Events cannot be cut off; TensorBoard is told to pass over them."""
    first = next_step
    if rows is not None and rows.at == rows.trainer.global_step:
        first = min([first, *_steps(rows.newest)])
    # "from this step on" means "what rank 0 logged last" only where the user's own steps are not ahead of the trainer's
    purges = rows is not None and rows.highest < first and first > 0
    given = logger._kwargs
    logger._kwargs = {**given, "purge_step": first} if purges else given
    logger._experiment = None
    try:
        _ = logger.experiment
    finally:
        logger._kwargs = given
    if rows is not None and purges:
        for row in (*rows.before, *rows.newest):
            if row.step is not None and row.step >= first:
                rows.write(row)


# ---- progress bars ---------------------------------------------------------------------------------------------------


def _show(bar: ProgressBar, trainer: Trainer) -> None:
    """Start the bar in this rank, at the batch that goes on. A bar of another kind is enabled and left to itself."""
    bar.enable()
    module = trainer.lightning_module
    bar.reset_dataloader_idx_tracker()
    if trainer.state.fn == "fit" and not trainer.sanity_checking:
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if isinstance(bar, RichProgressBar):
            bar.on_train_start(trainer, module)
            bar.on_train_epoch_start(trainer, module)
            bar._update(bar.train_progress_bar_id, done)
        elif isinstance(bar, TQDMProgressBar):
            bar.on_train_start(trainer, module)
            bar.on_train_epoch_start(trainer)
            if not bar.train_progress_bar.disable:
                bar.train_progress_bar.n = done
                # the rate is that of the batches shown from here on
                bar.train_progress_bar.initial = done
                bar.train_progress_bar.refresh()
    stage = trainer.state.stage
    starts = {
        "sanity_check": bar.on_sanity_check_start,
        "validate": bar.on_validation_start,
        "test": bar.on_test_start,
        "predict": bar.on_predict_start,
    }
    if stage is not None and stage.value in starts:
        starts[stage.value](trainer, module)
