"""Every way to train goes through a loss: accumulation, manual optimization, reduced precision, buffers, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins import MixedPrecision

from tests.recovery.jobs import EXACT, Job, Worlds, survives

MODES: dict[str, dict[str, Any]] = {
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}, "batches": 7},
    "manual": {"module": "manual"},
    "clipping": {"trainer": {"gradient_clip_val": 0.1}, "settings": {"sgd": True}},
    "buffers and schedule": {"settings": {"batch_norm": True, "schedule": True}},
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}},
}


@pytest.mark.parametrize("phase", ["backward", "between_vote_and_update"])
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_in_every_mode(world: Worlds, mode: str, phase: str, tmp_path: Path) -> None:
    bound = 2e-2 if mode == "bf16-mixed" else EXACT  # bf16 has 8 bits: sums of 2 shards and of 1 round differently
    survives(world, Job((2, 2), ((0, 2, phase),), **MODES[mode]), tmp_path, (1, 2), bound=bound)
