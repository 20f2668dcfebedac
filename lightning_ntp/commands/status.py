"""``lightning-ntp status``: who works where in a running job, how healthy its devices are, and what happened last."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_ntp.commands.jobs import add_job, chosen_job
from lightning_ntp.launch import jobs
from lightning_ntp.launch.events_file import FILE_NAME, read_events
from lightning_ntp.launch.jobs import RunningJob
from lightning_ntp.launch.progress import IN_WORDS, ProgressReader, run_directory_path

_MEASURED = ("temperature_c", "power_w", "sm_clock_mhz")
"""Values that have a column of their own, if a device gives them."""


@dataclass
class Slot:
    """One slot of a job.

    Args:
        slot: Its number.
        replica, index: Where it works; -1 if it does not.
        pid: Of its process; 0 if there is none.
        doing: What it does, in words.
        device: UUID; empty if it is not known.
        health: ``ok``, ``suspect``, ``drain`` or ``dead``; ``unknown`` if the driver has said nothing of its device;
            empty if nobody watches.
        wrong: What is wrong with its device.
        values: What was measured last.
    """

    slot: int
    replica: int
    index: int
    pid: int
    doing: str
    device: str
    health: str
    wrong: list[str]
    values: Mapping[str, float]


@dataclass
class Status:
    """A running job."""

    job: str
    supervisor: int
    degrees: list[int]
    slots: list[Slot]
    directory: str
    """Of its run."""
    events: list[dict[str, Any]]
    """The newest ones."""
    power: dict[str, Any]
    """By replica, of a job with a PowerManager."""


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-ntp status`` with ``args`` (default: the process's arguments after the subcommand).

    Raises:
        SystemExit: With status 2 and one line that says what is wrong.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    if options.events < 0:
        parser.error(f"--events {options.events}: give how many of the newest events to show, 0 for none")
    status = look(chosen_job(parser, options.job), options.events)
    print(json.dumps(asdict(status), indent=2) if options.json else "\n".join(describe(status)))


def look(job: RunningJob, events: int) -> Status:
    """What a job says of itself at this moment."""
    layout = _read(jobs.layout_note(job.directory)).get("replicas", [])
    health = _read(jobs.health_state(job.directory))
    place = {slot: (r, int(i)) for r, replica in enumerate(layout) for i, slot in replica.items()}
    slots = [_slot(job, slot, place.get(slot, (-1, -1)), health.get(str(slot), {})) for slot in range(job.ranks)]
    directory = next((found for slot in slots if (found := _run_directory(job, slot.slot))), "")
    newest: deque[dict[str, Any]] = deque(maxlen=events)
    path = Path(directory) / FILE_NAME
    if directory and path.exists():
        newest.extend(read_events(path))
    power = _read(jobs.power_state(job.directory)).get("replicas", {})
    return Status(job.name, job.supervisor, [len(each) for each in layout], slots, directory, list(newest), power)


def describe(status: Status) -> list[str]:
    """A status, in lines for people."""
    degrees = f"degrees ({', '.join(map(str, status.degrees))})" if status.degrees else "its ranks are starting"
    lines = [f"job {status.job} (pid {status.supervisor}): {degrees}", ""]
    measured = [name for name in _MEASURED if any(name in slot.values for slot in status.slots)]
    head = ["slot", "replica", "index", "pid", *measured, "health", "doing"]
    rows = [
        [
            str(slot.slot),
            *(str(number) if number >= 0 else "-" for number in (slot.replica, slot.index)),
            str(slot.pid or "-"),
            *(f"{slot.values[name]:.0f}" if name in slot.values else "-" for name in measured),
            slot.health or "-",
            slot.doing,
        ]
        for slot in status.slots
    ]
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    for slot in status.slots:
        lines += [f"slot {slot.slot}: {wrong}" for wrong in slot.wrong]
    lines += [_power_line(replica, each) for replica, each in status.power.items()]
    if not any(slot.health for slot in status.slots):
        lines.append("the health of devices is not watched: add lightning_ntp.callbacks.HealthMonitor")
    if status.events:
        lines += ["", f"newest events ({Path(status.directory) / FILE_NAME}):", *map(_event_line, status.events)]
    return lines


def _slot(job: RunningJob, slot: int, place: tuple[int, int], health: Mapping[str, Any]) -> Slot:
    pid = job.pids.get(slot, 0)
    reader = ProgressReader(job.directory, slot)
    sample = reader.read() if pid else None
    reader.close()
    doing = "gone" if not pid else "starting" if sample is None else IN_WORDS[sample.tag]
    if pid and place == (-1, -1) and sample is not None:
        doing = "waits for a place"
    if sample is not None and sample.left:
        doing = "leaves"
    elif sample is not None and sample.waiting:
        doing += ", waiting for others"
    worst = str(health.get("worst", ""))
    if worst in ("ignore", "log"):
        worst = "ok" if health.get("seen", True) else "unknown"
    return Slot(
        slot,
        *(place if pid else (-1, -1)),
        pid,
        doing,
        str(health.get("gpu", "")),
        worst,
        list(health.get("wrong", [])),
        dict(health.get("values", {})),
    )


def _run_directory(job: RunningJob, slot: int) -> str:
    try:
        return run_directory_path(job.directory, slot).read_text(encoding="utf-8")
    except OSError:
        return ""


def _event_line(event: Mapping[str, Any]) -> str:
    try:
        when = datetime.fromisoformat(str(event.get("time"))).astimezone().strftime("%H:%M:%S")
    except ValueError:
        when = "--:--:--"
    step = "" if event.get("step") is None else f" step {event['step']}"
    if event.get("event") == "power":
        return f"  {when}{step} power: {event.get('text')}"
    fixed = ("time", "monotonic", "event", "slot", "step", "seconds", "values", "sources")
    more = [f"{key} {value}" for key, value in event.items() if key not in fixed and value not in ("", None, [])]
    return f"  {when}{step} {event.get('event')} slot {event.get('slot')}{': ' if more else ''}{', '.join(more)}"


def _power_line(replica: str, state: Mapping[str, Any]) -> str:
    parts = []
    if state.get("watts") is not None:
        parts.append(f"draws {state['watts']:.0f} W")
    if state.get("limit_w") is not None:
        parts.append(f"limits of {state['limit_w']:.0f} W ({state['start_w']:.0f} W at start)")
    if state.get("compute_s") is not None:
        parts.append(f"computes {1e3 * state['compute_s']:.0f} ms per micro-batch")
    if state.get("samples") is not None:
        parts.append(f"of {state['samples']} samples")
    return f"replica {replica}: {', '.join(parts) or 'not measured yet'}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ntp status",
        description="Show a running job of this machine: slots, degrees, the health of devices, the newest events.",
    )
    add_job(parser)
    parser.add_argument("--events", type=int, default=8, metavar="N", help="how many of the newest events (default 8)")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    return parser
