"""Several losses in one job: in any order, at once, in replicas of other degrees, down to the last ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.jobs import Job, Worlds, survives


def test_losses_one_after_the_other_and_several_at_once(world: Worlds, tmp_path: Path) -> None:
    """4+4 -> 4+3 -> 3+3 -> 3+1 -> 3, with lost indices in the middle, and slot 0 in the end."""
    faults = (
        (5, 1, "backward"),  # index 1 of replica 1
        (2, 2, "vote"),  # index 2 of replica 0: its place is taken by another
        (4, 4, "sync"),
        (7, 4, "sync"),
        (6, 6, "forward"),
    )
    survives(world, Job((4, 4), faults), tmp_path, (3, 0), dropped=True)


@pytest.mark.parametrize("first", [0, *(pytest.param(slot, marks=pytest.mark.chaos) for slot in (4, 6))])
def test_mixed_degrees_with_losses_in_each(world: Worlds, first: int, tmp_path: Path) -> None:
    others = [slot for slot in (1, 5, 8) if slot != first + 1][:2]
    faults = ((first, 1, "forward"), (others[0], 3, "between_vote_and_update"), (others[1], 5, "backward"))
    degrees = [4, 2, 3]
    for slot, _, _ in faults:
        degrees[0 if slot < 4 else 1 if slot < 6 else 2] -= 1
    survives(world, Job((4, 2, 3), faults), tmp_path, degrees, dropped=0 in degrees)


@pytest.mark.parametrize(
    ("slots", "degrees"),
    [
        ((0, 6), (3, 3)),
        pytest.param((1, 2), (2, 4), marks=pytest.mark.chaos),
        pytest.param((0, 1, 2), (1, 4), marks=pytest.mark.chaos),
    ],
)
@pytest.mark.parametrize(
    "phase", [pytest.param("data", marks=pytest.mark.chaos), pytest.param("sync", marks=pytest.mark.chaos), "vote"]
)
def test_ranks_that_die_in_the_same_moment(
    world: Worlds, slots: tuple[int, ...], degrees: tuple[int, ...], phase: str, tmp_path: Path
) -> None:
    survives(world, Job((4, 4), gate=(2, phase)), tmp_path, degrees, together=slots)


@pytest.mark.parametrize("slot", [0, pytest.param(1, marks=pytest.mark.chaos)])
@pytest.mark.parametrize(
    "phase",
    [pytest.param("data", marks=pytest.mark.chaos), "backward", pytest.param("update", marks=pytest.mark.chaos)],
)
def test_a_replica_that_is_gone_leaves_its_samples_to_the_others(
    world: Worlds, slot: int, phase: str, tmp_path: Path
) -> None:
    survives(world, Job((1, 1), ((slot, 2, phase),)), tmp_path, (0, 1) if slot == 0 else (1, 0), dropped=True)


@pytest.mark.parametrize("slot", [0, pytest.param(3, marks=pytest.mark.chaos)])
def test_a_replica_below_the_smallest_degree_is_dropped(world: Worlds, slot: int, tmp_path: Path) -> None:
    job = Job((2, 2, 2), ((slot, 2, "backward"),), strategy={"min_tensor_parallel_size": 2})
    degrees = (0, 2, 2) if slot == 0 else (2, 0, 2)
    survives(world, job, tmp_path, degrees, released=[slot ^ 1], dropped=True)


@pytest.mark.parametrize("phase", ["backward", "vote"])
def test_a_dropped_replica_in_the_middle_of_a_window(world: Worlds, phase: str, tmp_path: Path) -> None:
    """The micro-batches before the one that was interrupted need the lost replica's samples too."""
    job = Job((1, 2), ((0, 1, phase),), trainer={"accumulate_grad_batches": 4}, batches=8)
    survives(world, job, tmp_path, (0, 2), dropped=True)
