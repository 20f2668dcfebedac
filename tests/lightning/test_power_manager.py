"""The power manager's part in the ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_ntp.callbacks import PowerManager
from lightning_ntp.launch import jobs
from tests.lightning.rigs import Regression, Worlds, make_trainer, rows


def test_under_another_strategy_it_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(None, callbacks=[PowerManager()], default_root_dir=tmp_path)
    trainer.fit(Regression(), DataLoader(rows(4), batch_size=2))
    assert trainer.global_step == 2
    assert "PowerManager does nothing here" in caplog.text


class Loop(Callback):
    """Says paces as the loop in the launching process does, and notes what comes of it.

    Args:
        manager: Who hears it.
        directory: Of the job.
        says: Step -> relative times by replica.
    """

    def __init__(self, manager: PowerManager, directory: Path, says: dict[int, dict[str, float]]) -> None:
        self.manager, self._directory, self._says = manager, directory, says
        self.shares: list[dict[int, int]] = []

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.manager._directory = self._directory

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        self.shares.append(strategy.sample_shares)
        step = trainer.global_step
        if trainer.is_global_zero and step in self._says:
            path = jobs.paces_note(self._directory)
            jobs.write_whole(path, json.dumps({"serial": step, "relative_time": self._says[step]}))
            os.utime(path, ns=(step, step))  # whatever the grain of the file system's times


def _follows(directory: str, says: dict[int, dict[str, float]]) -> list[dict[int, int]]:
    manager = PowerManager()
    loop = Loop(manager, Path(directory), says)
    trainer = make_trainer((1, 1), callbacks=[loop, manager])
    trainer.fit(Regression(), DataLoader(rows(64), batch_size=2, num_workers=2))
    return loop.shares


@pytest.mark.parametrize("says", [{1: {"1": 3.0}, 3: {}}, {1: {"1": 3.0}, 3: {"1": 1.05}}])
def test_shares_follow_the_newest_word_though_a_change_is_on_its_way(
    world: Worlds, says: dict[int, dict[str, float]], tmp_path: Path
) -> None:
    """Workers have fetched some batches ahead, so a change comes steps later; by then the replica may be fast again."""
    for shares in world(2).run(_follows, str(tmp_path), says):
        assert {0: 3, 1: 1} in shares, "what was asked for comes"
        assert shares[-1] == {0: 2, 1: 2}, shares
