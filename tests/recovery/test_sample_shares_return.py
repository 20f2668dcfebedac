"""Ranks come back, leave and change places while replicas take different numbers of samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_ntp.engine.events import FILE_NAME, read_events
from tests.recovery.jobs import Job, Worlds
from tests.recovery.rejoining import returns
from tests.recovery.supervised import SupervisingProcess
from tests.recovery.test_sample_shares import MOVES, moves, per_batch

Supervising = SupervisingProcess


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.chaos)])
@pytest.mark.parametrize(
    ("slot", "asks"),
    [(1, 4), *(pytest.param(*v, marks=pytest.mark.chaos) for v in ((0, 3), (0, 4), (1, 3), (2, 3), (2, 4), (3, 5)))],
)
def test_a_rank_comes_back_while_shares_are_unequal(
    supervising: Supervising, world: Worlds, slot: int, asks: int, workers: int, tmp_path: Path
) -> None:
    """In the middle of an epoch, about when they change again: for the rest of it it is handed the batches."""
    job = Job(
        (2, 2),
        ((slot, 1, "backward"),),
        module="tests.recovery.sharing_models:MovesFromTheStart",
        settings={"loader": {"num_workers": workers}},
        batches=12,
        shares=((3 - slot, asks, {0: 1, 1: 3}),),
    )
    peaceful = replace(job, module=MOVES)
    got = returns(supervising, world, job, (3,), tmp_path, partial=True, want=peaceful)
    # a worker has drawn two batches ahead
    first, second = 1 + 2 * workers, asks + 1 + 2 * workers
    assert per_batch(got, 2) == [[2, 2]] * first + [[3, 1]] * (second - first) + [[1, 3]] * (24 - second)


@pytest.mark.parametrize(
    "slot", [1, pytest.param(0, marks=pytest.mark.chaos), pytest.param(2, marks=pytest.mark.chaos)]
)
def test_a_replica_comes_back_that_the_shares_leave_out(
    supervising: Supervising, world: Worlds, slot: int, tmp_path: Path
) -> None:
    """Till somebody asks again shares are as in the launch."""
    others = [replica for replica in range(3) if replica != slot]
    job = Job(
        (1, 1, 1),
        ((slot, 1, "backward"),),
        module=MOVES,
        batches=10,
        shares=((others[0], 3, {others[0]: 1, others[1]: 5}), (others[1], 8, {0: 1, 1: 2, 2: 3})),
    )
    got = returns(supervising, world, job, (5,), tmp_path, partial=True)
    found = [event for event in read_events(got.directory / "rows" / FILE_NAME) if event["event"] in ("shares", "join")]
    assert [event["event"] for event in found] == ["shares", "join", "shares", "shares"]
    unequal = [0, 0, 0]
    unequal[others[0]], unequal[others[1]] = 1, 5
    assert [event["after"] for event in found if event["event"] == "shares"] == [unequal, [2, 2, 2], [1, 2, 3]]
    gone = [3, 3, 3]
    gone[slot] = 0
    steps = per_batch(got, 3)
    joined = found[1]["step"]
    assert steps[0] == [2, 2, 2] and steps[2:4] == [gone] * 2 and steps[4 : joined + 1] == [unequal] * (joined - 3)
    assert steps[joined + 1 : 9] == [[2, 2, 2]] * (8 - joined) and steps[9:] == [[1, 2, 3]] * 11


@pytest.mark.chaos
@pytest.mark.parametrize("slot", range(4))
def test_a_slot_leaves_while_shares_are_unequal(world: Worlds, slot: int, tmp_path: Path) -> None:
    job = Job((2, 2), drains=((3 - slot, slot, 2),), module=MOVES, shares=((3 - slot, 1, {0: 3, 1: 1}),))
    got = moves(world, job, tmp_path, (1, 2) if slot < 2 else (2, 1), released={slot})
    assert per_batch(got, 2) == [[2, 2]] * 2 + [[3, 1]] * 6


@pytest.mark.chaos
def test_the_last_rank_of_a_replica_leaves(world: Worlds, tmp_path: Path) -> None:
    job = Job((1, 1), drains=((0, 1, 2),), module=MOVES, shares=((0, 1, {0: 3, 1: 1}),))
    moves(world, job, tmp_path, (1, 0), released={1})


@pytest.mark.chaos
def test_slots_go_back_to_their_places_while_shares_are_unequal(
    supervising: Supervising, world: Worlds, tmp_path: Path
) -> None:
    job = Job(
        (2, 2),
        ((0, 0, "backward"), (3, 1, "backward")),
        module="tests.recovery.sharing_models:MovesAndSettles",
        shares=((1, 1, {0: 3, 1: 1}), (2, 7, {0: 1, 1: 3})),
        epochs=3,
    )
    got = returns(supervising, world, job, (3,), tmp_path, partial=True)
    assert "slots are at their places" in got.output
    assert per_batch(got, 2) == [[2, 2]] * 2 + [[3, 1]] * 6 + [[1, 3]] * 4


@pytest.mark.chaos
def test_who_comes_back_is_handed_its_batches_as_long_as_workers_stay(
    supervising: Supervising, world: Worlds, tmp_path: Path
) -> None:
    """Its loader is not known to be in position in later epochs either; there the shares change once more."""
    job = Job(
        (2, 2),
        ((1, 1, "backward"),),
        module=MOVES,
        settings={"loader": {"num_workers": 1, "persistent_workers": True}},
        batches=8,
        shares=((2, 0, {0: 3, 1: 1}), (0, 10, {0: 1, 1: 3})),
    )
    got = returns(supervising, world, job, (3,), tmp_path, partial=True)
    assert per_batch(got, 2) == [[2, 2]] * 3 + [[3, 1]] * 10 + [[1, 3]] * 3
