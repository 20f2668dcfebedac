"""The watch in the launching process: sources of all kinds, notes for ranks, and what it leaves behind."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from lightning_ntp.commands import status
from lightning_ntp.health import Action, Finding, HealthWatch, Limits, SeverityTable, WatchedJob
from lightning_ntp.launch import jobs
from lightning_ntp.launch.jobs import RunningJob
from lightning_ntp.nvml.readings import Reading

Found = Callable[[WatchedJob], Any]


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Callable[..., HealthWatch]]:
    made: list[HealthWatch] = []

    def watch(*sources: Found, slots: int = 2, limits: Limits | None = None, **options: Any) -> HealthWatch:
        options.setdefault("gpus", [f"GPU-{slot}" for slot in range(slots)])
        made.append(HealthWatch(sources, SeverityTable(), limits, interval=0.02, **options))
        made[-1].check(slots)
        made[-1].begin(tmp_path)
        for slot in range(slots):
            made[-1].started(slot)
        return made[-1]

    yield watch
    for each in made:
        each.close()


def log(directory: Path) -> list[dict[str, Any]]:
    path = jobs.health_log(directory)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def condemned(watch: HealthWatch, slot: int) -> str:
    found: dict[int, str] = {}
    eventually(lambda: found.update(watch.condemned()) or slot in found)
    return found[slot]


def test_a_sick_slot_is_told_to_leave_and_comes_back_when_its_device_is_well(
    watching: Callable[..., HealthWatch], tmp_path: Path
) -> None:
    findings = [Finding("sram_threshold", "errors", gpu="GPU-1")]
    watch = watching(lambda job: [findings.pop()] if findings else [], limits=Limits(quiet=0.05))
    note = jobs.unwell_note(tmp_path, 1)
    eventually(note.exists)
    assert note.read_text() == "sram threshold: errors"
    assert not watch.sent_away(1)
    watch.ended(1)
    assert watch.sent_away(1) and watch.unfit(1) == "sram threshold: errors" and not watch.unfit(0)
    findings.append(Finding("sram_threshold", "gone", gpu="GPU-1", clears=True))
    eventually(lambda: not watch.unfit(1))
    watch.started(1)
    assert not note.exists() and not watch.sent_away(1)


def test_who_cannot_leave_is_told_no_more_once_its_device_is_well(
    watching: Callable[..., HealthWatch], tmp_path: Path
) -> None:
    findings = [Finding("maintenance", "at noon", slot=1)]
    watching(lambda job: [findings.pop()] if findings else [], limits=Limits(quiet=0.05))
    note = jobs.unwell_note(tmp_path, 1)
    eventually(note.exists)
    jobs.write_whole(jobs.stays_note(tmp_path, 1), "it is the last one")
    eventually(lambda: {"slot 1 stays: it is the last one"} & {entry["text"] for entry in log(tmp_path)})
    assert note.exists()
    findings.append(Finding("maintenance", "put off", slot=1, clears=True))
    eventually(lambda: not note.exists())
    findings.append(Finding("maintenance", "after all", slot=1))
    eventually(note.exists)


def test_ranks_say_their_devices_themselves(watching: Callable[..., HealthWatch], tmp_path: Path) -> None:
    seen: list[dict[int, str]] = []
    findings: list[Finding] = []

    def source(job: WatchedJob) -> list[Finding]:
        seen.append(dict(job.devices()))
        return [findings.pop()] if findings else []

    watch = watching(source, gpus=[])
    jobs.write_whole(jobs.device_note(tmp_path, 1), "GPU-a")
    eventually(lambda: seen and seen[-1] == {1: "GPU-a"})
    findings.append(Finding("xid", "off the bus", gpu="GPU-a", code=79))
    assert condemned(watch, 1).startswith("XID 79 (ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS)")


def test_who_is_to_leave_is_named_until_it_has_left(watching: Callable[..., HealthWatch]) -> None:
    findings = [Finding("maintenance", "at noon", slot=0), Finding("xid", "", gpu="GPU-1", code=74)]
    watch = watching(lambda job: [findings.pop()] if findings else [])
    eventually(watch.leaving)
    assert watch.leaving() == {0: "maintenance: at noon"}
    watch.ended(0)
    assert watch.leaving() == {}


def test_who_is_away_until_its_device_has_been_quiet_is_not_called_well(
    watching: Callable[..., HealthWatch], tmp_path: Path
) -> None:
    findings = [Finding("maintenance", "at noon", slot=0)]
    watch = watching(lambda job: [findings.pop()] if findings else [])
    eventually(lambda: jobs.unwell_note(tmp_path, 0).exists())
    watch.ended(0)
    findings.append(Finding("maintenance", "over", slot=0, clears=True))
    wrong = ["its device must show nothing bad for 60 s first"]
    eventually(jobs.health_state(tmp_path).exists)
    eventually(lambda: json.loads(jobs.health_state(tmp_path).read_text())["0"]["wrong"] == wrong)


def test_a_source_that_raises_is_told_once_and_asked_again(
    watching: Callable[..., HealthWatch], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def unlucky(job: WatchedJob) -> list[Finding]:
        calls.append(len(calls))
        if len(calls) < 4:
            raise ConnectionError("no route to\nthe cluster manager")
        return [Finding("external", "hello", slot=0)]

    with caplog.at_level(logging.WARNING, "lightning_ntp"):
        watching(unlucky)
        eventually(lambda: log(tmp_path))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "the health source unlucky has raised ConnectionError: no route to the cluster manager; it is asked again later"
    ]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_source_that_would_end_the_program_is_asked_again(
    watching: Callable[..., HealthWatch], tmp_path: Path, error: BaseException
) -> None:
    errors = [error]

    def ends(job: WatchedJob) -> list[Finding]:
        if errors:
            raise errors.pop()
        return [Finding("external", "hello", slot=0)]

    watching(ends)
    eventually(lambda: log(tmp_path))


def test_what_a_source_has_for_itself_is_not_taken_for_a_drivers(
    watching: Callable[..., HealthWatch], tmp_path: Path
) -> None:
    class Thermometer:
        readings = (20.0, 21.5)

        def check(self) -> bool:
            return True

        def __call__(self, job: WatchedJob) -> list[Finding]:
            return [Finding("external", f"{self.readings[-1]} degrees C", slot=0)]

    watching(Thermometer())
    eventually(lambda: jobs.health_state(tmp_path).exists())
    assert json.loads(jobs.health_state(tmp_path).read_text())["0"]["live"]


@pytest.mark.parametrize("nonsense", [[None], [{"slot": 3}], 7, ["text"]])
def test_a_source_that_yields_nonsense_says_so(
    watching: Callable[..., HealthWatch], caplog: pytest.LogCaptureFixture, nonsense: Any
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_ntp"):
        watching(lambda job: nonsense)
        eventually(lambda: caplog.records)
    assert "has raised TypeError" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"action": "drain"}, "action='drain' is no Action, such as Action.DRAIN"),
        ({"text": None}, "text=None is no text"),
        ({"slot": -1, "gpu": b"GPU-0"}, "gpu=b'GPU-0' is no text"),
        ({"code": "79"}, "TypeError: "),
        ({"values": {"temperature_c": "hot"}}, "ValueError: could not convert"),
    ],
)
def test_a_finding_of_other_kinds_is_an_error_of_its_source_alone(
    watching: Callable[..., HealthWatch], tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: Any, why: str
) -> None:
    given: dict[str, Any] = {"signal": "external", "text": "hello", "slot": 0, **wrong}
    with caplog.at_level(logging.WARNING, "lightning_ntp"):
        watching(lambda job: [Finding(**given)], lambda job: [Finding("external", "I am well", slot=1)])
        eventually(lambda: caplog.records and log(tmp_path))
    assert why in caplog.records[0].getMessage()
    assert {entry["slot"] for entry in log(tmp_path)} == {1}


def test_what_a_source_measures_and_says_can_be_written(watching: Callable[..., HealthWatch], tmp_path: Path) -> None:
    said = Finding("maintenance", "at\nnoon\udc80", slot=0, values={"load": torch.tensor(0.5), "fans": True})
    watching(lambda job: [said])
    eventually(lambda: jobs.unwell_note(tmp_path, 0).exists())
    assert jobs.unwell_note(tmp_path, 0).read_text() == "maintenance: at noon?"
    assert log(tmp_path)[0]["values"] == {"load": 0.5, "fans": 1.0}


def test_a_source_that_blocks_holds_up_neither_the_others_nor_the_end(
    watching: Callable[..., HealthWatch], tmp_path: Path
) -> None:
    released = threading.Event()

    def blocks(job: WatchedJob) -> list[Finding]:
        released.wait()
        return []

    watch = watching(blocks, lambda job: [Finding("external", "hello", slot=0)])
    eventually(lambda: log(tmp_path))
    watch.close()
    names = {thread.name for thread in threading.enumerate()}
    assert "ntp-health" not in names and "ntp-health-blocks" in names
    released.set()
    eventually(lambda: "ntp-health-blocks" not in {thread.name for thread in threading.enumerate()})


def test_a_flood_is_dropped_and_a_flapping_signal_drains_once(
    watching: Callable[..., HealthWatch], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def floods(job: WatchedJob) -> Iterator[Finding]:
        for number in range(2000):
            yield Finding("fabric", f"change {number}", gpu="GPU-0", action=Action.DRAIN, clears=bool(number % 2))
        yield from (Finding("fabric", f"change {number}", gpu="GPU-0") for number in range(100_000))

    with caplog.at_level(logging.WARNING, "lightning_ntp"):
        watching(floods)
        eventually(lambda: any("floods" in record.getMessage() for record in caplog.records))
        eventually(lambda: [entry for entry in log(tmp_path) if entry["action"] == "drain"])
        floor = len(log(tmp_path))
        time.sleep(0.3)  # more of it comes meanwhile
    assert [entry["action"] for entry in log(tmp_path)].count("drain") == 1
    assert floor < 20 and len(log(tmp_path)) < 20
    assert len(caplog.records) == 1, "it is told once"


def test_a_device_of_which_the_driver_has_said_nothing_is_not_called_healthy(
    watching: Callable[..., HealthWatch], tmp_path: Path
) -> None:
    class Driver:
        readings: ClassVar[dict[str, Reading]] = {"GPU-0": Reading("GPU-0", 0.0, {"power_w": 100.0})}

        def check(self, gpus: list[str]) -> None:
            pass

        def find(self, uuids: list[str]) -> list[str]:
            return []

        def __call__(self, job: WatchedJob) -> list[Finding]:
            return []

    watching(Driver())
    eventually(lambda: jobs.health_state(tmp_path).exists())
    job = RunningJob("job", 1, 2, {0: 1, 1: 2}, tmp_path)
    assert [slot.health for slot in status.look(job, 0).slots] == ["ok", "unknown"]


def test_a_list_of_devices_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    watch = HealthWatch([], SeverityTable(), gpus=["GPU-0", "GPU-1"])
    with pytest.raises(ValueError, match="names 2 devices, but the job has 3 slots"):
        watch.check(3)


def test_a_terminal_that_is_gone_keeps_nobody_from_acting(
    watching: Callable[..., HealthWatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    watch = watching(lambda job: [Finding("xid", "", gpu="GPU-0", code=79)])
    assert condemned(watch, 0)
    eventually(lambda: log(tmp_path))


def test_a_job_directory_that_is_gone_hurts_nobody(watching: Callable[..., HealthWatch], tmp_path: Path) -> None:
    asked: list[int] = []

    def source(job: WatchedJob) -> list[Finding]:
        asked.append(0)
        return [Finding("xid", "", gpu="GPU-0", code=79)]

    watch = HealthWatch([source], SeverityTable(), gpus=["GPU-0", "GPU-1"], interval=0.02)
    watch.check(2)
    watch.begin(tmp_path / "gone")
    watch.started(0)
    watch.started(1)
    assert condemned(watch, 0)
    watch.close()
