"""Who works where, from notes that others write at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.launch import jobs
from lightning_ntp.power.control import Domain, GpuBounds
from lightning_ntp.power.loop.domain import Levers
from lightning_ntp.power.loop.measuring import Measurer
from lightning_ntp.power.loop.paces import PaceMeter
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
    note["degrees"] = {"0": 4, "1": 3}
    jobs.work_note(tmp_path).write_text(json.dumps(note))
    assert Places(tmp_path, 2, ()).work() == Work(True, {0: 1.0, 1: 1.33}, {0: 7}, 2, 9, {0: 4, 1: 3})


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"planned": 3}', '{"samples": {"a": 1}}', b"\xff\xfe"])
def test_a_note_that_makes_no_sense_says_that_nobody_trains(tmp_path: Path, content: Any) -> None:
    jobs.work_note(tmp_path).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert Places(tmp_path, 2, ()).work() == Work()


@pytest.mark.parametrize(("slots", "known"), [((4, 5, 6), True), ((4, 5, 6, 7), False), ((4, 5), False)])
def test_a_plan_for_other_gpus_is_none(tmp_path: Path, slots: tuple[int, ...], known: bool) -> None:
    """Who works in a replica is noted before what that takes: a GPU that is back must not be boosted meanwhile."""
    names = dict(enumerate("abcdefgh"))
    domain = Domain(tuple(GpuBounds(gpu, slot // 4, "node", 300, 200, 700) for slot, gpu in names.items()))
    replicas = {0: (0, 1, 2, 3), 1: slots}
    work = Work(True, {0: 1.0, 1: 1.33}, {0: 8, 1: 8}, degrees={0: 4, 1: 3})
    measurer = Measurer(PaceMeter(tmp_path), dict, 1.0, None)
    got = measurer.measure(Levers(domain, names, None, True), replicas, set(), work, 1.0)
    assert got.planned == ({0: 1.0, 1: 1.33} if known else {0: 1.0})
