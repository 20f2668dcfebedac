"""Runs ``train.py`` on simulated GPUs, and records what they, and the loop that turns their limits, did meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_ntp.launch import jobs
from lightning_ntp.power.files import DIRECTORY_VARIABLE
from tests.nvml.mock import MockNvml, build_library

HERE = Path(__file__).resolve().parent
GPUS = 8
_POLL_SECONDS, _SAMPLE_SECONDS = 0.05, 0.1
_HELD_BACK_SECONDS = 1.5
"""Before a rank starts again the others give back what its GPU has lent: such moments show neither state."""
_SET_LIMIT = "nvmlDeviceSetPowerManagementLimit"


@dataclass(frozen=True)
class Machine:
    """The GPUs.

    Args:
        start_w, minimum_w, maximum_w: Power limits: that of the operator, and the hardware's bounds.
        resistance: How much warmer a watt makes a GPU, degrees C.
        time_constant: Seconds in which temperatures follow power.
        unlike: How unlike the GPUs are in cooling and in power, as a fraction.
    """

    start_w: float = 300.0
    minimum_w: float = 200.0
    maximum_w: float = 700.0
    resistance: float = 0.06
    time_constant: float = 5.0
    unlike: float = 0.01

    def build(self, directory: Path) -> MockNvml:
        """Make them, idle; time goes on from now."""
        mock = MockNvml(build_library(directory), directory / "gpus", GPUS)
        for gpu in range(GPUS):
            limits = {"power_limit": self.start_w, "power_min_limit": self.minimum_w, "power_max_limit": self.maximum_w}
            more = 1 + self.unlike * (gpu % 4 - 1.5) / 1.5
            mock.set(gpu, **{name: int(1000 * watts) for name, watts in limits.items()})
            mock.set(
                gpu,
                time_constant=self.time_constant,
                dynamic_power=620 * more,
                thermal_resistance=self.resistance * more,
            )
        mock.start_model(1.0)
        return mock


@dataclass(frozen=True)
class Moment:
    """What was at one moment; lists are by GPU.

    Args:
        at: Seconds since the start of the job.
        watts, limits_w, temperatures, clocks_mhz, speeds: Of all GPUs, as the driver says.
        live: Slots whose rank lives.
        work: What rank 0 has said that there is to compute; see ``jobs.work_note``.
        replicas: Slots of the replicas.
        state: The loop's; see ``jobs.power_state``.
    """

    at: float
    watts: list[float]
    limits_w: list[float]
    temperatures: list[float]
    clocks_mhz: list[int]
    speeds: list[float]
    live: frozenset[int]
    work: Mapping[str, Any]
    replicas: list[list[int]]
    state: Mapping[str, Any]

    def compute(self, samples: Mapping[int, float] | None = None) -> dict[int, float]:
        """Replica -> its compute time by the model of the GPUs: 1 with equal samples, full degree and highest clocks.

        Args:
            samples: Replica -> how many it has; if not given, as it is.
        """
        planned = {int(replica): time for replica, time in self.work.get("planned", {}).items()}
        present = {int(replica): count for replica, count in self.work.get("samples", {}).items()}
        equal = sum(present.values()) / max(1, len(present))
        return {
            number: (samples or present)[number] / equal * planned[number] / min(self.speeds[slot] for slot in slots)
            for number, slots in enumerate([self.live.intersection(each) for each in self.replicas])
            if slots and number in planned and number in present
        }

    @property
    def best_compute(self) -> float:
        """The shortest step of any split of the samples between the replicas, as :meth:`compute` has it."""
        total = sum(self.work["samples"].values())
        splits = ({0: count, 1: total - count} for count in range(1, total))
        return min(max(self.compute(samples).values()) for samples in splits)


@dataclass
class Recording:
    """A whole job.

    Args:
        moments: In the order of time.
        sums_w: After every write of a limit: the limits of GPUs whose rank lives, and the draw of the others.
        written_w: Every limit that was written.
        limits_at_end: When everything had ended.
        events: Of kind ``power``, as ``events.jsonl`` has them.
        full_step_s: Seconds that a step takes at full degree and highest clock.
    """

    moments: list[Moment] = field(default_factory=list)
    sums_w: list[float] = field(default_factory=list)
    written_w: list[float] = field(default_factory=list)
    limits_at_end: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    full_step_s: float = 0.0

    @property
    def lost_at(self) -> float | None:
        """Seconds until a rank was lost; None if none was."""
        return _first(self.moments, lambda m: m.replicas != [] and len(m.live) < GPUS)

    @property
    def shrunken(self) -> list[Moment]:
        """While both replicas trained, one of them with fewer GPUs, and nobody was about to return."""
        found = [m for m in self.moments if sorted(map(len, m.replicas)) == [GPUS // 2 - 1, GPUS // 2]]
        starts = next((m.at for m in found if len(m.live) == GPUS and m.at > found[0].at + 1), None)
        return [m for m in found if starts is None or m.at < starts - _HELD_BACK_SECONDS]

    @property
    def largest_sum_w(self) -> float:
        """The most that limits (and draws of GPUs without a rank) have added up to: after any write, at any moment."""
        each = (
            sum(m.limits_w[gpu] if gpu in m.live else m.watts[gpu] for gpu in range(GPUS))
            for m in self.moments
            if len(m.live) >= GPUS - 1
        )
        return max(*self.sums_w, *each, 0.0)

    @property
    def back_at(self) -> float | None:
        """Seconds until it trained with all again; None if it did not."""
        lost = self.lost_at
        full = [m.at for m in self.moments if sum(map(len, m.replicas)) == GPUS == len(m.live)]
        return None if lost is None else next((at for at in full if at > lost), None)

    def looks(self, moments: Sequence[Moment]) -> list[Moment]:
        """One moment for each interval of the loop: the first in which its state is known."""
        found: dict[float, Moment] = {}
        for moment in moments:
            if moment.state:
                found.setdefault(moment.state["monotonic"], moment)
        return list(found.values())


def _first(moments: Sequence[Moment], when: Callable[[Moment], bool]) -> float | None:
    return next((moment.at for moment in moments if when(moment)), None)


class Recorder:
    """Looks at GPUs and job.

    Args:
        mock: The GPUs.
        supervisor: Process id of the launching process.
    """

    def __init__(self, mock: MockNvml, supervisor: int, start_w: float) -> None:
        self._mock, self._supervisor, self._began = mock, supervisor, time.monotonic()
        self.recording = Recording()
        self._directory: Path | None = None
        self._written, self._sampled = 0, 0.0
        self._limits = [start_w] * GPUS
        self._live: frozenset[int] = frozenset()

    def look(self) -> None:
        """Take in what is new. To be called all the time."""
        history = self._mock.history()[self._written :]  # before the ranks: who has started since is no owner yet
        before, self._live = self._live, self._find_live()
        for slot in before - self._live:
            self._mock.set(slot, load=0.0)  # the GPU of a rank that was killed
        draws = [self._mock.get("power_usage", gpu) / 1000 for gpu in range(GPUS)]
        self._written += len(history)
        for write in history:
            if write.call == _SET_LIMIT:
                self._limits[write.gpu] = write.arguments[0] / 1000
                self.recording.written_w.append(self._limits[write.gpu])
                self._add_up(before & self._live, draws)
        if self._live and time.monotonic() - self._sampled >= _SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            self._sample(draws)

    def _add_up(self, working: frozenset[int], draws: list[float]) -> None:
        self.recording.sums_w.append(sum(self._limits[gpu] if gpu in working else draws[gpu] for gpu in range(GPUS)))

    def _find_live(self) -> frozenset[int]:
        for job in jobs.running_jobs():
            if job.supervisor == self._supervisor:
                self._directory = job.directory
                return frozenset(job.pids)
        return frozenset()

    def _sample(self, draws: list[float]) -> None:
        assert self._directory is not None
        mock, gpus = self._mock, range(GPUS)
        replicas = _read(jobs.layout_note(self._directory)).get("replicas", [])
        self.recording.moments.append(
            Moment(
                time.monotonic() - self._began,
                draws,
                [mock.get("power_limit", gpu) / 1000 for gpu in gpus],
                [mock.get("model_temperature", gpu) for gpu in gpus],
                [mock.get("clock_graphics", gpu) for gpu in gpus],
                [mock.speed(gpu) for gpu in gpus],
                self._live,
                _read(jobs.work_note(self._directory)),
                [sorted(each.values()) for each in replicas],
                _read(jobs.power_state(self._directory)),
            )
        )


def record(
    arguments: Sequence[str],
    machine: Machine,
    directory: Path,
    seconds: float = 0.25,
    show: bool = True,
    meanwhile: Callable[[MockNvml, Recording], None] = lambda mock, recording: None,
) -> Recording:
    """Run ``train.py`` on simulated GPUs, and record.

    Args:
        arguments: Of the script.
        machine: The GPUs.
        directory: For the job's files.
        seconds: That a step takes at full degree and highest clock.
        show: Whether what the job prints is shown, rather than kept in ``output.txt``.
        meanwhile: Called many times a second.

    Raises:
        RuntimeError: If the job fails.
    """
    with tempfile.TemporaryDirectory(prefix="simulated-") as name:
        mock = machine.build(Path(name))
        environment = {**mock.environment(), DIRECTORY_VARIABLE: str(Path(name, "journal")), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "train.py"), "--accelerator", "cpu", "--simulated", str(seconds)]
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "output.txt", "wb") as output:
            process = subprocess.Popen(
                [*command, "--output", str(directory), *arguments],
                env=environment,
                stdout=None if show else output,
                stderr=None if show else output,
            )
            recorder = Recorder(mock, process.pid, machine.start_w)
            try:
                while process.poll() is None:
                    recorder.look()
                    meanwhile(mock, recorder.recording)
                    time.sleep(_POLL_SECONDS)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        recorder.look()
        recording = recorder.recording
        recording.full_step_s = seconds
        recording.limits_at_end = [mock.get("power_limit", gpu) / 1000 for gpu in range(GPUS)]
        mock.close()
    if process.returncode:
        told = (directory / "output.txt").read_text(errors="replace")[-4000:]
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}\n{told}")
    for path in sorted(directory.glob("lightning_logs/*/events.jsonl"))[-1:]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        recording.events = [each for each in lines if each["event"] == "power"]
    return recording


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
