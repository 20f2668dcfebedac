"""Every way to train goes through a loss: accumulation, manual optimization, reduced precision, buffers, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recovery.jobs import EXACT, Job, Worlds, survives

MODES: dict[str, dict[str, Any]] = {
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}, "batches": 7},
    "manual": {"module": "Manual"},
    "clipping": {"trainer": {"gradient_clip_val": 0.1}, "settings": {"sgd": True}},
    "buffers and schedule": {"settings": {"batch_norm": True, "schedule": True}},
    "manual, buffers and schedule": {"module": "Manual", "settings": {"batch_norm": True}},
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}},
    "16-mixed": {"module": "Half"},
}
_LESS = ("clipping", "bf16-mixed", "manual, buffers and schedule", "16-mixed")
"""In `make chaos` only: made of what the others test."""
# bits of bf16 and float16: sums of two shards and of one round differently
BOUNDS = {"bf16-mixed": 10 * 2**-8, "16-mixed": 10 * 2**-11}


@pytest.mark.parametrize("phase", ["backward", pytest.param("between_vote_and_update", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("mode", [m if m not in _LESS else pytest.param(m, marks=pytest.mark.chaos) for m in MODES])
def test_a_loss_in_every_mode(world: Worlds, mode: str, phase: str, tmp_path: Path) -> None:
    job = Job((2, 2), ((0, 2, phase),), **MODES[mode])
    survives(world, job, tmp_path, (1, 2), bound=BOUNDS.get(mode, EXACT))


@pytest.mark.parametrize("slot", [1, pytest.param(2, marks=pytest.mark.chaos)])
def test_a_graph_that_is_kept_from_step_to_step(world: Worlds, slot: int, tmp_path: Path) -> None:
    survives(world, Job((2, 2), ((slot, 2, "backward"),), module="Keeps"), tmp_path, (1, 2) if slot == 1 else (2, 1))
