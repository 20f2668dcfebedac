"""``redundancy="neighbor"``: what every replica has lost comes back from a neighbour's memory, and nobody can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from lightning_ntp.engine.events import read_events
from lightning_ntp.lightning.callbacks.fault_schedule import STEP_PHASES
from tests.lightning.rigs import assert_same
from tests.recovery import whole_runs
from tests.recovery.jobs import EXACT, Job, Result, Samples, Worlds, assert_left, run, survives, undisturbed
from tests.recovery.models import Automatic
from tests.recovery.places import Death
from tests.recovery.points import POINTS
from tests.recovery.test_modes import BOUNDS, MODES
from tests.recovery.whole_runs import Script

COPIES = {"redundancy": "neighbor"}
RARELY = 1e-9
"""Of a step's time: copies are made at the start only, so that a loss takes the job back far."""
IN_TEST = ("accumulation",)


def some(names: Any, chosen: tuple[str, ...]) -> list[Any]:
    """The chosen ones in `make test`, the others in `make chaos`."""
    return [n if n in chosen else pytest.param(n, marks=pytest.mark.chaos) for n in names]


def gone_back(result: Result) -> list[int]:
    """How many steps each loss has taken the job back."""
    events = read_events(result.directory / "rows" / "events.jsonl")
    return [event["gone_back"] for event in events if event["event"] == "change"]


def job(degrees: tuple[int, ...], *faults: tuple[int, int, str], **more: Any) -> Job:
    return Job(degrees, faults, strategy=COPIES, copy_cost=RARELY, **more)


@pytest.mark.parametrize(
    ("slot", "step", "phase"),
    [
        (2, 3, "backward"),
        pytest.param(0, 6, "update", marks=pytest.mark.chaos),
        pytest.param(1, 0, "forward", marks=pytest.mark.chaos),
        *(
            pytest.param(s, 1 + (3 * s + k) % 7, phase, marks=pytest.mark.chaos)
            for s in range(4)
            for k, phase in enumerate(STEP_PHASES)
        ),
    ],
)
def test_a_single_replica_survives(world: Worlds, slot: int, step: int, phase: str, tmp_path: Path) -> None:
    result = survives(world, job((4,), (slot, step, phase)), tmp_path, (3,))
    (steps,) = gone_back(result)
    assert steps > 0 or step < 3


@pytest.mark.parametrize("phase", ["backward", pytest.param("between_vote_and_update", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("mode", some(MODES, IN_TEST))
def test_in_every_mode(world: Worlds, mode: str, phase: str, tmp_path: Path) -> None:
    settings = {"batch_norm": True} if mode == "accumulation" else {}
    more = {"settings": settings, "epochs": 3, **MODES[mode]}
    step = 5 if mode == "accumulation" else 7
    result = survives(world, job((3,), (1, step, phase), **more), tmp_path, (2,), bound=BOUNDS.get(mode, EXACT))
    assert gone_back(result)[0] > 0


def test_one_loss_after_the_other_down_to_the_last_rank(world: Worlds, tmp_path: Path) -> None:
    result = survives(world, job((4,), (1, 2, "vote"), (3, 4, "update"), (0, 7, "sync")), tmp_path, (1,))
    assert len(gone_back(result)) == 3


@pytest.mark.parametrize(
    ("slots", "degrees"), [((1, 3), (1, 1)), pytest.param((0, 1, 3), (0, 1), marks=pytest.mark.chaos)]
)
def test_the_same_index_is_lost_in_every_replica(
    world: Worlds, slots: tuple[int, ...], degrees: tuple[int, ...], tmp_path: Path
) -> None:
    result = survives(
        world, job((2, 2), gate=(5, "sync"), epochs=3), tmp_path, degrees, together=slots, dropped=0 in degrees
    )
    assert gone_back(result)[0] > 0


@pytest.mark.chaos
def test_a_loss_in_one_of_several_replicas_takes_nothing_back(world: Worlds, tmp_path: Path) -> None:
    result = survives(world, job((2, 2), (1, 5, "backward")), tmp_path, (1, 2))
    assert gone_back(result) == [0]


@pytest.mark.parametrize("point", some(POINTS, ()))
def test_a_second_rank_dies_on_the_way_back(world: Worlds, point: str, tmp_path: Path) -> None:
    """Its neighbour, and the dead one's, live."""
    number = 2 if point in ("agree", "joined", "rebuild", "rebuilt") else 1
    faulty = Job((4,), ((3, 4, "backward"),), ((1, point, number),), strategy=COPIES, copy_cost=RARELY)
    survives(world, faulty, tmp_path, (2,))


@pytest.mark.parametrize("where", some(["forward", "backward"], ("forward",)))
@pytest.mark.parametrize("step", [6, pytest.param(5, marks=pytest.mark.chaos)])
def test_a_second_rank_dies_while_steps_are_done_again(world: Worlds, step: int, where: str, tmp_path: Path) -> None:
    settings = {"slot": 1, "step": step, "where": where}
    faulty = job((4,), (3, 7, "sync"), module="DiesAgain", settings=settings, epochs=3)
    want = undisturbed(world, faulty, tmp_path)
    got = run(world, faulty, tmp_path / "disturbed")
    assert_left(got, {3, 1}, set())
    assert len(gone_back(got)) == 2 and min(gone_back(got)) > 0
    assert_same(got.first["parameters"], want.first["parameters"], EXACT)
    assert_same(got.first["logged"], want.first["logged"], EXACT)


@pytest.mark.parametrize(
    "death",
    [
        (1, "validation_forward", 4),
        pytest.param((0, "write", 1), marks=pytest.mark.chaos),
        *(
            pytest.param((slot, place, number), marks=pytest.mark.chaos)
            for slot, place, number in [
                (2, "sanity", 2),
                (0, "validation_end", 3),
                (1, "metric_sync", 4),
                (2, "validation_epoch_end", 1),
                (0, "epoch_end", 1),
                (1, "gather", 5),
                (2, "fit_end", 1),
                (0, "test_forward", 3),
                (1, "predict", 3),
            ]
        ),
    ],
    ids=lambda death: "-".join(map(str, death)),
)
def test_outside_of_steps(world: Worlds, death: Death, tmp_path: Path) -> None:
    whole_runs.survives(world, Script((3,), (death,), redundancy="neighbor"), tmp_path, (2,))


def test_two_neighbours_at_once_are_more_than_the_copies_bear(world: Worlds, tmp_path: Path) -> None:
    result = run(world, job((3,), gate=(3, "sync")), tmp_path, together=(0, 1))
    ends = {o.slot: o.error.strip().splitlines()[-1] for o in result.outcomes if o.state == "raised"}
    assert set(ends) == {2} and "do not help: the copy of slot 0 was on slot 1, which is lost too" in ends[2], ends


@pytest.mark.parametrize("kind", some(["clamped", "unfrozen"], ()))
def test_what_changes_parameters_between_steps_is_told_and_copied_anew(
    world: Worlds, kind: str, tmp_path: Path
) -> None:
    """Of steps before that there is no way back: they would come out otherwise."""
    faulty = job((3,), (1, 7, "sync"), module="Interferes", settings={"kind": kind, "step": 5}, epochs=3)
    result = survives(world, faulty, tmp_path, (2,))
    assert gone_back(result) == [1]
    assert "between two steps; redundancy='neighbor' cannot go back across that" in result.outcomes[0].output


@pytest.mark.chaos
def test_registered_state_goes_back_too(world: Worlds, tmp_path: Path) -> None:
    result = survives(world, job((3,), (0, 7, "backward"), module="Averages", epochs=3), tmp_path, (2,))
    assert gone_back(result)[0] > 0


def test_copies_that_do_not_fit(world: Worlds, tmp_path: Path) -> None:
    result = run(world, job((3,), module="NoRoom"), tmp_path)
    for outcome in result.outcomes:
        last = outcome.error.strip().splitlines()[-1]
        assert "redundancy='neighbor' needs " in last and "but 0.0 MiB are available there" in last, outcome


@pytest.mark.chaos
def test_a_checkpoint_is_written_where_the_policy_forbids_to_go_on(world: Worlds, tmp_path: Path) -> None:
    """Of the step that the job had come to, not of that of the copies."""
    strict = Job(
        (3,), ((1, 6, "backward"),), strategy={**COPIES, "min_tensor_parallel_size": 3}, copy_cost=RARELY, epochs=3
    )
    want = run(world, Job((3,), trainer={"max_steps": 6}, epochs=3), tmp_path / "want")
    result = run(world, strict, tmp_path / "ended")
    ends = {o.slot: o.error.strip().splitlines()[-1] for o in result.outcomes if o.state == "raised"}
    path = tmp_path / "ended" / "ntp-step-6.ckpt"
    assert set(ends) == {0, 2} and all(
        f"a checkpoint of the last complete step is at {path}" in e for e in ends.values()
    )
    saved = torch.load(path, weights_only=False)
    assert saved["global_step"] == 6
    assert_same(saved["state_dict"], want.first["parameters"], EXACT)


@pytest.mark.parametrize(("devices", "value", "told"), [(1, "neighbor", "needs a neighbour"), (2, "disk", "'disk'")])
def test_settings_that_cannot_work(devices: int, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=NTPStrategy(degrees=(devices,), redundancy=value),
            logger=False,
            enable_checkpointing=False,
        ).fit(Automatic(), DataLoader(Samples(4)))
