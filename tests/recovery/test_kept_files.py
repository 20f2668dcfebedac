"""What rank 0 does with checkpoint files beside writing them is done by the next rank 0, if it dies before."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning.rigs import Regression, Worlds, loader, make_trainer, slot

STEPS = 4


def _die_in(owner: Any, name: str, number: int) -> None:
    """Let slot 0 die when it calls a function for the number-th time."""
    inner, left = getattr(owner, name), number

    def dies(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= slot() == 0
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **kwargs)

    setattr(owner, name, dies)


def train(directory: str, place: str, number: int) -> tuple[int, ...]:
    _die_in(*{"link": (os, "symlink"), "remove": (TorchCheckpointIO, "remove_checkpoint")}[place], number)
    kept = ModelCheckpoint(Path(directory), every_n_train_steps=1, save_top_k=1, save_last="link")
    trainer = make_trainer((2, 1), max_steps=STEPS, callbacks=[kept], enable_checkpointing=True)
    trainer.fit(Regression(), loader((2, 1), 4 * STEPS))
    return tuple(trainer.strategy.degrees)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("place", "number"), [("link", STEPS), ("remove", STEPS - 1)])
@pytest.mark.chaos
def test_the_next_rank_zero_does_what_was_left_to_do(world: Worlds, place: str, number: int, tmp_path: Path) -> None:
    outcomes = world(3, fresh=True).start(train, str(tmp_path), place, number).survive(60)
    states = [(o.slot, o.state, o.value, o.error, o.output[-2000:]) for o in outcomes]
    assert [o.state for o in outcomes] == ["died", "returned", "returned"], states
    assert {o.value for o in outcomes[1:]} == {(1, 1)}, states
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".ckpt") == [
        f"epoch=0-step={STEPS}.ckpt",
        "last.ckpt",
    ]
    assert os.readlink(tmp_path / "last.ckpt") == f"epoch=0-step={STEPS}.ckpt"
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == STEPS
