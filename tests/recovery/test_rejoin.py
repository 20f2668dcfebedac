"""A dead rank is started again and comes back: degrees rise between two updates, and nobody can tell from results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.rigs import assert_same
from tests.recovery.jobs import EXACT, Job, Worlds, undisturbed
from tests.recovery.rejoining import train_and_return
from tests.recovery.supervised import Supervised, SupervisingProcess
from tests.recovery.test_modes import BOUNDS, MODES


@pytest.fixture(scope="module")
def _process() -> Iterator[SupervisingProcess]:
    process = SupervisingProcess()
    process.start()  # before the leak check of a test looks
    yield process
    process.close()


@pytest.fixture
def supervising(_process: SupervisingProcess) -> Iterator[SupervisingProcess]:
    before = _process.pid
    yield _process
    if _process.pid != before:  # a job did not end, in an earlier test
        _process.close(keep_files=True)


def returns(
    supervising: SupervisingProcess,
    world: Worlds,
    job: Job,
    waits: tuple[int, ...],
    directory: Path,
    bound: float = EXACT,
    there: set[int] | None = None,
    **options: Any,
) -> Supervised:
    alone = {key: value for key, value in job.strategy.items() if key != "spares"}
    want = undisturbed(world, replace(job, strategy=alone), directory)
    options = {"max_restarts": 20, "restart_backoff": timedelta(0), **options}
    got = supervising.run(
        sum(job.degrees), directory / "job", train_and_return, job, waits, str(directory / "job"), **options
    )
    assert got.code == 0, f"{got.cause}\n{got.output}\n{[o.stacks for o in got.outcomes]}"
    assert not got.left
    print(got.output)
    assert {*got.survivors} == ({*range(sum(job.degrees))} if there is None else there), got.output
    first = got.first
    assert (first["rank"], first["world"], tuple(first["degrees"])) == (0, sum(job.degrees), job.degrees), got.output
    assert first["steps"] == want.first["steps"]
    assert_same(first["parameters"], want.first["parameters"], bound, "parameters")
    assert_same(first["optimizers"], want.first["optimizers"], bound, "optimizers")
    for number, found in got.survivors.items():
        if number not in want.survivors:
            continue  # a spare, which was of no replica before
        assert_same(found["losses"], want.survivors[number]["losses"], bound, f"losses of slot {number}")
        assert_same(found["logged"], want.survivors[number]["logged"], bound, f"logged in slot {number}")
    return got


@pytest.mark.parametrize("slot", [0, *(pytest.param(s, marks=pytest.mark.chaos) for s in (1, 2, 3))])
def test_a_slot_comes_back(supervising: SupervisingProcess, world: Worlds, slot: int, tmp_path: Path) -> None:
    returns(supervising, world, Job((2, 2), ((slot, 1, "backward"),)), (3,), tmp_path)


@pytest.mark.parametrize("slot", [2, *(pytest.param(s, marks=pytest.mark.chaos) for s in (0, 1, 3))])
def test_it_comes_back_in_the_middle_of_an_epoch(
    supervising: SupervisingProcess, world: Worlds, slot: int, tmp_path: Path
) -> None:
    """Metrics of the epoch have begun, and its dataloader is not in position."""
    returns(supervising, world, Job((2, 2), ((slot, 0, "backward"),)), (1,), tmp_path)


IN_TEST = ("accumulation",)


@pytest.mark.parametrize("mode", [m if m in IN_TEST else pytest.param(m, marks=pytest.mark.chaos) for m in MODES])
def test_in_every_mode(supervising: SupervisingProcess, world: Worlds, mode: str, tmp_path: Path) -> None:
    step = 2 if "manual" in mode else 1  # both optimizers of a manual step count
    job = Job((2, 2), ((1, step, "backward"),), epochs=3, **MODES[mode])
    returns(supervising, world, job, (2 * step,), tmp_path, bound=BOUNDS.get(mode, EXACT))


@pytest.mark.parametrize("slot", [3, *(pytest.param(s, marks=pytest.mark.chaos) for s in (0, 1, 2))])
def test_a_spare_takes_the_place(supervising: SupervisingProcess, world: Worlds, slot: int, tmp_path: Path) -> None:
    job = Job((2, 2), ((slot, 3, "backward"),), strategy={"spares": 1})
    left = {0, 1, 2, 3, 4} - {slot}
    returns(supervising, world, job, (2,), tmp_path, there=left, max_restarts=0, spares=1)
