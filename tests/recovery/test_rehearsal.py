"""What `FaultInjector` lets happen outside of steps leaves no trace either."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.jobs import Worlds
from tests.recovery.whole_runs import Script, survives


@pytest.mark.parametrize(
    "faults",
    [
        ((0, 1, "checkpoint"), (3, 3, "test")),
        pytest.param(((2, 0, "sanity"), (1, 2, "validation_end")), marks=pytest.mark.chaos),
        pytest.param(((0, 3, "validation_batch"), (2, 0, "predict")), marks=pytest.mark.chaos),
        pytest.param(((1, 3, "epoch_end"), (2, 6, "fit_end")), marks=pytest.mark.chaos),
        pytest.param(((3, 2, "checkpoint"), (0, 4, "checkpoint")), marks=pytest.mark.chaos),
    ],
    ids=str,
)
def test_a_rehearsed_loss_outside_of_steps_leaves_no_trace(
    world: Worlds, faults: tuple[tuple[int, int, str], ...], tmp_path: Path
) -> None:
    survives(world, Script((2, 2), faults=faults), tmp_path, (1, 1))
