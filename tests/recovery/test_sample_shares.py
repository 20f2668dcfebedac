"""Samples move between replicas: the global batches, their losses and what comes of them stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.engine.events import FILE_NAME, read_events
from tests.lightning.rigs import assert_same
from tests.recovery.jobs import EXACT, Job, Result, Worlds, assert_left, run, undisturbed
from tests.recovery.sharing_models import WHOLE

MOVES = "tests.recovery.sharing_models:Moves"
MISHEARS = "tests.recovery.sharing_models:Mishears"
BACK_AND_FORTH = ((2, 0, {0: 3, 1: 1}), (0, 2, {0: 1, 1: 3}), (1, 4, None), (3, 5, {0: 3, 1: 1}))
"""Counts of 2 x 2 samples, asked for by ranks of both replicas."""


def whole(logged: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: row[key] for key in WHOLE if key in row} for row in logged]


def shares(result: Result) -> list[dict[str, Any]]:
    return [event for event in read_events(result.directory / "rows" / FILE_NAME) if event["event"] == "shares"]


def moves(
    world: Worlds,
    job: Job,
    directory: Path,
    degrees: tuple[int, ...] | None = None,
    released: set[int] | None = None,
) -> Result:
    """Run a job whose samples move, and check that nobody can tell from what all replicas have in common."""
    want = undisturbed(world, job, directory)
    got = run(world, job, directory / "moved")
    assert_left(got, job.victims, released or set())
    first = got.first
    assert tuple(first["degrees"]) == (degrees or job.degrees)
    assert first["steps"] == want.first["steps"]
    assert_same(first["parameters"], want.first["parameters"], EXACT, "parameters")
    assert_same(first["optimizers"], want.first["optimizers"], EXACT, "optimizers")
    for number, found in got.survivors.items():
        assert_same(whole(found["logged"]), whole(want.survivors[number]["logged"]), EXACT, f"slot {number}")
    for epoch, ids in got.samples().items():
        assert sorted(ids) == list(range(job.samples)), f"epoch {epoch} trained on {sorted(ids)}"
    return got


def per_batch(result: Result, size: int) -> list[list[int]]:
    """Samples of each replica, batch by batch: steps of one batch each."""
    import json

    counts: dict[tuple[int, int], dict[int, int]] = {}
    for path in result.directory.glob("ledger-*"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["what"] == "committed":
                counts.setdefault((line["epoch"], line["step"]), {})[line["replica"]] = len(line["ids"])
    return [[parts.get(replica, 0) for replica in range(size)] for _, parts in sorted(counts.items())]


@pytest.mark.parametrize("workers", [0, 2])
def test_shares_change_several_times_in_a_run(world: Worlds, workers: int, tmp_path: Path) -> None:
    loader = {"num_workers": workers, **({"persistent_workers": True} if workers else {})}
    job = Job((2, 2), module=MOVES, settings={"loader": loader}, shares=BACK_AND_FORTH, batches=6)
    got = moves(world, job, tmp_path)
    found = shares(got)
    assert [event["after"] for event in found] == [[3, 1], [1, 3], [2, 2], [3, 1]]
    batches = [6 * event["epoch"] + event["batch"] for event in found]
    # a worker has drawn two batches ahead each, and with them the batches of the epoch come to an end
    assert batches == ([1, 3, 5, 6] if not workers else [5, 6, 6, 10])
    steps = per_batch(got, 2)
    want = [[2, 2]] * 12
    for begins, event in zip(batches, found, strict=True):
        want[begins:] = [event["after"]] * (12 - begins)
    assert steps == want
    assert "samples per batch: replica 0: 2 -> 3, replica 1: 2 -> 1, from batch" in got.outcomes[0].output
