"""Ranks come and go all the time: numbers stay right, and nobody holds more for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.recovery.jobs import Job, Worlds
from tests.recovery.rejoining import returns
from tests.recovery.supervised import SupervisingProcess
from tests.recovery.test_long_job import grown

LOSSES = (
    *((1,), (0,), (5,), (2, 3), (4,)),
    *((0, 6), (6, 5), (3,), (1, 6), (0, 5, 3)),
)
"""One after the other: rank 0, two of a replica, one of either, two and one."""
SPARED = (2, 7)
"""Who is not lost any more after the first four."""
PHASES = ("backward", "vote", "forward", "update")


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_ten_times_in_one_run(supervising: SupervisingProcess, world: Worlds, tmp_path: Path) -> None:
    """4+4, a loss, 4+3, a return, 4+4. Every four steps, over epochs of five."""
    shared = set(os.listdir("/dev/shm"))
    faults = tuple(
        (slot, 2 + 4 * number, PHASES[(number + slot) % len(PHASES)])
        for number, lost in enumerate(LOSSES)
        for slot in lost
    )
    waits = tuple(4 + 4 * number for number in range(len(LOSSES)))
    census = (18, 42)
    job = Job(
        (4, 4),
        faults,
        batches=5,
        epochs=9,
        module="tests.recovery.rejoining:Watched",
        settings={"census": census, "sgd": True},
    )
    got = returns(supervising, world, job, waits, tmp_path, timeout=400)
    for slot in SPARED:
        early, late = (got.survivors[slot]["held"][step] for step in census)
        assert not grown(early, late), f"slot {slot} holds more: {grown(early, late)}"
    assert set(os.listdir("/dev/shm")) <= shared
