"""``redundancy="neighbor"``: what every replica has lost comes back from a neighbour's memory, and nobody can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.engine.events import read_events
from lightning_ntp.lightning.callbacks.fault_schedule import PHASES
from tests.recovery.jobs import Job, Result, Worlds, survives

COPIES = {"redundancy": "neighbor"}


def gone_back(result: Result) -> list[int]:
    """How many steps each loss has taken the job back."""
    events = read_events(result.directory / "rows" / "events.jsonl")
    return [event["gone_back"] for event in events if event["event"] == "change"]


def job(degrees: tuple[int, ...], *faults: tuple[int, int, str], **more: Any) -> Job:
    return Job(degrees, faults, strategy=COPIES, **more)


@pytest.mark.parametrize(
    ("slot", "step", "phase"),
    [
        (2, 3, "backward"),
        (0, 6, "update"),
        (1, 0, "forward"),
        *(
            pytest.param(s, 1 + (3 * s + k) % 7, phase, marks=pytest.mark.chaos)
            for s in range(4)
            for k, phase in enumerate(PHASES)
        ),
    ],
)
def test_a_single_replica_survives(world: Worlds, slot: int, step: int, phase: str, tmp_path: Path) -> None:
    result = survives(world, job((4,), (slot, step, phase)), tmp_path, (3,))
    assert len(gone_back(result)) == 1
