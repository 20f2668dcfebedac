"""The jobs that run on this machine, for commands in another terminal: a small file in every job's directory."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "lightning_ntp-"
"""Of a job's directory, which lies where temporary files do."""
_FILE = "ranks.json"


@dataclass(frozen=True)
class RunningJob:
    """A job, as its supervisor describes it.

    Args:
        name: Its id.
        supervisor: Process id of the launching process.
        ranks: How many slots it was launched with.
        pids: Slot -> process id of the ranks that live.
        directory: Its directory.
    """

    name: str
    supervisor: int
    ranks: int
    pids: Mapping[int, int]
    directory: Path


def publish(directory: Path, name: str, ranks: int, pids: Mapping[int, int]) -> None:
    """Say who runs. Called by the supervisor, whenever a rank has started or ended."""
    content = json.dumps({"job": name, "supervisor": os.getpid(), "ranks": ranks, "pids": dict(pids)})
    write_whole(directory / _FILE, content)


def running_jobs() -> list[RunningJob]:
    """The jobs of this user whose supervisor lives."""
    found = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_FILE}")):
        try:
            told = json.loads(path.read_text())
            os.kill(told["supervisor"], 0)
        except (OSError, ValueError, KeyError):  # it has ended, or is somebody else's
            continue
        pids = {int(slot): int(pid) for slot, pid in told["pids"].items()}
        found.append(RunningJob(str(told["job"]), int(told["supervisor"]), int(told["ranks"]), pids, path.parent))
    return found


def leave_reason(directory: Path, slot: int) -> Path:
    """The file in which somebody says why a slot is to leave, before it is told to."""
    return directory / f"drain-{slot}"


def relayout_demand(directory: Path) -> Path:
    """The file by which somebody demands that slots go back to their places. Rank 0 takes it away."""
    return directory / "relayout"


def restart_demand(directory: Path, slot: int) -> Path:
    """The file by which somebody demands that a slot is started again. The supervisor takes it away."""
    return directory / f"restart-{slot}"


def device_note(directory: Path, slot: int) -> Path:
    """The file in which a rank says on which device it works, by UUID."""
    return directory / f"device-{slot}"


def unwell_note(directory: Path, slot: int) -> Path:
    """The file in which the launching process tells a rank that it shall leave, because its device is not healthy."""
    return directory / f"unwell-{slot}"


def stays_note(directory: Path, slot: int) -> Path:
    """The rank's answer to :func:`unwell_note`, if it cannot leave: why not."""
    return directory / f"stays-{slot}"


def layout_note(directory: Path) -> Path:
    """The file in which rank 0 says who works where, as one JSON object: ``replicas``, the slots of each by index."""
    return directory / "layout.json"


def health_log(directory: Path) -> Path:
    """All verdicts about the health of devices so far: one JSON object per line."""
    return directory / "health.jsonl"


def health_state(directory: Path) -> Path:
    """The health of all slots at this moment, as one JSON object."""
    return directory / "health.json"


def power_log(directory: Path) -> Path:
    """What was done about power so far: one JSON object per line."""
    return directory / "power.jsonl"


def power_state(directory: Path) -> Path:
    """Power and pace of all replicas at this moment, as one JSON object."""
    return directory / "power.json"


def paces_note(directory: Path) -> Path:
    """The file in which the launching process says how slow replicas are, as one JSON object: rank 0 moves samples."""
    return directory / "paces.json"


def work_note(directory: Path) -> Path:
    """The file in which rank 0 says what there is to compute, as one JSON object.

    ``planned``: replica -> compute time at its degree over that at the full one; ``degrees``: replica -> that degree;
    ``samples``: replica -> samples of a micro-batch; ``tokens``: of a step, 0 if nobody has said it; ``training``:
    whether a fit is running.
    """
    return directory / "work.json"


def write_whole(path: Path, content: str) -> None:
    """Write a file that others read at any time: they find all of it, or what was there before."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(content, encoding="utf-8")
    new.replace(path)
