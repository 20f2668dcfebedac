"""What a verdict does to a training job: the slot leaves or ends, and nobody can tell from the numbers."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.callbacks import HealthMonitor
from lightning_ntp.engine.events import read_events
from lightning_ntp.health import FileSource, StragglerSource
from tests.health.watched import GPUS, Told
from tests.recovery.jobs import Job, Worlds
from tests.recovery.rejoining import returns
from tests.recovery.supervised import Supervised, SupervisingProcess

JOB = Job((2, 2), module="tests.health.watched:Watched")
STAY: dict[str, Any] = {"max_restarts": 0}


def strike(step: int, slot: int, signal: str, text: str = "said so", **fields: Any) -> dict[str, Any]:
    """Slot ``slot`` has a source say something about a device."""
    fields.setdefault("gpu", GPUS[slot])
    if "slot" in fields:
        del fields["gpu"]
    return {"step": step, "slot": slot, "call": "tell", "arguments": {"signal": signal, "text": text, **fields}}


def until(step: int, *actions: str) -> dict[str, Any]:
    return {"step": step, "until": list(actions)}


def watched(
    supervising: SupervisingProcess,
    world: Worlds,
    directory: Path,
    strikes: list[dict[str, Any]],
    job: Job = JOB,
    waits: tuple[int, ...] = (),
    monitor: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Supervised, list[dict[str, Any]]]:
    """Run the job and compare it with the undisturbed one; also its events about health."""
    (directory / "job").mkdir(parents=True)
    (directory / "job" / "strikes.json").write_text(json.dumps(strikes))
    settings: dict[str, Any] = {"nvml": False, "quiet": 0.5, **(monitor or {})}
    told = [Told(directory / "job" / "told"), *settings.pop("sources", ())]
    slots = sum(job.degrees) + job.strategy.get("spares", 0)
    made = HealthMonitor(sources=told, gpus=GPUS[:slots], **settings)
    got = returns(supervising, world, job, waits, directory, monitor=made, **options)
    path = got.directory / "rows" / "events.jsonl"
    return got, [event for event in read_events(path) if event["event"] == "health"] if path.exists() else []


@pytest.mark.parametrize("slot", [0, 3])
def test_a_device_that_falls_off_the_bus_ends_its_rank_at_once(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, slot: int
) -> None:
    strikes = [strike(2, slot, "xid", "seen by the driver", code=79), until(3, "dead")]
    others = {0, 1, 2, 3} - {slot}
    left = (1, 2) if slot == 0 else (2, 1)
    got, events = watched(supervising, world, tmp_path, strikes, degrees=left, there=others, **STAY)
    assert f"slot {slot}: XID 79 (ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS): seen by the driver" in got.output
    assert f"slot {slot} (pid" in got.output and "died: XID 79" in got.output
    assert [(event["slot"], event["action"], event["code"]) for event in events] == [(slot, "dead", 79)]


def test_a_sick_device_leaves_without_losing_a_step(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path
) -> None:
    strikes = [
        *(strike(1, 0, "nvlink_down", "link 4"), until(2, "suspect")),
        *(strike(2, 1, "row_remap_failure", "a row could not be remapped"), until(3, "drain")),
        {"step": 6, "slot": 3, "call": "status", "arguments": {}},
    ]
    got, events = watched(supervising, world, tmp_path, strikes, degrees=(1, 2), there={0, 2, 3}, **STAY)
    assert "slot 1 left (row remap failure: a row could not be remapped)" in got.output
    assert "no step was done again" in got.output
    assert [(event["slot"], event["action"]) for event in events] == [(0, "suspect"), (1, "drain")]
    shown = (got.directory / "status.txt").read_text()
    print(shown)
    assert "degrees (1, 2)" in shown and "slot 0: nvlink down: link 4" in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines()[3:7]}
    assert rows["0"][1:3] == ["0", "0"] and rows["0"][4] == "suspect" and rows["2"][1:3] == ["1", "0"]
    assert rows["1"][1:] == ["-", "-", "-", "drain", "gone"] and rows["3"][4] == "ok"
    assert "step 4 change slot" in shown and "lost [1], degrees_before [2, 2], degrees_after [1, 2]" in shown


def test_a_mistake_of_the_program_shrinks_nothing(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path
) -> None:
    every = [strike(2, slot, "xid", "raised", code=code) for code in (13, 31) for slot in range(4)]
    got, events = watched(supervising, world, tmp_path, [*every, until(3, "log")], **STAY)
    assert {event["action"] for event in events} == {"log"} and len(events) >= 8


def test_the_job_does_not_go_below_its_minimum_for_a_sick_device(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path
) -> None:
    job = Job((2, 2), module=JOB.module, strategy={"min_tensor_parallel_size": 2})
    every = [strike(2, 0, "maintenance", "at noon", gpu=GPUS[slot]) for slot in (1, 2)]
    got, events = watched(supervising, world, tmp_path, [*every, until(3, "drain"), until(4, "stays")], job, **STAY)
    why = "without slot 2 its replica would fall below min_tensor_parallel_size=2"
    assert f"health: slot 2 stays: {why}" in got.output
    assert sorted((event["slot"], event["action"]) for event in events) == [
        *((1, "drain"), (1, "stays")),
        *((2, "drain"), (2, "stays")),
    ]


def test_a_sick_spare_does_not_take_the_place_of_who_dies(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path
) -> None:
    job = Job((2, 2), ((3, 4, "backward"),), module=JOB.module, strategy={"spares": 1})
    strikes = [
        *(strike(1, 0, "maintenance", "at noon", gpu=GPUS[4]), until(2, "drain")),
        {"step": 3, "slot": 0, "call": "sleep", "values": [0.5]},
    ]
    got, _ = watched(supervising, world, tmp_path, strikes, job, degrees=(2, 1), there={0, 1, 2}, spares=1, **STAY)
    assert "has ended before it had joined: maintenance: at noon" in got.output


def test_a_contained_error_starts_the_rank_again_on_the_same_device(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path
) -> None:
    strikes = [strike(2, 3, "xid", "contained", code=94), until(3, "restart")]
    got, _ = watched(supervising, world, tmp_path, strikes, waits=(5,))
    assert "slot 3: XID 94" in got.output and "its rank ends, and may be started again on the same device" in got.output


def test_a_slot_comes_back_when_its_device_has_passed_its_check(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path
) -> None:
    strikes = [
        *(strike(1, 3, "recovery_action", "reset the device", code=1), until(2, "drain")),
        strike(5, 0, "recovery_action", "nothing", code=1, gpu=GPUS[3], clears=True),
    ]
    got, events = watched(
        supervising, world, tmp_path, strikes, waits=(6,), restart_backoff=timedelta(seconds=0.2), max_restarts=1
    )
    assert "slot 3 left" in got.output and "slot 3 joined" in got.output
    assert "slot 3 is not started again yet: " in got.output


@pytest.mark.chaos
def test_a_rank_that_is_slower_than_its_peers_is_suspected(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path
) -> None:
    slow = [{"step": step, "slot": 3, "phase": "backward", "call": "sleep", "values": [0.1]} for step in range(2, 24)]
    monitor = {"sources": [StragglerSource(factor=1.5, steps=4, interval=0.05)]}
    job = Job((2, 2), module=JOB.module, epochs=6)
    got, events = watched(supervising, world, tmp_path, [*slow, until(22, "suspect")], job, monitor=monitor, **STAY)
    assert (3, "suspect", "straggler") in {(event["slot"], event["action"], event["signal"]) for event in events}
    assert "the median of its replica" in got.output


def test_what_a_cluster_manager_writes_into_a_file_is_done(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path
) -> None:
    notices = tmp_path / "notices"
    notices.write_text("slot 2 drain maintenance at 18:00\n")
    monitor = {"sources": [FileSource(notices, interval=0.05)]}
    got, events = watched(
        supervising, world, tmp_path, [until(2, "drain")], monitor=monitor, degrees=(2, 1), there={0, 1, 3}, **STAY
    )
    assert "slot 2 left (maintenance: maintenance at 18:00)" in got.output
