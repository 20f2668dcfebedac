"""Ranks leave as planned: no step is lost or done again, and nobody can tell from the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_ntp.engine.events import read_events
from tests.recovery.jobs import EXACT, Job, Result, Samples, Worlds, survives
from tests.recovery.models import Automatic
from tests.recovery.test_modes import BOUNDS, MODES


class Validates(Automatic):
    """Logs a loss of its own of the data that it validates on."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(12), batch_size=2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.log("val_loss", (self.net(x) - y).square().mean(), on_step=False, on_epoch=True, sync_dist=True)


def events(result: Result) -> list[str]:
    return [event["event"] for event in read_events(result.directory / "rows" / "events.jsonl")]


def leaves(world: Worlds, job: Job, directory: Path, degrees: tuple[int, ...], **more: Any) -> Result:
    """Run a job with planned leaves, which must not cost a step."""
    result = survives(world, job, directory, degrees, released=[leaver for _, leaver, _ in job.drains], **more)
    assert "replay" not in events(result)
    for outcome in result.outcomes:
        if outcome.slot in {leaver for _, leaver, _ in job.drains}:
            assert f"slot {outcome.slot} leaves the job: maintenance" in outcome.output
    return result


@pytest.mark.parametrize("slot", [0, *(pytest.param(s, marks=pytest.mark.chaos) for s in (1, 2, 3))])
def test_a_slot_leaves(world: Worlds, slot: int, tmp_path: Path) -> None:
    job = Job((2, 2), drains=((1, slot, 3),))
    leaves(world, job, tmp_path, (1, 2) if slot < 2 else (2, 1))


IN_TEST = ("accumulation",)


@pytest.mark.parametrize("mode", [m if m in IN_TEST else pytest.param(m, marks=pytest.mark.chaos) for m in MODES])
def test_in_every_mode(world: Worlds, mode: str, tmp_path: Path) -> None:
    step = 2 if "manual" in mode else 1  # both optimizers of a manual step count
    job = Job((2, 2), drains=((3, 1, step),), **MODES[mode])
    leaves(world, job, tmp_path, (1, 2), bound=BOUNDS.get(mode, EXACT))


@pytest.mark.parametrize("slot", [0, pytest.param(3, marks=pytest.mark.chaos)])
def test_asked_for_in_the_middle_of_a_validation(world: Worlds, slot: int, tmp_path: Path) -> None:
    """Nobody leaves before the next step: what validation finds is complete, and of one layout."""
    job = Job((2, 2), module="tests.recovery.test_drain:Validates", drains=((2, slot, 2),), asks_in="validation")
    leaves(world, replace(job, trainer={"val_check_interval": 2}), tmp_path, (1, 2) if slot < 2 else (2, 1))


def test_before_there_is_an_optimizer_state(world: Worlds, tmp_path: Path) -> None:
    leaves(world, Job((3,), drains=((0, 1, 0),)), tmp_path, (2,))


@pytest.mark.chaos
def test_one_after_the_other_down_to_the_last_rank(world: Worlds, tmp_path: Path) -> None:
    """Of a single replica, which a death would have ended: who leaves can still send."""
    job = Job((3,), drains=((2, 1, 1), (2, 2, 3)), epochs=2)
    leaves(world, job, tmp_path, (1,))


@pytest.mark.parametrize("slot", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_the_last_rank_of_a_replica_leaves(world: Worlds, slot: int, tmp_path: Path) -> None:
    job = Job((1, 1), drains=((1 - slot, slot, 2),))
    leaves(world, job, tmp_path, (0, 1) if slot == 0 else (1, 0), dropped=True)


@pytest.mark.chaos
def test_registered_state_and_kept_graphs_come_along(world: Worlds, tmp_path: Path) -> None:
    leaves(world, Job((2, 2), drains=((0, 2, 3),), module="Averages"), tmp_path / "averages", (2, 1))
    leaves(world, Job((2, 2), drains=((0, 2, 3),), module="Keeps"), tmp_path / "keeps", (2, 1))


@pytest.mark.parametrize(
    "point", ["travelled", *(pytest.param(p, marks=pytest.mark.chaos) for p in ("built", "gradients", "switched"))]
)
@pytest.mark.parametrize(
    "dies", [0, pytest.param(1, marks=pytest.mark.chaos), pytest.param(2, marks=pytest.mark.chaos)]
)
def test_a_death_on_the_way_cancels_it_or_follows_it(world: Worlds, point: str, dies: int, tmp_path: Path) -> None:
    """Slot 2 is to leave. Whatever is lost when: all steps are made, and the leave comes in the end."""
    job = Job((2, 2), deaths=((dies, point, 1),), drains=((3, 2, 2),))
    released = [] if dies == 2 else [2]
    degrees = (1, 1) if dies < 2 else (2, 1)
    survives(world, job, tmp_path, degrees, released=released)


@pytest.mark.chaos
def test_copies_of_neighbours_are_made_anew(world: Worlds, tmp_path: Path) -> None:
    job = Job((4,), ((1, 6, "backward"),), drains=((0, 3, 2),), strategy={"redundancy": "neighbor"}, epochs=3)
    survives(world, job, tmp_path, (2,), released=[3])


def test_who_cannot_leave_is_told_why(world: Worlds, tmp_path: Path) -> None:
    job = Job((2, 2), module="AsksForTheImpossible", strategy={"min_tensor_parallel_size": 2})
    survives(world, job, tmp_path, (2, 2))
