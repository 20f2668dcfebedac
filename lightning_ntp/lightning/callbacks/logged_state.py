"""Numbers of the launching process in the rows of the run's loggers."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Trainer


def row_is_due(trainer: Trainer, before: int) -> bool:
    """Whether rank 0 logs a row at the end of this batch.

    Args:
        trainer: The running trainer.
        before: Steps at the end of the batch before: of an accumulated step, the other batches have nothing new.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return bool(trainer.is_global_zero and every and trainer.global_step % every == 0 and before != trainer.global_step)


def log_row(trainer: Trainer, read: Callable[[], dict[str, float]]) -> None:
    """Give the loggers a row, if there are any, and anything to log.

    Args:
        trainer: The running trainer.
        read: Gives the numbers by name.
    """
    if trainer.loggers and (metrics := read()):
        for logger in trainer.loggers:
            # Lightning counts the steps that it logs from 0
            logger.log_metrics(metrics, step=max(0, trainer.global_step - 1))
