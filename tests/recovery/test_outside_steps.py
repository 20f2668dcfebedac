"""A rank is killed outside of the training steps: nobody can tell from the results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_ntp.plan import Topology
from tests.lightning.rigs import slot
from tests.recovery.jobs import Worlds
from tests.recovery.places import PLACES, Death
from tests.recovery.whole_runs import Script, survives, whole_script

REPRESENTATIVE = [
    (0, "setup", 1),
    (0, "validation_forward", 4),
    (3, "metric_sync", 4),
    (0, "write", 1),
    (2, "predict_forward", 2),
]
MORE = [
    (2, "sanity", 2),
    (1, "validation_end", 3),
    (3, "test", 2),
    (1, "start", 1),
    (3, "validation", 1),
    (2, "validation_epoch_end", 1),
    (0, "epoch_end", 1),
    (1, "gather", 5),
    (2, "fit_end", 1),
    (0, "test_forward", 3),
    (1, "predict", 3),
    (3, "teardown", 1),
]


@pytest.mark.parametrize(
    "death",
    [*REPRESENTATIVE, *(pytest.param(death, marks=pytest.mark.chaos) for death in MORE)],
    ids=lambda death: "-".join(map(str, death)),
)
def test_a_kill_outside_of_steps_leaves_no_trace(world: Worlds, death: Death, tmp_path: Path) -> None:
    degrees = (1, 2) if death[0] < 2 else (2, 1)
    survives(world, Script((2, 2), (death,)), tmp_path, degrees)


@pytest.mark.parametrize(
    ("degrees", "redundancy", "death"),
    [
        ((2, 2), None, (0, "validation_forward", 4)),
        pytest.param((2, 2), None, (3, "validation_end", 3), marks=pytest.mark.chaos),
        pytest.param((2, 2), None, (2, "metric_sync", 4), marks=pytest.mark.chaos),
        pytest.param((2, 2), None, (1, "validation", 6), marks=pytest.mark.chaos),
        pytest.param((3, 2), None, (1, "validation_epoch_end", 2), marks=pytest.mark.chaos),
        pytest.param((3, 2), None, (0, "write", 1), marks=pytest.mark.chaos),
        pytest.param((3,), "neighbor", (1, "validation_forward", 4), marks=pytest.mark.chaos),
    ],
    ids=str,
)
def test_a_kill_between_the_micro_batches_of_a_step_leaves_no_trace(
    world: Worlds, degrees: tuple[int, ...], redundancy: Any, death: Death, tmp_path: Path
) -> None:
    """Validation begins when gradients have been gathered of which the dead rank held a part."""
    settings = (("accumulate_grad_batches", 3), ("val_check_interval", 2))
    left = degrees_without(degrees, death[0])
    survives(world, Script(degrees, (death,), batches=5, redundancy=redundancy, trainer=settings), tmp_path, left)


def degrees_without(degrees: tuple[int, ...], slot: int) -> tuple[int, ...]:
    return Topology.start(degrees).lose([slot])[0].degrees


@pytest.mark.parametrize(
    ("degrees", "death"),
    [
        pytest.param((1, 2), (0, "validation_forward", 2), marks=pytest.mark.chaos),
        ((1, 2), (0, "predict_forward", 2)),
        pytest.param((2, 1), (2, "validation_end", 3), marks=pytest.mark.chaos),
        # its results are there: what hears of them, a checkpoint, is not done twice
        ((1, 1), (0, "write", 3)),
        pytest.param((1, 1), (1, "test", 1), marks=pytest.mark.chaos),
        pytest.param((2, 1), (2, "sanity", 1), marks=pytest.mark.chaos),
    ],
    ids=str,
)
def test_the_samples_of_a_replica_that_is_gone_are_evaluated_by_others(
    world: Worlds, degrees: tuple[int, ...], death: Death, tmp_path: Path
) -> None:
    left = (0, degrees[1]) if death[0] == 0 else (degrees[0], 0)
    survives(world, Script(degrees, (death,), more=1), tmp_path, left)


def _misses_the_end_of_the_set_up(script: Script, directory: str) -> dict[str, Any]:
    """In slots 1 and 2 the loss of slot 3 interrupts what sets up the data of the sanity check; slot 0 is past it."""
    from lightning.pytorch.loops import evaluation_loop

    from lightning_ntp.comm import Interrupted, runtime

    counts, reduce = evaluation_loop.has_len_all_ranks, dist.all_reduce

    def counts_late(*args: Any, **kwargs: Any) -> bool:
        evaluation_loop.has_len_all_ranks = counts
        dist.all_reduce = reduce_late
        return bool(counts(*args, **kwargs))

    def reduce_late(*args: Any, **kwargs: Any) -> None:
        dist.all_reduce = reduce
        reduce(*args, **kwargs)  # all have entered it
        current = runtime.current()
        assert current is not None
        while not current.interrupted:
            time.sleep(0.001)
        raise Interrupted("slot 3 was lost before the end of it was seen")

    if slot() in (1, 2):
        evaluation_loop.has_len_all_ranks = counts_late
    return whole_script(script, directory)


def test_a_loop_begins_again_in_all_replicas_wherever_they_set_up_its_data(world: Worlds, tmp_path: Path) -> None:
    """A fit sets them up once, so who has done so does not make those operations again."""
    script = Script((1, 2, 1), ((3, "sanity", 1),), more=1)
    survives(world, script, tmp_path, (1, 2, 0), _misses_the_end_of_the_set_up)


def _schedules() -> list[tuple[Death, ...]]:
    """Every slot at every place, up to four victims in a script, at most two of a replica."""
    rounds: list[tuple[Death, ...]] = []
    for offset in range(8):
        victims: list[Death] = []
        for number, place in enumerate(PLACES):
            dead = [death[0] for death in victims]
            victim = (5 * number + offset) % 8
            if place == "write":  # rank 0 does it
                victim = min(set(range(8)) - set(dead))
            if victim in dead or sum(d // 4 == victim // 4 for d in dead) == 2:
                rounds.append(tuple(victims))
                victims, victim = [], 0 if place == "write" else victim
            victims.append((victim, place, 1))
        rounds.append(tuple(victims))
    return rounds


@pytest.mark.chaos
@pytest.mark.parametrize("deaths", _schedules(), ids=lambda deaths: ",".join(f"{s}-{place}" for s, place, _ in deaths))
def test_every_slot_at_every_place(world: Worlds, deaths: tuple[Death, ...], tmp_path: Path) -> None:
    degrees = [4, 4]
    for dead, _, _ in deaths:
        degrees[dead // 4] -= 1
    survives(world, Script((4, 4), deaths), tmp_path, (degrees[0], degrees[1]))
