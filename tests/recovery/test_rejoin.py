"""A dead rank is started again and comes back: degrees rise between two updates, and nobody can tell from results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ntp.engine.events import FILE_NAME, read_events
from lightning_ntp.plan import Topology
from tests.lightning.rigs import assert_same
from tests.recovery import found_before
from tests.recovery.fates import OF_MEMBERS, ON_THE_WAY, Fate
from tests.recovery.jobs import EXACT, Job, Worlds
from tests.recovery.rejoining import OPTIONS, returns, train_and_return
from tests.recovery.supervised import SupervisingProcess
from tests.recovery.test_modes import BOUNDS, MODES

Supervising = SupervisingProcess
LOST = ((1, 1, "backward"),)
_OURS = "tests.recovery.returning_models:"


def chaos(*values: Any) -> list[Any]:
    """Parameters that only `make chaos` runs."""
    return [pytest.param(value, marks=pytest.mark.chaos) for value in values]


@pytest.mark.parametrize("slot", [0, *chaos(1, 2, 3)])
def test_a_slot_comes_back(supervising: Supervising, world: Worlds, slot: int, tmp_path: Path) -> None:
    returns(supervising, world, Job((2, 2), ((slot, 1, "backward"),)), (3,), tmp_path)


@pytest.mark.parametrize("slot", [2, *chaos(0, 1, 3)])
def test_it_comes_back_in_the_middle_of_an_epoch(
    supervising: Supervising, world: Worlds, slot: int, tmp_path: Path
) -> None:
    """Metrics of the epoch have begun, and its dataloader is not in position."""
    returns(supervising, world, Job((2, 2), ((slot, 0, "backward"),)), (1,), tmp_path)


@pytest.mark.parametrize("slot", [3, *chaos(0, 1, 2)])
@pytest.mark.parametrize("mode", ["clipping", *chaos("accumulation", "manual", "buffers and schedule", "16-mixed")])
def test_a_spare_takes_part_in_the_very_step_that_has_lost_a_rank(
    supervising: Supervising, world: Worlds, slot: int, mode: str, tmp_path: Path
) -> None:
    step = 6 if "manual" in mode else 3
    job = Job((2, 2), ((slot, step, "backward"),), strategy={"spares": 1}, **{"epochs": 3, **MODES[mode]})
    there = {0, 1, 2, 3, 4} - {slot}
    got = returns(
        supervising,
        world,
        job,
        (step,),
        tmp_path,
        bound=BOUNDS.get(mode, EXACT),
        there=there,
        max_restarts=0,
        spares=1,
    )
    changes = [e for e in read_events(got.directory / "rows" / FILE_NAME) if e["event"] == "change"]
    assert [(change["lost"], change["joined"]) for change in changes] == [([slot], []), ([], [4])]
    assert changes[0]["step"] == changes[1]["step"]


@pytest.mark.parametrize("mode", ["clipping", *chaos("accumulation")])
def test_a_spare_takes_part_in_a_step_before_which_others_were_done_again(
    supervising: Supervising, world: Worlds, mode: str, tmp_path: Path
) -> None:
    """It joins in the replay, not in the step after: else it would have one batch more than its peers before it."""
    options: dict[str, Any] = {"epochs": 3, **MODES[mode]}
    copies = {"spares": 1, "redundancy": "neighbor"}
    job = Job((3,), ((1, 5, "backward"),), strategy=copies, copy_cost=1e-9, **options)
    got = returns(
        supervising,
        world,
        job,
        (5,),
        tmp_path,
        bound=BOUNDS.get(mode, EXACT),
        there={0, 2, 3},
        max_restarts=0,
        spares=1,
    )
    changes = [e for e in read_events(got.directory / "rows" / FILE_NAME) if e["event"] == "change"]
    assert [(change["lost"], change["joined"]) for change in changes] == [([1], []), ([], [3])]
    assert changes[0]["gone_back"] > 0 and changes[0]["step"] == changes[1]["step"]


def test_slots_go_back_to_their_places(supervising: Supervising, world: Worlds, tmp_path: Path) -> None:
    """Both replicas lose a rank, at different indices: who stays behind in the second one takes another index."""
    job = Job((2, 2), ((0, 0, "backward"), (3, 1, "backward")), module="Settles", epochs=3)
    got = returns(supervising, world, job, (3,), tmp_path)
    assert got.first["replicas"] == Topology.start((2, 2)).replicas
    changes = [e for e in read_events(got.directory / "rows" / FILE_NAME) if e["event"] == "change"]
    assert [(len(change["lost"]), len(change["joined"])) for change in changes][-1] == (0, 0)
    assert changes[-1]["bytes"] and "slots are at their places" in got.output


def test_what_a_script_draws_between_two_fits_is_the_same_in_who_passes_over_the_first(
    supervising: Supervising, tmp_path: Path
) -> None:
    """Its own data are what it trains on in later epochs: others would give its replica wrong gradients, silently."""
    arguments = [(str(tmp_path / "quiet"), (), (), "draw"), (str(tmp_path / "job"), LOST, (3,), "draw")]
    want, got = (supervising.run(4, Path(each[0]), found_before.train, *each, **OPTIONS) for each in arguments)
    assert got.code == want.code == 0, f"{got.cause}\n{got.output}"
    assert got.output.count(" joined: degrees") == 1 and len(got.survivors) == 4, got.output
    assert_same(got.survivors, want.survivors, EXACT)


def test_checkpoints_are_saved_around_ranks_that_have_not_joined(
    supervising: Supervising, world: Worlds, tmp_path: Path
) -> None:
    """A newcomer holds shards that nobody completes: at the start, and a spare that nobody needed at the end too."""
    job = Job((2, 2), ((1, 1, "backward"),), module=_OURS + "Saves", strategy={"spares": 1}, epochs=3)
    got = returns(supervising, world, job, (3,), tmp_path, there={0, 2, 3, 4}, spares=1)
    assert "Traceback" not in got.output and "has ended before it had joined: exit code 0" in got.output
    start, end = (torch.load(got.directory / f"{name}.ckpt", weights_only=False) for name in ("start", "end"))
    assert (start["global_step"], end["global_step"]) == (0, got.first["steps"])
    assert_same(end["state_dict"], got.first["parameters"], EXACT)


IN_TEST = ("accumulation",)


@pytest.mark.parametrize("mode", [m if m in IN_TEST else pytest.param(m, marks=pytest.mark.chaos) for m in MODES])
def test_in_every_mode(supervising: Supervising, world: Worlds, mode: str, tmp_path: Path) -> None:
    step = 2 if "manual" in mode else 1  # both optimizers of a manual step count
    job = Job((2, 2), ((1, step, "backward"),), epochs=3, **MODES[mode])
    returns(supervising, world, job, (2 * step,), tmp_path, bound=BOUNDS.get(mode, EXACT))


@pytest.mark.chaos
@pytest.mark.parametrize("module", ["Averages", "Keeps"])
@pytest.mark.parametrize("slot", [0, 3])
def test_registered_state_and_kept_graphs_come_along(
    supervising: Supervising, world: Worlds, module: str, slot: int, tmp_path: Path
) -> None:
    job = Job((2, 2), ((slot, 1, "backward"),), module=module)
    # torchmetrics keeps float32, whatever the precision
    returns(supervising, world, job, (2,), tmp_path, bound=1e-6 if module == "Keeps" else EXACT)


@pytest.mark.chaos
@pytest.mark.parametrize("step", range(8))
def test_in_any_step_of_an_epoch(supervising: Supervising, world: Worlds, step: int, tmp_path: Path) -> None:
    """Of two epochs of four. Whoever comes too late for the last step passes over the fit."""
    job = Job((2, 2), ((3, max(0, step - 1), "forward"),))
    late = step == 7
    returns(supervising, world, job, (step,), tmp_path, degrees=(2, 1) if late else None)


@pytest.mark.chaos
def test_who_has_left_as_planned_comes_back_when_a_person_demands_it(
    supervising: Supervising, world: Worlds, tmp_path: Path
) -> None:
    job = Job((2, 2), module=_OURS + "Drained", epochs=3)
    got = returns(supervising, world, job, (6,), tmp_path)
    assert "slot 1 left (maintenance)" in got.output and "slot 1 is started again, on demand" in got.output


@pytest.mark.chaos
def test_a_replica_that_was_dropped_with_its_healthy_ranks_comes_back(
    supervising: Supervising, world: Worlds, tmp_path: Path
) -> None:
    job = Job((2, 2), LOST, epochs=3, strategy={"min_tensor_parallel_size": 2})
    got = returns(supervising, world, job, (4,), tmp_path, partial=True)
    assert "healthy slot 0 leaves" in got.output


# ---- data and callbacks ---------------------------------------------------------------------------------------------


@pytest.mark.chaos
@pytest.mark.parametrize("slot", [0, 3])
@pytest.mark.parametrize("module", ["Followed", "Dropping", "Augments", "InWorkers", "Streams", "DealsOtherwise"])
def test_data_and_callbacks_with_a_state_of_their_own(
    supervising: Supervising, world: Worlds, module: str, slot: int, tmp_path: Path
) -> None:
    """Its sampler has not drawn what those of its peers have, nor has its callback been told what theirs was."""
    job = Job((2, 2), ((slot, 1, "backward"),), module=_OURS + module, batches=8, epochs=3)
    returns(supervising, world, job, (2,), tmp_path)


@pytest.mark.chaos
def test_an_order_that_is_drawn_from_a_generator(supervising: Supervising, world: Worlds, tmp_path: Path) -> None:
    job = Job(
        (3,),
        LOST,
        module=_OURS + "DrawsOrder",
        epochs=4,
        strategy={"redundancy": "neighbor"},
        trainer={"use_distributed_sampler": False},
    )
    returns(supervising, world, job, (2,), tmp_path)


@pytest.mark.chaos
def test_a_single_replica_loses_one_after_the_other(supervising: Supervising, world: Worlds, tmp_path: Path) -> None:
    """Neighbours' copies are made anew whenever somebody has come."""
    faults = ((1, 1, "backward"), (2, 6, "backward"), (0, 10, "vote"))
    job = Job((4,), faults, epochs=4, strategy={"redundancy": "neighbor"})
    returns(supervising, world, job, (3, 8, 12), tmp_path)


@pytest.mark.chaos
def test_a_replica_that_reads_a_stream_stays_out_when_it_is_lost_as_a_whole(
    supervising: Supervising, tmp_path: Path
) -> None:
    """Its samples are skipped, as they are where nobody is started again."""
    job = Job((2, 2), ((0, 1, "backward"), (1, 2, "backward")), module=_OURS + "Streams", epochs=3)
    arguments = (job, (5,), str(tmp_path / "job"))
    got = supervising.run(4, tmp_path / "job", train_and_return, *arguments, **OPTIONS)
    assert got.code == 0, f"{got.cause}\n{got.output}"
    assert (got.first["degrees"], got.first["steps"]) == ((0, 2), 12)
    assert got.output.count("replica 0 cannot come back in this fit") == 1, got.output
    assert " joined: degrees" not in got.output and not got.left, got.output


# ---- whole replicas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [((0, 1, "backward"), (1, 2, "vote")), *chaos(((2, 1, "update"), (3, 1, "vote")))])
def test_a_whole_replica_comes_back_in_the_middle_of_an_epoch(
    supervising: Supervising, world: Worlds, faults: tuple[tuple[int, int, str], ...], tmp_path: Path
) -> None:
    returns(supervising, world, Job((2, 2), faults, epochs=3), (5,), tmp_path, partial=True)


@pytest.mark.chaos
def test_who_has_joined_in_a_later_epoch_takes_its_part_of_the_samples_of_a_replica_that_is_lost(
    supervising: Supervising, world: Worlds, tmp_path: Path
) -> None:
    """They are dealt by the order of that epoch."""
    job = Job((1, 2, 1), ((1, 1, "backward"), (3, 6, "backward")), epochs=4)
    returns(supervising, world, job, (4, 10), tmp_path, partial=True)


@pytest.mark.chaos
@pytest.mark.parametrize("slot", [0, 1])
def test_a_replica_of_one_comes_back(supervising: Supervising, world: Worlds, slot: int, tmp_path: Path) -> None:
    returns(supervising, world, Job((1, 1), ((slot, 1, "backward"),)), (2,), tmp_path, partial=True)


# ---- faults on the way ----------------------------------------------------------------------------------------------


@pytest.mark.chaos
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("point", ON_THE_WAY)
def test_a_newcomer_that_dies_comes_back_later(
    supervising: Supervising, world: Worlds, point: str, number: int, tmp_path: Path
) -> None:
    fates = [Fate(1, 1, point, number)]
    returns(supervising, world, Job((2, 2), LOST, epochs=3), (3, 7), tmp_path, fates)


@pytest.mark.parametrize(
    "point", ["switched", *chaos("cut", "stands by", "invited", "built", "travelled", "gradients", "arrived", "vote")]
)
def test_an_exception_in_a_newcomer_is_its_own(
    supervising: Supervising, world: Worlds, point: str, tmp_path: Path
) -> None:
    """Also in the moment in which it has become a member, and the others count on it."""
    fates = [Fate(1, 1, point, 1, "raise")]
    returns(supervising, world, Job((2, 2), LOST, epochs=3), (3, 7), tmp_path, fates)


@pytest.mark.chaos
@pytest.mark.parametrize("point", ON_THE_WAY)
def test_a_newcomer_that_is_stopped_is_found_and_replaced(
    supervising: Supervising, world: Worlds, point: str, tmp_path: Path
) -> None:
    fates = [Fate(1, 1, point, 1, "stop")]
    returns(supervising, world, Job((2, 2), LOST, epochs=3), (3, 7), tmp_path, fates)


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize("slot", [0, 2, 3])
@pytest.mark.parametrize("point", OF_MEMBERS)
def test_a_member_that_dies_while_it_lets_somebody_in_comes_back_too(
    supervising: Supervising, world: Worlds, point: str, slot: int, kind: str, tmp_path: Path
) -> None:
    """Slot 0 is rank 0 and gives slot 1 its state; with it its replica is gone."""
    fates = [Fate(slot, 0, point, 5 if point == "vote" else 1, kind)]
    job = Job((2, 2), LOST, batches=6, epochs=3)
    # not all of them come to every point
    returns(supervising, world, job, (3, 8, 10), tmp_path, fates, partial=slot == 0)


@pytest.mark.parametrize("number", [6, *chaos(7, 8)])
def test_another_peer_hands_the_newcomer_its_batches_when_the_giver_dies(
    supervising: Supervising, world: Worlds, number: int, tmp_path: Path
) -> None:
    """It had fetched the batch already, before that fell to it."""
    job = Job((3, 2), ((2, 1, "backward"),), batches=10, epochs=2)
    returns(supervising, world, job, (3, 9), tmp_path, [Fate(0, 0, "fetch", number)], heartbeat=None)


# ---- other versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "told"),
    [
        pytest.param("Longer", r"training data 0 is .* here and .* there", marks=pytest.mark.chaos),
        ("Wider", r"parameter net\.head\.weight is \(3, 6\), .* here and \(2, 6\), .* there"),
        pytest.param("Newer", r"package torch is 99\.0 here", marks=pytest.mark.chaos),
        pytest.param("Slower", r"optimizer 0 is AdamW\(.*lr=0\.01.*\) here", marks=pytest.mark.chaos),
    ],
)
def test_a_newcomer_of_another_version_is_refused_and_the_job_goes_on(
    supervising: Supervising, world: Worlds, module: str, told: str, tmp_path: Path
) -> None:
    job = Job((2, 2), LOST, module=_OURS + module)
    got = returns(supervising, world, job, (), tmp_path, degrees=(1, 2))
    assert re.search(f"slot 1 cannot join: it does not run what the job runs: .*{told}", got.output), got.output
    assert "the job does not take it; it is not started again unless `lightning-ntp restart 1` demands it" in got.output
    assert "restart 2 of" not in got.output
