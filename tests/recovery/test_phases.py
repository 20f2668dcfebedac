"""A rank is killed at every point of a step: nobody can tell from the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ntp.lightning.callbacks.fault_schedule import STEP_PHASES
from tests.recovery.jobs import Job, Worlds, survives


@pytest.mark.parametrize(
    ("slot", "phase"),
    [
        # every other one here; `make chaos` has all of them, of every slot
        pytest.param(k % 4, phase, marks=[pytest.mark.chaos] * (k % 2 == 0 and phase != "vote"))
        for k, phase in enumerate(STEP_PHASES)
    ],
)
def test_a_kill_at_any_point_of_a_step_leaves_no_trace(world: Worlds, slot: int, phase: str, tmp_path: Path) -> None:
    job = Job((2, 2), ((slot, 1 + slot, phase),))
    degrees = (1, 2) if slot < 2 else (2, 1)
    survives(world, job, tmp_path, degrees)


@pytest.mark.chaos
@pytest.mark.parametrize("phase", STEP_PHASES)
@pytest.mark.parametrize("slot", range(8))
def test_every_slot_at_every_point(world: Worlds, slot: int, phase: str, tmp_path: Path) -> None:
    survives(world, Job((4, 4), ((slot, 3, phase),)), tmp_path, (3, 4) if slot < 4 else (4, 3))
