"""``events.jsonl`` and the line that a person reads."""

from __future__ import annotations

import math
import os
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from lightning_ntp.engine.events import EventLog, describe, read_events
from lightning_ntp.engine.recovery import Change
from lightning_ntp.plan import Topology

PHASES = {"agree": 0.0123, "rebuild": 0.054, "reshard": 0.0049}


def change(degrees: tuple[int, ...] = (4, 4), lost: tuple[int, ...] = (5,), moved: int = 24_300_000) -> Change:
    before = Topology.start(degrees)
    return Change(before, before.lose(lost)[0], lost, 17, moved, (1, 2), dict(PHASES))


def test_one_line_says_what_died_what_moved_how_long_it_took_and_that_the_step_goes_on() -> None:
    assert describe(change()) == (
        "slot 5 lost: degrees (4, 4) -> (4, 3), 7 ranks; 23.2 MiB moved from slots 1, 2;"
        " 71 ms (agree 12 ms, rebuild 54 ms, reshard 4.9 ms); step 17 goes on"
    )


def test_the_line_names_the_new_rank_zero() -> None:
    line = describe(change(lost=(0, 7)))
    assert line.startswith("slots 0, 7 lost: degrees (4, 4) -> (3, 3), 6 ranks; ")
    assert line.endswith("; slot 1 is rank 0 now; step 17 goes on")


def test_a_replica_that_is_gone_and_nothing_that_moves() -> None:
    line = describe(change((2, 1), (2,), moved=0))
    assert line.startswith("slot 2 lost: degrees (2, 1) -> (2, -), 2 ranks; nothing moved; ")


def test_new_groups_for_the_same_members() -> None:
    topology = Topology.start((2, 2))
    line = describe(Change(topology, topology, (), 3, 0, (), {"rebuild": 0.02}))
    head, _, rest = line.partition("; ")
    assert head == "all members live, new groups: degrees (2, 2) as before, 4 ranks"
    assert rest == "nothing moved; rebuild 20 ms; step 3 goes on"


def test_a_change_is_written_as_its_events_in_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run" / "events.jsonl", 0, lambda: True)
    began = time.monotonic()
    log.write_change(change(lost=(5, 6)))
    log.write("replay", step=17, seconds=0.5)
    events = list(read_events(log.path))
    assert [(e["event"], e["slot"]) for e in events] == [
        ("death", 5),
        ("death", 6),
        ("agreement", 0),
        ("rebuild", 0),
        ("reshard", 0),
        ("change", 0),
        ("replay", 0),
    ]
    assert {e["step"] for e in events} == {17}
    times = [e["monotonic"] for e in events]
    assert times == sorted(times)
    assert times[5] - times[0] == pytest.approx(sum(PHASES.values()), abs=1e-4)
    assert began <= times[5] <= time.monotonic()
    assert [events[k]["seconds"] for k in (2, 3, 4)] == list(PHASES.values())
    assert (events[4]["bytes"], events[4]["sources"]) == (24_300_000, [1, 2])
    whole = events[5]
    assert (whole["lost"], whole["joined"], whole["degrees_before"], whole["degrees_after"], whole["world_size"]) == (
        [5, 6],
        [],
        [4, 4],
        [4, 2],
        6,
    )
    assert whole["seconds"] == PHASES


def test_an_arrival_is_one_line_and_two_events(tmp_path: Path) -> None:
    full = Topology.start((4, 4))
    seconds = {"prepare": 0.058, "travel": 0.074, "wait": 0.0001, "switch": 0.029}
    arrival = Change(full.lose([7])[0], full, (), 17, 557_568, (3, 4), seconds, planned=True)
    assert describe(arrival) == (
        "slot 7 joined: degrees (4, 3) -> (4, 4), 8 ranks; 544.5 KiB moved from slots 3, 4;"
        " 161 ms (prepare 58 ms, travel 74 ms, wait 0.1 ms, switch 29 ms); no step was done again: step 17"
    )
    log = EventLog(tmp_path / "events.jsonl", 0, lambda: True)
    log.write_change(arrival)
    join, whole = read_events(log.path)
    assert (join["event"], join["slot"], join["step"]) == ("join", 7, 17)
    assert (whole["event"], whole["lost"], whole["joined"], whole["degrees_after"]) == ("change", [], [7], [4, 4])
    assert whole["seconds"] == seconds and join["monotonic"] == whole["monotonic"]


def test_wall_and_monotonic_clock_name_the_same_moment(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 3, lambda: True)
    log.write("agreement", monotonic=time.monotonic() - 60)
    (event,) = read_events(log.path)
    when = datetime.fromisoformat(event["time"])
    assert when.tzinfo is not None and when.utcoffset() == timedelta(0)
    assert datetime.now(timezone.utc) - when == pytest.approx(timedelta(seconds=60), abs=timedelta(seconds=5))
    assert event["slot"] == 3 and event["step"] is None


def test_only_the_live_rank_zero_writes_and_its_successor_goes_on_in_the_same_file(tmp_path: Path) -> None:
    rank_zero = 0
    logs = [EventLog(tmp_path / "events.jsonl", slot, lambda slot=slot: slot == rank_zero) for slot in range(3)]  # type: ignore[misc]
    for log in logs:
        log.write("change", number=1)
    rank_zero = 1
    for log in logs:
        log.write("change", number=2)
    assert [(e["slot"], e["number"]) for e in read_events(tmp_path / "events.jsonl")] == [(0, 1), (1, 2)]


def test_a_rank_that_does_not_write_makes_no_directory(tmp_path: Path) -> None:
    EventLog(tmp_path / "run" / "events.jsonl", 1, lambda: False).write("change")
    assert not (tmp_path / "run").exists()


def test_a_line_that_was_cut_off_does_not_swallow_the_next(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 0, lambda: True)
    log.write("death", slot=2)
    with open(log.path, "a") as file:
        file.write('{"time": "2026-')
    log.write("change")
    assert [e["event"] for e in read_events(log.path)] == ["death", "change"]


def test_lines_of_several_writers_never_mix_and_no_file_stays_open(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 0, lambda: True)
    open_files = len(os.listdir("/proc/self/fd"))

    def write(number: int) -> None:
        for _ in range(50):
            log.write("change", number=number, filling="x" * 2000)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(1 for _ in read_events(log.path)) == 200
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_values_that_json_does_not_know_are_written_all_the_same(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 0, lambda: True)
    log.write("change", seconds={"agree": math.nan, "rebuild": 1.5}, path=tmp_path, slots=(1, 2))
    (event,) = read_events(log.path)
    assert (event["seconds"], event["path"], event["slots"]) == ({"agree": None, "rebuild": 1.5}, str(tmp_path), [1, 2])


def test_fields_of_every_event_cannot_be_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the fields .'time'. are set for every event"):
        EventLog(tmp_path / "events.jsonl", 0, lambda: True).write("change", time=3)


def test_the_documentation_names_every_field_and_event() -> None:
    from lightning_ntp.engine.events import PHASES as EVENTS

    text = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    fields = ("time", "monotonic", "slot", "step", "degrees_after", "sources")
    for name in (*EVENTS.values(), "death", "leave", "join", "change", *fields):
        assert f"`{name}`" in text, name
    assert describe(change()).partition(";")[0] in text.replace("\n", " ")


def test_a_full_disk_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog("/dev/full", 0, lambda: True)
    for step in range(3):
        log.write("replay", step=step, seconds=0.5)
    (record,) = caplog.records
    assert record.getMessage().startswith("/dev/full cannot be written: No space left on device; training goes on")
