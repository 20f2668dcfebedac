"""A job of the loop without ranks: what they would note is noted here, and looks are taken one by one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_ntp.launch import jobs
from lightning_ntp.launch.progress import Sample
from lightning_ntp.nvml.readings import Reading
from lightning_ntp.power.loop import PowerSettings
from lightning_ntp.power.loop.job import PowerJob
from lightning_ntp.power.loop.places import Places
from tests.nvml.mock import MockNvml

START_W = 185.0
SLOTS = (0, 1, 2, 3)


class Looks:
    """Two replicas of two GPUs each, on the stand-in for the driver.

    Args:
        nvml: With four GPUs.
        directory: Of the job.
        settings: Of the loop.
    """

    def __init__(self, nvml: MockNvml, directory: Path, **settings: Any) -> None:
        self.nvml, self.directory = nvml, directory
        directory.mkdir(exist_ok=True)
        self.gpus = [nvml.get("uuid", gpu) for gpu in SLOTS]
        for gpu in SLOTS:
            limits = {"power_limit": int(START_W * 1000), "power_min_limit": 100_000, "power_max_limit": 700_000}
            nvml.set(gpu, **limits)
        self.alive = set(SLOTS)
        self.unread: set[int] = set()
        """Slots whose GPU says nothing."""
        self.draws_w = dict.fromkeys(SLOTS, 180.0)
        self.shown = {slot: Sample() for slot in SLOTS}
        self.job = PowerJob(
            PowerSettings(**{"ceiling": "maximum", "interval": 0.1, **settings}),
            directory,
            Places(directory, len(SLOTS), tuple(self.gpus)),
            lambda: set(self.alive),
            self._readings,
        )
        self.job._paces._read = self.shown.get
        self.work()

    def work(self, planned: Mapping[int, float] | None = None, samples: Mapping[int, int] | None = None) -> None:
        """What rank 0 says."""
        replicas = [[slot for slot in half if slot in self.alive] for half in ((0, 1), (2, 3))]
        layout = [dict(enumerate(slots)) for slots in replicas]
        jobs.write_whole(jobs.layout_note(self.directory), json.dumps({"replicas": layout}))
        planned = planned or {r: 2.0 / len(slots) for r, slots in enumerate(replicas) if slots}
        degrees = {r: len(slots) for r, slots in enumerate(replicas) if slots}
        shares = samples or dict.fromkeys(planned, 8)
        note = {"training": True, "planned": planned, "degrees": degrees, "samples": shares}
        jobs.write_whole(jobs.work_note(self.directory), json.dumps(note))

    def idle(self) -> None:
        """No fit is running."""
        jobs.write_whole(jobs.work_note(self.directory), json.dumps({"training": False}))

    def lose(self, slot: int, draws_w: float = 80.0) -> None:
        """Its rank has ended."""
        self.alive.discard(slot)
        self.draws_w[slot] = draws_w
        self.work()

    def compute(self, seconds: Mapping[int, float], micro_batches: int = 3) -> None:
        """So many micro-batches of every replica, each of which takes so long."""
        for slot in self.alive:
            before = self.shown[slot]
            self.shown[slot] = replace(
                before,
                computed_ns=before.computed_ns + round(micro_batches * seconds[slot // 2] * 1e9),
                micro_batches=before.micro_batches + micro_batches,
            )

    def look(self, times: int = 1, seconds: Mapping[int, float] | None = None) -> None:
        """Look so many times."""
        for _ in range(times):
            if seconds is not None:
                self.compute(seconds)
            self.job.look(lambda: True)

    @property
    def limits(self) -> list[float]:
        return [self.nvml.get("power_limit", gpu) / 1000 for gpu in SLOTS]

    def told(self) -> list[str]:
        """What was said so far."""
        path = jobs.power_log(self.directory)
        return [json.loads(line)["text"] for line in path.read_text().splitlines()] if path.exists() else []

    def relative_times(self) -> dict[str, float]:
        """What rank 0 is told."""
        path = jobs.paces_note(self.directory)
        found: dict[str, float] = json.loads(path.read_text())["relative_time"] if path.exists() else {}
        return found

    def _readings(self) -> dict[str, Reading]:
        now = time.monotonic()
        return {
            self.gpus[slot]: Reading(
                self.gpus[slot],
                now,
                {
                    "power_limit_set_w": self.nvml.get("power_limit", slot) / 1000,
                    "power_w": self.draws_w[slot],
                    "temperature_margin_c": 40.0,
                },
            )
            for slot in SLOTS
            if slot not in self.unread
        }
