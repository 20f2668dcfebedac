"""The callback in a rank, without a job around it."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ntp.callbacks import HealthMonitor
from lightning_ntp.launch import RankIdentity, jobs


class Strategy:
    slot = 0
    root_device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def drain(self, slot: int, reason: str) -> None:
        raise ValueError(f"drain: slot {slot} is needed")

    def record_event(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in RankIdentity(0, 2, "uid", "job", "127.0.0.1", 1, tmp_path, False).to_environ().items():
        monkeypatch.setenv(name, value)
    return SimpleNamespace(strategy=Strategy(), is_global_zero=True, loggers=[], global_step=1, log_every_n_steps=50)


def test_a_verdict_that_a_full_disk_has_cut_off_ends_no_rank(trainer: Any, tmp_path: Path) -> None:
    monitor = HealthMonitor(nvml=False)
    monitor.setup(trainer, Any, "fit")
    entry = json.dumps({"slot": 1, "monotonic": 1.0, "action": "log", "text": "hello"})
    jobs.health_log(tmp_path).write_text(f"{entry[:20]}{entry}\n{entry}\n")
    monitor.on_train_batch_start(trainer, Any, None, 0)
    assert [event["text"] for event in trainer.strategy.events] == ["hello"]


def test_who_was_told_to_stay_is_heard_again_after_the_wish_was_withdrawn(trainer: Any, tmp_path: Path) -> None:
    monitor, answer = HealthMonitor(nvml=False), jobs.stays_note(tmp_path, 0)
    monitor.setup(trainer, Any, "fit")
    for _ in range(2):
        jobs.unwell_note(tmp_path, 0).write_text("maintenance")
        monitor.on_train_batch_start(trainer, Any, None, 0)
        assert answer.read_text() == "slot 0 is needed"
        answer.unlink()
        monitor.on_train_batch_start(trainer, Any, None, 0)
        assert not answer.exists(), "it is answered once"
        jobs.unwell_note(tmp_path, 0).unlink()
        monitor.on_train_batch_start(trainer, Any, None, 0)


def test_an_accumulated_step_is_logged_once(trainer: Any, tmp_path: Path) -> None:
    logged: list[int] = []
    trainer.loggers = [SimpleNamespace(log_metrics=lambda metrics, step: logged.append(step))]
    trainer.log_every_n_steps = 2
    jobs.health_state(tmp_path).write_text(json.dumps({"0": {"worst": "log", "live": True, "values": {}}}))
    monitor = HealthMonitor(nvml=False)
    monitor.setup(trainer, Any, "fit")
    for batch in range(1, 17):
        trainer.global_step = batch // 4
        monitor.on_train_batch_end(trainer, Any, None, None, batch)
    assert logged == [1, 3]


def test_a_second_fit_tells_nothing_again(trainer: Any, tmp_path: Path) -> None:
    entry = {"slot": 1, "monotonic": 1.0, "action": "log"}
    for text in ("first", "second"):
        with open(jobs.health_log(tmp_path), "a") as file:
            file.write(json.dumps({**entry, "text": text}) + "\n")
        monitor = HealthMonitor(nvml=False)
        monitor.setup(trainer, Any, "fit")
        monitor.on_train_batch_start(trainer, Any, None, 0)
    assert [event["text"] for event in trainer.strategy.events] == ["first", "second"]


def test_sources_that_cannot_travel_stay_in_the_launching_process() -> None:
    monitor = HealthMonitor(nvml=False, sources=[lambda job: []])
    monitor.device_watch()
    assert pickle.loads(pickle.dumps(monitor)).sources == () and len(monitor.sources) == 1


def test_a_device_with_two_slots_is_told_once(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_ntp"):
        HealthMonitor(gpus=["GPU-0", "GPU-0"])
    assert not caplog.records, "the launching process says it"


@pytest.mark.parametrize(("arguments", "lines"), [({}, 1), ({"nvml": False}, 0), ({"gpus": ["GPU-0", "GPU-1"]}, 0)])
def test_ranks_on_cpu_have_no_gpu_to_watch(
    trainer: Any, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], lines: int
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_ntp"):
        HealthMonitor(**arguments).setup(trainer, Any, "fit")
    assert [record.getMessage() for record in caplog.records] == [
        "health of GPUs is not watched: the ranks work on cpu; training goes on"
    ] * lines
