"""Training jobs on simulated GPUs: they compute as fast as the stand-in for the driver says, so the loop really closes.

A rank's forward takes as long as its GPU would compute: samples, times the largest share at its replica's degree,
divided by the speed of its GPU in the stand-in's model of power, heat and clocks. What is really computed is a part of
that time.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from examples.power.simulated import SimulatedGpu
from lightning_ntp.launch import RankIdentity, is_rank, jobs
from tests.lightning.rigs import slot
from tests.nvml.mock import Rule
from tests.recovery.jobs import Samples
from tests.recovery.models import Automatic

_BEGUN_BY = 4
"""The step before which all wait until the loop has looked once."""
SAMPLES = 12
"""Of a replica's batch at launch."""


@dataclass(frozen=True)
class Simulation:
    """What is simulated.

    Args:
        sample_s: Seconds per sample at full degree and highest clock.
        dies: (slot, step): killed before that step, the first time.
        power: Settings of the :class:`PowerManager` in the ranks; the launching process has one of its own.
        load: Of the GPUs at work, see the model.
        does: (slot, step, what, arguments): something else that befalls before that step: a method of
            :class:`MockNvml` by its name, ``"forgive"`` its faults, ``"raise"``, or ``"kill helper"``.
    """

    sample_s: float = 0.004
    dies: tuple[tuple[int, int], ...] = ()
    power: dict[str, Any] = field(default_factory=dict)
    load: float = 1.0
    does: tuple[tuple[int, int, str, dict[str, Any]], ...] = ()


class OnSimulatedGpus(SimulatedGpu):
    """Computes as its GPU does, dies as told, and notes at every step what really is.

    Args:
        directory: For the notes.
        simulation: See there.
    """

    ntp_own_attributes = ("_mock", "_dies", "_does", "_file", "_rules")

    def __init__(self, directory: Path, simulation: Simulation) -> None:
        super().__init__(simulation.sample_s, simulation.load)
        joins = is_rank() and RankIdentity.from_environ().joins
        self._dies = set() if joins else {step for who, step in simulation.dies if who == slot()}
        self._does = [] if joins else [each for each in simulation.does if each[0] == slot()]
        self._rules: list[Rule] = []
        self._file = directory / f"steps-{slot()}"

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if is_rank() and RankIdentity.from_environ().joins:  # what it finds when it comes back
            limits = [self.mock.get("power_limit", gpu) / 1000 for gpu in range(self.mock.gpus)]
            self._file.with_name(f"found-{slot()}").write_text(json.dumps(limits))
        super().setup(trainer, pl_module, stage)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> int | None:
        if trainer.global_step == _BEGUN_BY:
            self._wait_for_loop()
        for _, step, what, arguments in self._does:
            if step == trainer.global_step and what == "raise":
                raise RuntimeError("a mistake in the program")
            if step == trainer.global_step and what == "kill helper":
                os.kill(self.mock.history()[-1].pid, signal.SIGKILL)
            elif step == trainer.global_step and what == "forgive":
                while self._rules:
                    self._rules.pop().remove()
            elif step == trainer.global_step:
                found = getattr(self.mock, what)(**arguments)
                self._rules += [found] if isinstance(found, Rule) else []
        if trainer.global_step in self._dies:
            self.mock.set(slot(), load=0.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    @staticmethod
    def _wait_for_loop() -> None:
        """On a busy machine the loop may begin long after the training."""
        directory, deadline = RankIdentity.from_environ().job_dir, time.monotonic() + 30
        assert directory is not None
        while not jobs.power_state(directory).exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        line = {
            "at": time.monotonic(),
            "step": trainer.global_step,
            "degrees": strategy.degrees,
            "shares": {str(r): n for r, n in strategy.sample_shares.items()},
            "speeds": [self.mock.speed(gpu) for gpu in range(self.mock.gpus)],
            "replicas": [sorted(replica.values()) for replica in strategy.topology.replicas],
        }
        with open(self._file, "a") as file:
            file.write(json.dumps(line) + "\n")


class Powered(Automatic):
    """A module that computes on simulated GPUs; ``simulation.json`` in the job's directory says how."""

    def extra_callbacks(self, directory: str) -> list[Callback]:
        from lightning_ntp.callbacks import HealthMonitor, PowerManager

        told = json.loads(Path(directory, "simulation.json").read_text())
        simulation = Simulation(
            **{**told, "dies": tuple(map(tuple, told["dies"])), "does": tuple(map(tuple, told["does"]))}
        )
        # the monitor's part in a rank: it leaves when it is told to
        health = HealthMonitor(nvml=False, gpus=simulation.power["gpus"])
        return [OnSimulatedGpus(Path(directory), simulation), health, PowerManager(**simulation.power)]

    @staticmethod
    def loader(count: int) -> DataLoader[Any]:
        return DataLoader(Samples(count * SAMPLES // 2), batch_size=SAMPLES, shuffle=True)


@dataclass(frozen=True)
class Moment:
    """What really was at the end of a step, as the lowest rank has noted it.

    Args:
        at: Seconds on the monotonic clock.
        step: Steps done.
        degrees: Of the replicas.
        shares: Replica -> samples.
        speeds: Of all GPUs.
        replicas: Slots of the replicas.
    """

    at: float
    step: int
    degrees: tuple[int, ...]
    shares: dict[int, int]
    speeds: list[float]
    replicas: list[list[int]]

    def compute(self, planned: dict[int, float]) -> dict[int, float]:
        """Replica -> relative compute time of the step.

        Args:
            planned: Degree -> compute time over that of the full degree.
        """
        return {
            number: self.shares[number] * planned[len(slots)] / min(self.speeds[each] for each in slots)
            for number, slots in enumerate(self.replicas)
            if slots
        }


def moments(directory: Path) -> list[Moment]:
    """All steps of a job, each as the lowest rank that has completed it has seen it."""
    seen: dict[int, Moment] = {}
    for path in sorted(directory.glob("steps-*")):
        for entry in _lines(path):
            shares = {int(replica): count for replica, count in entry["shares"].items()}
            moment = Moment(
                entry["at"], entry["step"], tuple(entry["degrees"]), shares, entry["speeds"], entry["replicas"]
            )
            seen.setdefault(moment.step, moment)
    return [seen[step] for step in sorted(seen)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)
