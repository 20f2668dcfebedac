"""Whole scripts, as people start them: whoever is lost comes back, or passes over what is over, and nobody can tell."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.rigs import assert_same
from tests.recovery import found_before
from tests.recovery.fates import Fate
from tests.recovery.jobs import EXACT, Worlds
from tests.recovery.rejoining import OPTIONS
from tests.recovery.supervised import SupervisingProcess
from tests.recovery.whole_runs import Found, Script, compare, undisturbed

_ROOT = Path(__file__).resolve().parents[2]
_quiet: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


# ---- in one process -------------------------------------------------------------------------------------------------

WHOLE = Script((2, 2), more=1)


def script(**changes: Any) -> Script:
    return replace(WHOLE, **changes)


def comes_back(
    supervising: SupervisingProcess,
    world: Worlds,
    script: Script,
    directory: Path,
    partial: bool = False,
    absent: frozenset[int] = frozenset(),
) -> None:
    """Run a script whose dead ranks are started again, and check everything that it leaves behind."""
    want = undisturbed(world, script, directory)
    got = supervising.run_script(script, directory / "job", **OPTIONS)
    assert got.code == 0, f"{got.cause}\n{got.output}\n{[o.stacks for o in got.outcomes]}"
    assert not got.left
    members = {number: value for number, value in got.survivors.items() if value["joined"]}
    assert set(range(sum(script.degrees))) - members.keys() == absent, got.output
    compare(Found(members, got.directory), want, set(absent), partial)


@pytest.mark.parametrize("slot", [0, 3])
@pytest.mark.parametrize(
    ("place", "step"),
    [
        *(("setup", 1), ("start", 1), ("sanity", 1)),
        *((place, 3) for place in ("validation", "validation_forward", "validation_end", "validation_epoch_end")),
        *((place, 4) for place in ("metric_sync", "gather", "write", "epoch_end")),
    ],
)
def test_who_dies_outside_of_steps_comes_back(
    supervising: SupervisingProcess, world: Worlds, place: str, step: int, slot: int, tmp_path: Path
) -> None:
    """Checkpoints, best scores and rows are those of the undisturbed script."""
    comes_back(supervising, world, script(deaths=((slot, place, 1),), waits=(step, 4)), tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"val_check_interval": None, "check_val_every_n_epoch": 2, "max_epochs": 4},
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 4},
        {"accumulate_grad_batches": 2, "max_epochs": 4},
        {"num_sanity_val_steps": 0},
    ],
    ids=["every second epoch", "every four steps", "accumulation", "no sanity check"],
)
def test_loops_of_every_kind(
    supervising: SupervisingProcess, world: Worlds, settings: dict[str, Any], tmp_path: Path
) -> None:
    job = script(faults=((1, 1, "backward"),), waits=(2, 3), trainer=tuple(settings.items()))
    comes_back(supervising, world, job, tmp_path)


@pytest.mark.parametrize("slot", [0, 3])
@pytest.mark.parametrize("place", ["fit_end", "test", "test_forward", "predict", "predict_forward"])
def test_nobody_joins_after_the_fit(
    supervising: SupervisingProcess, world: Worlds, place: str, slot: int, tmp_path: Path
) -> None:
    comes_back(supervising, world, script(deaths=((slot, place, 1),)), tmp_path, absent=frozenset({slot}))


@pytest.mark.parametrize("slot", [0, 1])
def test_a_single_replica_with_copies(
    supervising: SupervisingProcess, world: Worlds, slot: int, tmp_path: Path
) -> None:
    job = Script((4,), redundancy="neighbor", faults=((slot, 1, "backward"),), waits=(2,))
    comes_back(supervising, world, job, tmp_path)


def test_three_replicas_lose_one_each(supervising: SupervisingProcess, world: Worlds, tmp_path: Path) -> None:
    faults = ((0, 1, "vote"), (3, 1, "update"), (5, 2, "backward"))
    comes_back(supervising, world, Script((2, 2, 2), faults=faults, waits=(3,), more=1), tmp_path)


def test_a_whole_replica_with_checkpoints(supervising: SupervisingProcess, world: Worlds, tmp_path: Path) -> None:
    faults = ((0, 1, "backward"), (1, 1, "vote"))
    comes_back(supervising, world, script(faults=faults, waits=(3,)), tmp_path, partial=True)


@pytest.mark.parametrize("fate", [Fate(1, 1, "voted", 1), Fate(1, 1, "committed", 1), Fate(1, 1, "handed", 1)])
def test_a_newcomer_that_dies_at_once_comes_back(
    supervising: SupervisingProcess, world: Worlds, fate: Fate, tmp_path: Path
) -> None:
    """While validation begins, for one: it comes after the second step."""
    job = script(faults=((1, 0, "backward"),), waits=(1, 3), fates=(fate,))
    comes_back(supervising, world, job, tmp_path)


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize(("before", "step"), [("resume", 5), ("tune", 1)])
def test_what_a_script_has_done_before_it_trains(
    supervising: SupervisingProcess, before: str, step: int, slot: int, tmp_path: Path
) -> None:
    """Whoever is started again takes what the others have found, and does not look for it alone."""
    faults, waits = ((slot, step, "backward"),), (step + 2,)
    arguments = [(str(tmp_path / "quiet"), (), (), before), (str(tmp_path / "job"), faults, waits, before)]
    want, got = (supervising.run(4, Path(each[0]), found_before.train, *each, **OPTIONS) for each in arguments)
    assert got.code == want.code == 0, f"{got.cause}\n{got.output}"
    assert got.output.count(" joined: degrees") == 1 and len(got.survivors) == 4, got.output
    assert_same(got.survivors, want.survivors, EXACT)


# ---- as people start them -------------------------------------------------------------------------------------------


def start(
    directory: Path, how: str, slot: int, step: int, waits: str, parts: str, file: Path | None = None
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Run the script, which must end well. Returns what it has said, and what every rank has found."""
    directory.mkdir(parents=True)
    (directory / "tmp").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory / "tmp"), "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [
            sys.executable,
            str(file or Path(__file__).with_name("returning_script.py")),
            *(str(directory), how, str(slot), str(step), waits, parts),
        ],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    assert not [name for name in os.listdir(directory / "tmp") if "lightning_ntp" in name]
    return said, {path.name: json.loads(path.read_text()) for path in sorted(directory.glob("found-*"))}


def quiet(directory: Path, how: str, parts: str) -> dict[str, dict[str, Any]]:
    """What ranks find if nobody dies; once per session."""
    key = ("spawn" if how == "spawn" else "", parts)
    if key not in _quiet:
        _quiet[key] = start(directory / "quiet", "popen" if how == "cli" else how, -1, 0, "-", parts)[1]
    return _quiet[key]


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize(("how", "parts"), [("popen", "fit,test,predict,again"), ("spawn", "fit"), ("cli", "fit,test")])
def test_however_it_is_started(how: str, parts: str, slot: int, tmp_path: Path) -> None:
    want = quiet(tmp_path, how, parts)
    said, got = start(tmp_path / "job", how, slot, 1, "3", parts)
    assert f"slot {slot} joined: degrees (1, 2) -> (2, 2), 4 ranks" in said, said
    assert_same(got, want, EXACT)
    if how == "cli":
        assert (tmp_path / "job" / "rows" / "config.yaml").exists()


def test_who_comes_too_late_for_the_fit_passes_over_what_is_over(tmp_path: Path) -> None:
    said, got = start(tmp_path / "job", "popen", 1, 5, "-", "fit,late,test,predict")
    want = quiet(tmp_path, "popen", "fit,test,predict")
    assert " joined: degrees" not in said, said
    members = {name: found for name, found in got.items() if found["joined"]}
    assert len(members) == 3
    assert_same(members, {name: want[name] for name in members}, EXACT)


def test_a_script_that_was_edited_meanwhile_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "edited_script.py"
    shutil.copy(Path(__file__).with_name("returning_script.py"), file)
    said, got = start(tmp_path / "job", "popen", 1, 1, "-", "fit,edited", file)
    different = rf"file {file} is version \w+ here and version \w+ there"
    assert re.search(f"slot 1 cannot join: it does not run what the job runs: {different}", said), said
    assert "the job does not take it" in said and len(got) == 3
