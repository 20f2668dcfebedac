"""Who works where, from notes that others write at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.launch import jobs
from lightning_ntp.power.loop.places import Places, Work


def lay_out(directory: Path, *replicas: dict[str, int]) -> None:
    jobs.layout_note(directory).write_text(json.dumps({"replicas": replicas}))


def test_before_anybody_has_noted_anything_nothing_is_known(tmp_path: Path) -> None:
    places = Places(tmp_path, 4, ())
    places.look()
    assert (places.gpus, places.replicas(), places.homes({0, 1}), places.work()) == ({}, {}, {0: -1, 1: -2}, Work())


def test_a_home_is_where_a_slot_has_worked_first(tmp_path: Path) -> None:
    places = Places(tmp_path, 4, ())
    lay_out(tmp_path, {"0": 0, "1": 1}, {"0": 2, "1": 3})
    assert places.homes({0, 1, 2, 3, 4}) == {0: 0, 1: 0, 2: 1, 3: 1, 4: -5}, "slot 4 is a spare"
    lay_out(tmp_path, {"0": 0, "1": 2}, {})
    assert places.replicas() == {0: (0, 2)}
    assert places.homes({0, 2}) == {0: 0, 1: 0, 2: 1, 3: 1}, "and lost ones keep theirs"


def test_devices_come_from_the_ranks_unless_they_were_given(tmp_path: Path) -> None:
    jobs.device_note(tmp_path, 1).write_text("GPU-b\n")
    asked, given = Places(tmp_path, 2, ()), Places(tmp_path, 2, ("GPU-x", "GPU-y"))
    asked.look()
    given.look()
    assert asked.gpus == {1: "GPU-b"} and given.gpus == {0: "GPU-x", 1: "GPU-y"}


def test_what_there_is_to_compute_is_read_whole(tmp_path: Path) -> None:
    note = {"training": True, "planned": {"0": 1.0, "1": 1.33}, "samples": {"0": 7}, "micro_batches": 2, "tokens": 9}
    jobs.work_note(tmp_path).write_text(json.dumps(note))
    assert Places(tmp_path, 2, ()).work() == Work(True, {0: 1.0, 1: 1.33}, {0: 7}, 2, 9)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"planned": 3}', '{"samples": {"a": 1}}', b"\xff\xfe"])
def test_a_note_that_makes_no_sense_says_that_nobody_trains(tmp_path: Path, content: Any) -> None:
    jobs.work_note(tmp_path).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert Places(tmp_path, 2, ()).work() == Work()
