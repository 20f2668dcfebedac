"""Samples move between replicas: the global batches, their losses and what comes of them stay as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.engine.events import FILE_NAME, read_events
from lightning_ntp.plan import Topology
from tests.lightning.rigs import assert_same
from tests.recovery import points
from tests.recovery.jobs import EXACT, Job, Result, Worlds, assert_left, run, undisturbed
from tests.recovery.sharing_models import WHOLE

MOVES = "tests.recovery.sharing_models:Moves"
MISHEARS = "tests.recovery.sharing_models:Mishears"
BACK_AND_FORTH = ((2, 0, {0: 3, 1: 1}), (0, 2, {0: 1, 1: 3}), (1, 10, None), (3, 12, {0: 3, 1: 1}))
"""Counts of 2 x 2 samples, asked for by ranks of both replicas in two epochs of nine batches."""


def same_wholes(got: list[dict[str, float]], want: list[dict[str, float]], where: str, dropped: bool) -> None:
    """Compare what all replicas have in common; but for metrics, of which a replica that is dropped takes its part."""
    for key, bound in WHOLE.items():
        if key == "metric" and dropped:
            continue
        found, expected = ([row[key] for row in rows if key in row] for rows in (got, want))
        assert found and len(found) == len(expected), f"{where}: {key}"
        assert_same(found, expected, bound, f"{where}: {key}")


def shares(result: Result) -> list[dict[str, Any]]:
    return [event for event in read_events(result.directory / "rows" / FILE_NAME) if event["event"] == "shares"]


def moves(
    world: Worlds,
    job: Job,
    directory: Path,
    degrees: tuple[int, ...] | None = None,
    released: set[int] | None = None,
    want: Job | None = None,
    together: tuple[int, ...] = (),
) -> Result:
    """Run a job whose samples move, and check that nobody can tell from what all replicas have in common.

    Args:
        degrees: Those at the end, if not those of the launch.
        released: Slots that leave.
        want: What it is compared with, if not the same job without its moves and faults.
        together: Slots to kill at once at the job's gate.
    """
    expected = undisturbed(world, want or job, directory)
    got = run(world, job, directory / "moved", together=together)
    assert_left(got, job.victims | {*together}, released or set())
    first = got.first
    assert tuple(first["degrees"]) == (degrees or job.degrees)
    assert first["steps"] == expected.first["steps"]
    assert_same(first["parameters"], expected.first["parameters"], EXACT, "parameters")
    assert_same(first["optimizers"], expected.first["optimizers"], EXACT, "optimizers")
    for number, found in got.survivors.items():
        same_wholes(found["logged"], expected.survivors[number]["logged"], f"slot {number}", 0 in first["degrees"])
    known = expected.samples()
    for epoch, ids in got.samples().items():
        assert sorted(ids) == sorted(known[epoch]), f"epoch {epoch} trained on {sorted(ids)}"
        assert len({*ids}) == len(ids)
    return got


def per_batch(result: Result, size: int) -> list[list[int]]:
    """Samples of each replica, batch by batch: steps of one batch each."""
    counts: dict[tuple[int, int], dict[int, int]] = {}
    for path in result.directory.glob("ledger-*"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["what"] == "committed":
                counts.setdefault((line["epoch"], line["step"]), {})[line["replica"]] = len(line["ids"])
    return [[parts.get(replica, 0) for replica in range(size)] for _, parts in sorted(counts.items())]


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.chaos), 2])
def test_shares_change_several_times_in_a_run(world: Worlds, workers: int, tmp_path: Path) -> None:
    job = Job((2, 2), module=MOVES, settings={"loader": {"num_workers": workers}}, shares=BACK_AND_FORTH, batches=9)
    got = moves(world, job, tmp_path)
    found = shares(got)
    assert [event["after"] for event in found] == [[3, 1], [1, 3], [2, 2], [3, 1]]
    begins = [9 * event["epoch"] + event["batch"] for event in found]
    # each of two workers has drawn two batches ahead
    assert begins == [asked + (5 if workers else 1) for _, asked, _ in BACK_AND_FORTH]
    steps = [[2, 2]] * 18
    for begin, event in zip(begins, found, strict=True):
        steps[begin:] = [event["after"]] * (18 - begin)
    assert per_batch(got, 2) == steps
    assert "samples per batch: replica 0: 2 -> 3, replica 1: 2 -> 1, from batch" in got.outcomes[0].output


MODES: dict[str, dict[str, Any]] = {
    "accumulation, a smaller last batch, workers": {
        "trainer": {"accumulate_grad_batches": 2},
        # 14 samples each: 3, 3, 3, 3 and 2
        "settings": {"batch_size": 3, "loader": {"num_workers": 1}},
        "batches": 7,
        "shares": ((3, 0, {0: 5, 1: 1}), (0, 2, {0: 1, 1: 5}), (2, 4, {0: 4, 1: 2})),
    },
    "three replicas": {
        "degrees": (1, 1, 1),
        "shares": ((2, 0, {0: 1, 1: 4, 2: 1}), (0, 2, {0: 3, 1: 2, 2: 1}), (0, 5, None)),
    },
    "manual": {"module": "tests.recovery.sharing_models:MovesManually", "shares": ((0, 0, {0: 3, 1: 1}),)},
    "persistent workers": {
        "settings": {"loader": {"num_workers": 1, "persistent_workers": True}},
        "shares": ((1, 1, {0: 1, 1: 3}),),
    },
    "a last batch that is dropped": {
        "settings": {"batch_size": 3, "loader": {"drop_last": True}},
        "batches": 6,
        "shares": ((1, 1, {0: 1, 1: 5}), (1, 3, {0: 3, 1: 3})),
    },
}
QUICK = ("accumulation, a smaller last batch, workers", "three replicas")


@pytest.mark.parametrize("mode", [m if m in QUICK else pytest.param(m, marks=pytest.mark.chaos) for m in MODES])
def test_in_every_mode(world: Worlds, mode: str, tmp_path: Path) -> None:
    job = Job(**{"degrees": (2, 2), "module": MOVES, "batches": 4, **MODES[mode]})
    moves(world, job, tmp_path)


# ---- with losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "deaf", [(0, 2), *(pytest.param(d, marks=pytest.mark.chaos) for d in ((0,), (2,), (0, 3), (2, 3), (0, 2, 3)))]
)
@pytest.mark.parametrize(
    "asks", [0, pytest.param(1, marks=pytest.mark.chaos), pytest.param(3, marks=pytest.mark.chaos)]
)
def test_a_death_in_the_vote_that_some_ranks_have_heard(
    world: Worlds, deaf: tuple[int, ...], asks: int, tmp_path: Path
) -> None:
    """Slot 1 dies behind the vote; who is deaf hears of the new shares by others. If nobody is left who has heard them,
    the step is made again, and so is its vote; what slot 1 had asked for is lost then.
    """
    job = Job(
        (2, 2),
        ((1, 2, "between_vote_and_update"),),
        module=MISHEARS,
        settings={"deaf": deaf, "step": 2},
        shares=((asks, 2, {0: 1, 1: 3}),),
        batches=5,
    )
    got = moves(world, job, tmp_path, (1, 2), want=replace(job, module=MOVES, settings={}))
    unheard = deaf == (0, 2, 3)
    begins = 10 if unheard and asks == 1 else 3
    assert per_batch(got, 2) == [[2, 2]] * begins + [[1, 3]] * (10 - begins)
    events = [event["event"] for event in read_events(got.directory / "rows" / FILE_NAME)]
    assert ("forward" in events) == (0 in deaf and not unheard)  # slot 0 writes of itself


@pytest.mark.parametrize(
    "phase", ["vote", *(pytest.param(p, marks=pytest.mark.chaos) for p in ("forward", "backward"))]
)
@pytest.mark.parametrize("slot", [0, *(pytest.param(s, marks=pytest.mark.chaos) for s in (1, 2, 3))])
def test_a_death_in_the_step_that_announces_new_shares(world: Worlds, slot: int, phase: str, tmp_path: Path) -> None:
    asks = 3 - slot
    job = Job((2, 2), ((slot, 1, phase),), module=MOVES, shares=((asks, 1, {0: 3, 1: 1}),))
    got = moves(world, job, tmp_path, (1, 2) if slot < 2 else (2, 1))
    assert per_batch(got, 2)[2:] == [[3, 1]] * 6


@pytest.mark.chaos
@pytest.mark.parametrize("lost", [5, 6, 9])
def test_steps_are_done_again_with_the_shares_of_their_time(world: Worlds, lost: int, tmp_path: Path) -> None:
    """Both holders of an index die: the parameters go back some steps, which are done again."""
    job = Job(
        (2, 2),
        gate=(lost, "vote"),
        module=MOVES,
        shares=((0, 1, {0: 3, 1: 1}), (2, 4, {0: 1, 1: 3})),
        epochs=3,
        strategy={"redundancy": "neighbor"},
        copy_cost=1e-9,
    )
    got = moves(world, job, tmp_path, (1, 1), together=(1, 3))
    back = sum(e["gone_back"] for e in read_events(got.directory / "rows" / FILE_NAME) if e["event"] == "change")
    assert back > lost - 5
    assert per_batch(got, 2) == [[2, 2]] * 2 + [[3, 1]] * 3 + [[1, 3]] * 7


@pytest.mark.parametrize("zero", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_a_replica_is_dropped_while_shares_are_unequal(world: Worlds, zero: bool, tmp_path: Path) -> None:
    """Its samples go to the others in turn, until new shares are asked for, which leave it out."""
    slot = 0 if zero else 1
    job = Job(
        (1, 1, 1),
        ((slot, 2, "backward"),),
        module=MOVES,
        shares=((2, 0, {0: 2, 1: 2, 2: 2} | {slot: 3, 2: 1}), (2, 5, {0: 1, 1: 1, 2: 5} | {slot: 0})),
    )
    left = {0: 1, 1: 1, 2: 5}
    del left[slot]
    job = replace(job, shares=(job.shares[0], (2, 5, left)))
    degrees = (0, 1, 1) if zero else (1, 0, 1)
    got = moves(world, job, tmp_path, degrees)
    other = 1 - slot
    dealt = [0, 0, 0]
    dealt[other], dealt[2] = (2 + 2, 1 + 1)  # of the three, the first and the last to the lower one
    after = [0, 0, 0]
    after[other], after[2] = 1, 5
    three = [2, 2, 1]
    three[slot] = 3
    assert per_batch(got, 3) == [[2, 2, 2], three, *[dealt] * 4, *[after] * 2]
    assert shares(got)[-1]["before"] == dealt


@pytest.mark.chaos
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("step", [1, 4, 9])
def test_a_death_anywhere_between_changes(
    world: Worlds, step: int, slot: int, degrees: tuple[int, ...], workers: int, tmp_path: Path
) -> None:
    asks, size = (slot + 1) % sum(degrees), 2 * len(degrees)
    rest = {replica: 1 for replica in range(1, len(degrees))}
    unequal = {0: size - len(rest), **rest}, {len(degrees) - 1: size - len(rest), **{r: 1 for r in range(len(rest))}}
    shares = tuple((asks, when, unequal[k % 2]) for k, when in enumerate((0, 2, 3, 7, 8)))
    settings = {"loader": {"num_workers": workers, "persistent_workers": workers > 0}}
    # who asks for a replica that is gone is refused: it asks no more after a loss of one
    gone = degrees == (1, 1, 1) or (degrees == (2, 1) and slot == 2)
    job = Job(degrees, ((slot, step, "sync"),), module=MOVES, settings=settings, batches=6)
    job = replace(job, shares=tuple(each for each in shares if not gone or each[1] <= step))
    left, _ = Topology.start(degrees).lose([slot])
    moves(world, job, tmp_path, left.degrees)


@pytest.mark.chaos
@pytest.mark.parametrize("point", points.POINTS)
@pytest.mark.parametrize("dies", [0, 3])
@pytest.mark.parametrize("deaf", [(0, 2), (0,)])
def test_another_death_while_some_take_over_what_others_have_heard(
    world: Worlds, deaf: tuple[int, ...], dies: int, point: str, tmp_path: Path
) -> None:
    """Slot 1 dies behind the vote; then one that has heard it, perhaps the last one, or one that has not."""
    job = Job(
        (1, 1, 1, 1),
        ((1, 2, "between_vote_and_update"),),
        ((dies, point, 2 if point in ("agree", "joined", "rebuild", "rebuilt") else 1),),  # they begin with these
        module=MISHEARS,
        settings={"deaf": deaf, "step": 2},
        shares=((2, 2, {0: 2, 1: 1, 2: 4, 3: 1}),),
    )
    degrees = (0, 0, 1, 1) if dies == 0 else (1, 0, 1, 0)
    got = moves(world, job, tmp_path, degrees, want=replace(job, module=MOVES, settings={}))
    # slot 2 asks, and asks again if nobody is left that has heard it
    dealt = {0: [0, 0, 6, 2], 3: [3, 0, 5, 0]}[dies]
    assert per_batch(got, 4)[4:] == [dealt] * 4
