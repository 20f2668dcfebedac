"""Training jobs whose devices are watched, and sicken at a chosen step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_ntp.health import Finding, WatchedJob
from lightning_ntp.launch import RankIdentity, is_rank, jobs
from tests.lightning.rigs import slot
from tests.nvml.mock import MockNvml
from tests.recovery.models import Automatic

GPUS = [f"GPU-00000000-0000-0000-0000-{number:012d}" for number in range(8)]
"""By slot."""
_PATIENCE_SECONDS = 30.0


class Told:
    """A source that says what lies in a file: one finding a line, as JSON.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, job: WatchedJob) -> Iterator[Finding]:
        read = 0
        while not job.ending():
            lines = self.path.read_text().splitlines() if self.path.exists() else []
            for line in lines[read:]:
                yield Finding(**json.loads(line))
            read = len(lines)
            time.sleep(0.02)


def tell(path: Path, signal: str, text: str = "", **fields: Any) -> None:
    """Say something to a :class:`Told`."""
    with open(path, "a") as file:
        file.write(json.dumps({"signal": signal, "text": text, **fields}) + "\n")


class Strikes(Callback):
    """Does things before chosen steps, and waits before others until the watch has come to verdicts.

    Args:
        path: A JSON list: ``{"step": 2, "slot": 1, "call": "tell", "arguments": {...}}`` or ``{"step": 3, "until":
            ["drain"]}``, which waits until the verdicts so far have all of these; ``"phase": "backward"`` is in the
            middle of the step.
        calls: What can be called, by name.
    """

    ntp_own_attributes = ("_done",)

    def __init__(self, path: Path, calls: dict[str, Callable[..., Any]]) -> None:
        self._strikes: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self._calls = calls
        self._done: set[int] = set()
        if is_rank() and RankIdentity.from_environ().joins:
            self._done = {number for number, strike in enumerate(self._strikes) if "call" in strike}

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._reach("start", trainer.global_step)

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        self._reach("backward", trainer.global_step)

    def _reach(self, phase: str, step: int) -> None:
        for number, strike in enumerate(self._strikes):
            if (strike["step"], strike.get("phase", "start")) != (step, phase) or number in self._done:
                continue
            if "until" in strike:
                self._done.add(number)
                wait_for(strike["until"], strike.get("patience", _PATIENCE_SECONDS), strike.get("code"))
            elif strike["slot"] == slot():
                self._done.add(number)
                self._calls[strike["call"]](*strike.get("values", ()), **strike.get("arguments", {}))


def verdicts(directory: Path | None = None) -> list[dict[str, Any]]:
    """What the watch of this rank's job has said."""
    directory = directory or RankIdentity.from_environ().job_dir
    assert directory is not None
    path = jobs.health_log(directory)
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(actions: Iterable[str], seconds: float, code: int | None = None) -> None:
    """Until there is a verdict of each of these kinds, about this code if one is given."""
    deadline, missing = time.monotonic() + seconds, set(actions)
    while missing:
        missing -= {entry["action"] for entry in verdicts() if code in (None, entry.get("code"))}
        assert time.monotonic() < deadline, f"no verdict {sorted(missing)}: {verdicts()}"
        time.sleep(0.005)


def on_gpu(what: str, gpu: int | None, **arguments: Any) -> None:
    """Let something befall a GPU of the stand-in for the driver, which the test has made."""
    mock = MockNvml.attach()
    try:
        if what == "set":
            mock.set(gpu, **arguments)
        elif what == "fail_all":
            mock.fail_all(arguments["code"], gpu)
        elif what == "flap":
            for number in range(arguments["times"]):
                mock.set(gpu, recovery_action=number % 2)
                time.sleep(0.0005)
        else:
            getattr(mock, what)(**({} if gpu is None else {"gpu": gpu}), **arguments)
    finally:
        mock.close()


def note_status(path: Path) -> None:
    """What `lightning-ntp status` says of this rank's job, once slot 1 is gone: a process takes a moment to end."""
    from lightning_ntp.commands import status

    directory = RankIdentity.from_environ().job_dir
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        (job,) = [each for each in jobs.running_jobs() if each.directory == directory]
        if 1 not in job.pids or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    path.write_text("\n".join(status.describe(status.look(job, 3))))


class Watched(Automatic):
    """A module whose devices sicken as ``strikes.json`` in the job's directory says; in others it is undisturbed."""

    def extra_callbacks(self, directory: str) -> list[Callback]:
        from lightning_ntp.callbacks import HealthMonitor

        calls: dict[str, Callable[..., Any]] = {
            "tell": partial(tell, Path(directory, "told")),
            "gpu": on_gpu,
            "sleep": time.sleep,
            "status": partial(note_status, Path(directory, "status.txt")),
        }
        return [Strikes(Path(directory, "strikes.json"), calls), HealthMonitor(nvml=False, gpus=GPUS[:4])]
