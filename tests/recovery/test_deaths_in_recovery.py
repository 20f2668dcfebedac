"""A second rank dies while the others recover from the first: the old layout stands, and they plan anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.jobs import Job, Worlds, survives
from tests.recovery.points import POINTS

# agreement and building of groups happen once at the start of a job too
_NUMBER = {"agree": 2, "joined": 2, "rebuild": 2, "rebuilt": 2}


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=[pytest.mark.chaos] * (p in ("rebuild", "rebuilt", "joined"))) for p in POINTS]
)
def test_a_death_in_a_recovery(world: Worlds, point: str, tmp_path: Path) -> None:
    job = Job((2, 3), ((3, 2, "backward"),), ((0, point, _NUMBER.get(point, 1)),))
    survives(world, job, tmp_path, (1, 2))


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("joined", marks=pytest.mark.chaos),
        pytest.param("rebuild", marks=pytest.mark.chaos),
        pytest.param("received", marks=pytest.mark.chaos),
        "vote",
    ],
)
def test_a_death_in_a_recovery_of_a_step_that_others_have_committed(world: Worlds, point: str, tmp_path: Path) -> None:
    job = Job((2, 3), ((3, 2, "between_vote_and_update"),), ((4, point, _NUMBER.get(point, 1)),))
    survives(world, job, tmp_path, (2, 1))


@pytest.mark.chaos
@pytest.mark.parametrize("phase", ["data", "vote", "update"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("slot", [0, 2, 4])  # slots 1 and 3 together have the only copies of some units
def test_a_death_of_any_slot_in_any_recovery(world: Worlds, slot: int, point: str, phase: str, tmp_path: Path) -> None:
    job = Job((2, 3), ((3, 2, phase),), ((slot, point, _NUMBER.get(point, 1)),))
    survives(world, job, tmp_path, (1, 2) if slot < 2 else (2, 1))
