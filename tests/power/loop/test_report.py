"""What people are told: one line per event, and none for noise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.launch import jobs
from lightning_ntp.power.loop.report import CALM, Report
from lightning_ntp.power.loop.telling import Telling

START = {1: 900.0}


def lines(directory: Path) -> list[dict[str, Any]]:
    path = jobs.power_log(directory)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kinds(directory: Path) -> list[str]:
    return [each["kind"] for each in lines(directory)]


def test_a_boost_is_told_when_it_begins_and_when_it_has_settled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = Report(tmp_path)
    for watts in [900, 900, 1200, 1500, 1700, *[1750] * 10]:
        report.limits({1: watts}, START, {1: 3})
    assert [each["values"] for each in lines(tmp_path)] == [
        {"limit_w": 400.0, "start_w": 300.0},
        {"limit_w": pytest.approx(1750 / 3, abs=0.1), "start_w": 300.0},
    ]
    printed = [line for line in capfd.readouterr().err.splitlines() if "power:" in line]
    assert len(printed) == 2 and printed[1].endswith(
        "replica 1: 583 W per GPU on 3 GPUs, +283 W over the limit at start"
    )


def test_noise_is_not_told(tmp_path: Path) -> None:
    report, noise = Report(tmp_path), random.Random(3)
    for _ in range(300):
        report.limits({1: 1500 + noise.uniform(-8, 8)}, START, {1: 3})  # 2 % of the start are 18 W
    assert kinds(tmp_path) == ["boost"]


def test_the_end_of_a_boost_is_told_once(tmp_path: Path) -> None:
    report = Report(tmp_path)
    for watts in [*[1500] * 6, *[900] * 12]:
        report.limits({1: watts}, START, {1: 3})
    assert kinds(tmp_path) == ["boost", "returned"]


def test_a_boost_that_never_was_does_not_return(tmp_path: Path) -> None:
    report = Report(tmp_path)
    for _ in range(3 * CALM):
        report.limits({1: 900.0}, START, {1: 3})
    assert kinds(tmp_path) == []


def test_notes_that_hold_are_told_once_whatever_their_numbers(tmp_path: Path) -> None:
    report = Report(tmp_path)
    report.notes(("replica 1: headroom used up, 70 W per GPU",), {})
    assert kinds(tmp_path) == [], "it may be gone in the next interval"
    for watts in (71, 68, 72, 69):
        report.notes((f"replica 1: headroom used up, {watts} W per GPU",), {})
    assert [(each["kind"], each["text"]) for each in lines(tmp_path)] == [
        ("headroom", "replica 1: headroom used up, 71 W per GPU")
    ]
    for notes in ((), ("replica 1: headroom used up, 69 W per GPU",), ("replica 1: headroom used up, 69 W per GPU",)):
        report.notes(notes, {})
    assert kinds(tmp_path) == ["headroom", "headroom"], "it is told again when it comes back"


def test_what_is_told_once_is_told_once(tmp_path: Path) -> None:
    report = Report(tmp_path)
    for _ in range(3):
        report.once("refused", "GPU-a was not written: no")
    assert kinds(tmp_path) == ["refused"]


def test_a_full_disk_keeps_nobody_from_acting(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path / "gone")
    report.event("boost", "more")
    report.state({"budget_w": 1})
    assert "power: more" in capfd.readouterr().err


def paces(directory: Path) -> dict[str, Any]:
    path = jobs.paces_note(directory)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def test_rank_zero_is_told_of_slow_replicas_only_when_something_changes(tmp_path: Path) -> None:
    telling = Telling(tmp_path, Report(tmp_path))
    telling.times({0: 1.0, 1: 1.0})
    assert paces(tmp_path) == {}, "nobody is slow, and nobody was"
    telling.times({0: 1.0, 1: 1.25})
    assert paces(tmp_path) == {"serial": 1, "relative_time": {"1": 1.25}}
    telling.times({0: 1.0, 1: 1.2505})
    assert paces(tmp_path)["serial"] == 1
    telling.times({0: 1.0, 1: 1.26})
    assert paces(tmp_path) == {"serial": 2, "relative_time": {"1": 1.26}}
    telling.times({0: 1.0, 1: 1.0})
    assert paces(tmp_path) == {"serial": 3, "relative_time": {}}, "it keeps pace again"


def test_a_number_that_gets_another_digit_is_not_told_again(tmp_path: Path) -> None:
    report = Report(tmp_path)
    for percent in (9, 9, 10, 10, 9, 9, 10, 10):
        report.notes((f"replica 1: at equal samples its step takes {percent} % longer",), {1: float(percent)})
    assert kinds(tmp_path) == ["note"]
