"""Ranks are stopped (SIGSTOP) anywhere in a script: the supervisor finds, kills and declares them, and nobody can tell.

Every slot of 4+4 at every place, six victims in a job. No two replicas lose a rank between two moments in which all
ranks have met: two that are stopped together may hold the only copies of something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ntp.lightning.callbacks.fault_schedule import STEP_PHASES
from tests.recovery.jobs import Worlds, assert_left
from tests.recovery.supervised import HEARTBEAT, Supervised, SupervisingProcess
from tests.recovery.whole_runs import Found, Script, compare, undisturbed

_FOUND_SECONDS = HEARTBEAT + 1.0
"""The supervisor looks every tenth of a second, where the machine lets it."""

Victim = tuple[int, str, int]
"""Slot, and a place with its number, or a phase with its step."""

# in the order of the script; all ranks meet between two stages, and at a later number of the same place
_STAGES = (
    ("setup",),
    ("start",),
    ("sanity", "metric_sync"),
    (
        "validation_first",
        "validation_middle",
        "validation_last",
        "validation_forward",
        "validation_end",
        "validation_epoch_end",
    ),
    ("gather", "write"),
    ("epoch_end",),
    ("fit_end", "teardown"),
    ("test", "test_forward"),
    ("predict", "predict_forward"),
)
_PLACES = [place for stage in _STAGES for place in stage if place != "write"]
_AT_ONCE, _PER_REPLICA = 6, 3


def _stage(victim: Victim) -> tuple[str, int]:
    slot, place, number = victim
    if place in STEP_PHASES:
        return "step", number
    stage = next(places for places in _STAGES if place in places)
    return stage[0], number if len(stage) > 2 or place == "teardown" else 1


def _fits(victim: Victim, job: list[Victim]) -> bool:
    slot = victim[0]
    return (
        len(job) < _AT_ONCE
        and all(other[0] != slot for other in job)
        and sum(other[0] // 4 == slot // 4 for other in job) < _PER_REPLICA
        and all(other[0] // 4 == slot // 4 or _stage(other) != _stage(victim) for other in job)
    )


def _jobs() -> list[tuple[Victim, ...]]:
    """Every slot at every place, and some slot at every phase of a step, in few jobs."""
    left: list[Victim] = []
    for turn in range(8):
        for k, place in enumerate(_PLACES):
            slot = (3 * k + turn) % 8
            # at the first and the second evaluation loop; before a run that others need it for, and after the last one
            number = {"teardown": 1 + 2 * (turn % 2)}.get(place, 1 + turn % 2 if place.startswith("validation_") else 1)
            left.append((slot, place, number))
        left.append(((5 * turn + 2) % 8, STEP_PHASES[turn], turn % 6))
    # rank 0 writes: for another slot to be rank 0, those before it must have gone
    jobs: list[list[Victim]] = []
    for writer in range(_PER_REPLICA):
        gone = [next(v for v in left if v[0] == k and v[1] in ("setup", "start", "sanity")) for k in range(writer)]
        left = [victim for victim in left if victim not in gone]
        jobs.append([*gone, (writer, "write", 1)])
    for job in jobs:
        _fill(job, left)
    while left:
        job = []
        _fill(job, left)
        jobs.append(job)
    return [tuple(job) for job in jobs if job]


def _fill(job: list[Victim], left: list[Victim]) -> None:
    for victim in list(left):
        if _fits(victim, job):
            job.append(victim)
            left.remove(victim)


def _script(degrees: tuple[int, ...], victims: tuple[Victim, ...]) -> Script:
    deaths = tuple(victim for victim in victims if victim[1] not in STEP_PHASES)
    faults = tuple((slot, step, phase) for slot, phase, step in victims if phase in STEP_PHASES)
    return Script(degrees, deaths, faults, kinds=tuple((victim[0], "stop") for victim in victims))


def _survives(
    supervising: SupervisingProcess, world: Worlds, script: Script, directory: Path, degrees: tuple[int, ...]
) -> Supervised:
    want = undisturbed(world, script, directory)
    result = supervising.run_script(script, directory / "disturbed")
    assert result.code == 0, result.cause + result.output[-3000:] + "".join(o.stacks for o in result.outcomes)
    assert_left(result, script.victims, set())
    got = Found(result.survivors, result.directory)
    assert got.first["degrees"] == degrees
    compare(got, want, script.victims)
    found = _found(result.output)
    assert found.keys() == script.victims, (found, result.output[-3000:])
    slow = {slot: how for slot, how in found.items() if how[0] > _FOUND_SECONDS}
    assert not slow, f"stopped ranks were found late: {slow}"
    assert "Traceback" not in result.output and not result.left, (result.left, result.output[-3000:])
    return result


def _found(output: str) -> dict[int, tuple[float, str]]:
    """Slot -> for how many seconds it had been stopped when it was blamed, and what it was doing."""
    pattern = r"slot (\d) \(pid \d+\) died: hung: its process is stopped \(SIGSTOP\) since ([\d.]+) s, (.+?) \("
    return {int(slot): (float(seconds), what) for slot, seconds, what in re.findall(pattern, output)}


def _recoveries(directory: Path) -> dict[int, float]:
    """Slot -> seconds of the recovery from its loss."""
    events = [json.loads(line) for line in (directory / "rows" / "events.jsonl").read_text().splitlines()]
    changes = [event for event in events if event["event"] == "change"]
    return {slot: sum(change["seconds"].values()) for change in changes for slot in change["lost"]}


def test_ranks_that_are_stopped_are_replaced_exactly(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path
) -> None:
    """Rank 0 in the middle of writing a checkpoint, and one that others wait for in their last test batch."""
    script = _script((2, 2), ((0, "write", 1), (3, "test_forward", 3)))
    _survives(supervising, world, script, tmp_path, (1, 1))


@pytest.mark.chaos
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "victims", _jobs(), ids=lambda victims: ",".join(f"{s}-{place}-{n}" for s, place, n in victims)
)
def test_every_slot_stopped_at_every_place(
    supervising: SupervisingProcess,
    world: Worlds,
    victims: tuple[Victim, ...],
    tmp_path: Path,
    figure: Callable[[str], None],
) -> None:
    degrees = [4, 4]
    for slot, *where in victims:
        degrees[slot // 4] -= where != ["teardown", 3]  # the others are done, and never learn of it
    result = _survives(supervising, world, _script((4, 4), victims), tmp_path, (degrees[0], degrees[1]))
    found, recoveries = _found(result.output), _recoveries(result.directory)
    for slot, place, number in victims:
        seconds, what = found[slot]
        took = f"{1e3 * recoveries[slot]:.0f} ms" if slot in recoveries else "not timed"
        figure(f"stopped: slot {slot}, {place} {number}: found after {seconds:.1f} s {what}; recovery {took}")
