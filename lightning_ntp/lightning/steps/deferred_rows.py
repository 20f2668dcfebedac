"""Rows that a step or batch writes to loggers wait for its commit: a file cannot be rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning.pytorch.loggers import Logger
from torch import Tensor


class DeferredRows:
    """Holds back ``logger.log_metrics`` while a step or a batch of an evaluation is open.

    What a user writes past it (``logger.experiment.add_image``) is written again by a replay.
    """

    def __init__(self) -> None:
        self._open: list[Callable[[], bool]] = []
        self._rows: list[Callable[[], Any]] = []
        self._loggers: list[tuple[Logger, Any]] = []

    def hold_while(self, is_open: Callable[[], bool]) -> None:
        """Hold rows back while this is true too."""
        self._open.append(is_open)

    def install(self, loggers: Iterable[Logger]) -> None:
        """Stand before these loggers."""
        for logger in loggers:
            self._loggers.append((logger, logger.__dict__.get("log_metrics")))
            logger.log_metrics = partial(self._log, logger.log_metrics)  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Write what is left, and go away."""
        self.write()
        for logger, before in self._loggers:
            if before is None:
                logger.__dict__.pop("log_metrics", None)
            else:
                logger.log_metrics = before  # type: ignore[method-assign]
        self._loggers, self._open = [], []

    def remember(self) -> Callable[[], None]:
        """Remember what waits; the result drops what came after."""
        saved = list(self._rows)

        def restore() -> None:
            self._rows = list(saved)

        return restore

    @property
    def waiting(self) -> tuple[Callable[[], Any], ...]:
        """The rows that are held back now, oldest first."""
        return tuple(self._rows)

    @waiting.setter
    def waiting(self, rows: Iterable[Callable[[], Any]]) -> None:
        self._rows = list(rows)

    def write(self) -> None:
        """The step is committed."""
        rows, self._rows = self._rows, []
        for row in rows:
            row()

    def _log(self, log_metrics: Callable[..., Any], metrics: Any = None, *args: Any, **kwargs: Any) -> None:
        if any(is_open() for is_open in self._open):
            # values of now: the step may go on to change its tensors
            metrics = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in (metrics or {}).items()}
            self._rows.append(partial(log_metrics, metrics, *args, **kwargs))
        else:
            log_metrics(metrics, *args, **kwargs)
