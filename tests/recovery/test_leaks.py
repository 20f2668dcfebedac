"""Losses leave nothing behind: no threads, descriptors, memory or shared memory in survivors, and nothing of a job."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_ntp.lightning.callbacks.fault_schedule import STEP_PHASES
from tests.recovery.jobs import PER_REPLICA, Job, Samples, Worlds, assert_returned, run
from tests.recovery.models import Automatic

_SETTLE_SECONDS = 10.0


class Census(Callback):
    """Counts what this process holds after every step; on the way out it waits for what ends in the background."""

    def __init__(self) -> None:
        self.first: dict[str, Any] = {}
        self.memory: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        gc.collect()
        self.memory.append(_resident())
        if trainer.global_step == 2:  # the first two steps check gradients and make the optimizer's state
            self.first = _holdings()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (grown := self.grown()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.left = grown

    def grown(self) -> dict[str, Any]:
        """What there is more of than after the first steps."""
        now = _holdings()
        more: dict[str, Any] = dict(now["threads"] - self.first["threads"])
        if now["descriptors"] > self.first["descriptors"]:
            more["descriptors"] = (self.first["descriptors"], now["descriptors"])
        return more


def _holdings() -> dict[str, Any]:
    return {
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def _resident() -> int:
    """Bytes of this process that are its own."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def _observed(job: Job, directory: str) -> dict[str, Any]:
    from lightning_ntp import NTPStrategy
    from lightning_ntp.callbacks import FaultInjector

    census = Census()
    trainer = Trainer(
        accelerator="cpu",
        devices=sum(job.degrees),
        strategy=NTPStrategy(degrees=job.degrees, timeout=60),
        precision="64-true",
        max_epochs=job.epochs,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            census,
            FaultInjector([{"kind": "kill", "slot": s, "step": k, "phase": p} for s, k, p in job.faults]),
        ],
    )
    torch.manual_seed(1)
    trainer.fit(Automatic(), DataLoader(Samples(job.samples), batch_size=PER_REPLICA, shuffle=True))
    return {"left": census.left, "memory": census.memory, "steps": trainer.global_step}


def _check(world: Worlds, job: Job, directory: Path, timeout: float) -> None:
    before = set(os.listdir("/dev/shm"))
    result = run(world, job, directory, timeout, ranks=_observed)
    assert_returned(result, job.victims)
    for slot, found in result.survivors.items():
        assert found["steps"] == job.batches * job.epochs
        assert not found["left"], f"slot {slot} holds more than before the first loss: {found['left']}"
        memory = found["memory"]
        growth = memory[-1] - memory[len(memory) // 2]
        assert growth < 2**23, f"slot {slot} has grown by {growth / 2**20:.1f} MiB in the second half: {memory}"
    assert set(os.listdir("/dev/shm")) <= before


def test_losses_leave_nothing_in_the_survivors(world: Worlds, tmp_path: Path) -> None:
    faults = ((5, 3, "backward"), (0, 5, "vote"), (3, 7, "update"), (2, 9, "forward"))
    _check(world, Job((2, 2, 2), faults, batches=12, epochs=1), tmp_path, 60)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_twenty_losses_in_one_job(world: Worlds, tmp_path: Path) -> None:
    """Eleven replicas at degree 2: one shrinks and is dropped after the other, until one is left."""
    faults = tuple((slot, 3 + 2 * slot, STEP_PHASES[slot % len(STEP_PHASES)]) for slot in range(20))
    _check(world, Job((2,) * 11, faults, batches=50, epochs=1), tmp_path, 360)


def _script(directory: Path, slot: int, phase: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory / "tmp")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    (directory / "tmp").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("script.py")), str(directory), str(slot), phase],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    degrees = (1, 2) if slot < 2 else (2, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"done: step 8, degrees {degrees}" in done.stdout, done.stdout + done.stderr
    assert f"slot {slot}" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert os.listdir(directory / "tmp") == [], "temporary files are left"


@pytest.mark.chaos
def test_a_job_with_a_loss_leaves_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    _script(tmp_path, 0, "backward")
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_twenty_jobs_with_a_loss_leave_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    for number in range(20):
        _script(tmp_path / str(number), number % 4, STEP_PHASES[number % len(STEP_PHASES)])
    assert set(os.listdir("/dev/shm")) <= before
