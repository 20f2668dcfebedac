"""What it costs to watch GPUs, and how soon a sick one leaves.

    python benchmarks/health.py [--quick]

First the processor time of the process that asks the driver about eight GPUs, and of who listens to it. Then training
at 2x2, watched and not, in alternating jobs of one run: the step, what the callback's hooks take of it in the slowest
rank, and the time from an XID in the driver until the leave of its slot is announced, and made. Steps wait 200 ms, as if
a device computed. The driver is the tests' mock (``tests/nvml/src``), which answers at once: what a real one takes comes
on top, in the process that asks. Aims: hooks below 0.5 % of a step; announced within two steps, or 1 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _recovery_jobs import run_job
from _recovery_marks import read_marks
from _turns import Quartiles

from lightning_ntp.health.findings import WatchedJob
from lightning_ntp.launch.lifeline import children_of
from lightning_ntp.nvml import NvmlSource
from tests.nvml.mock import MockNvml, build_library

GPUS = 8
XIDS = 20
LIMIT = 0.05
AIM_SHARE, AIM_STEPS, AIM_SECONDS = 0.005, 2, 1.0
WARM, STEPS, SLOT = 5, 40, 3
_HOUR = 3600.0


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(mock: MockNvml, seconds: float, interval: float) -> tuple[float, float, list[float]]:
    """Watch for so long: processor seconds per second of who asks and of who listens; from XIDs to findings, in s."""
    devices = {gpu: mock.get("uuid", gpu) for gpu in range(GPUS)}
    over = False
    source = NvmlSource(interval)
    findings = source(WatchedJob(Path(), lambda: devices, lambda: list(devices), lambda: over))
    while len(source.readings) < GPUS:  # starting is not what is measured
        next(findings)
    (child,) = children_of(os.getpid())
    begun, ours, theirs = time.monotonic(), time.process_time(), processor_seconds(child)
    while (passed := time.monotonic() - begun) < seconds:
        next(findings)
    ours, theirs = (time.process_time() - ours) / passed, (processor_seconds(child) - theirs) / passed
    delays = []
    for number in range(XIDS):
        mock.push_xid(number % GPUS, 1000 + number)
        pushed = time.monotonic()
        while next(findings).code != 1000 + number:
            pass
        delays.append(time.monotonic() - pushed)
    over = True
    for _ in findings:
        pass
    return theirs, ours, delays


@dataclass(frozen=True)
class Job:
    """One training job.

    Args:
        step: Median, s.
        hooks: What the callback's hooks take of a step in the slowest rank, s; 0 if nobody watches.
        announced, made: From the XID until the leave was announced, and until it was made, s; 0 if nobody left.
        steps: Between the step before which the XID came and the one in which the leave was announced.
    """

    step: float
    hooks: float
    announced: float
    made: float
    steps: int


def train(watched: bool, steps: int) -> Job:
    """One job; watched, a slot leaves near its end."""
    at = steps - 10 if watched else -1
    script = [sys.executable, str(Path(__file__).with_name("_health_ntp.py"))]
    with tempfile.TemporaryDirectory(prefix="health-") as name:
        run_job([*script, name, str(steps), f"{SLOT}:{at}", "watched" if watched else "alone"], Path(name), limit=180)
        marks = read_marks(Path(name))
    ends: dict[int, float] = {}
    for mark in (mark for mark in marks if mark["kind"] == "step"):
        ends[mark["step"]] = max(ends.get(mark["step"], 0.0), mark["at"])
    last = at if watched else steps
    took = [ends[step] - ends[step - 1] for step in range(WARM, last) if step - 1 in ends]
    hooks = max((m["hooks"] for m in marks if m["kind"] == "step" and m["step"] == last), default=0.0) / max(1, last)
    if not watched:
        return Job(statistics.median(took), 0.0, 0.0, 0.0, 0)
    (sickens,) = (mark for mark in marks if mark["kind"] == "sickens")
    announced = min((mark for mark in marks if mark["kind"] == "announced"), key=lambda mark: float(mark["at"]))
    made = max(mark["at"] for mark in marks if mark["kind"] == "change")
    since = float(sickens["at"])
    between = int(announced["step"]) - int(sickens["step"])
    return Job(statistics.median(took), hooks, float(announced["at"]) - since, made - since, between)


def compare(jobs: int, steps: int) -> bool:
    """Print the training table. Returns whether the aims are met."""
    pairs = [(train(True, steps), train(False, steps)) for _ in range(jobs)]
    watched = [pair[0] for pair in pairs]
    rows: list[tuple[str, list[float], float]] = [
        ("a step alone, ms", [b.step for _, b in pairs], 1e3),
        ("a step watched, ms", [a.step for a in watched], 1e3),
        ("watched / alone", [a.step / b.step for a, b in pairs], 1.0),
        ("hooks of the slowest rank, % of a step", [a.hooks / a.step for a in watched], 1e2),
        ("from XID to the announced leave, s", [a.announced for a in watched], 1.0),
        ("  steps", [float(a.steps) for a in watched], 1.0),
        ("  to the leave itself, s", [a.made for a in watched], 1.0),
    ]
    print(f"\n2x2, {jobs} jobs of {steps} steps of each kind, alternating; median [quartiles]")
    for title, values, unit in rows:
        q = Quartiles.of([unit * value for value in values])
        print(f"{title:<40} {q.median:8.3f} [{q.low:.3f}, {q.high:.3f}]")
    cheap = statistics.median(a.hooks / a.step for a in watched) < AIM_SHARE
    soon = all(a.steps <= AIM_STEPS or a.announced <= AIM_SECONDS for a in watched)
    print(f"hooks below {AIM_SHARE:.1%} of a step: {'met' if cheap else 'MISSED'}")
    print(f"announced within {AIM_STEPS} steps or {AIM_SECONDS:g} s: {'met' if soon else 'MISSED'}")
    return cheap and soon


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair of jobs: shows that it works, no more")
    parser.add_argument("--seconds", type=float, default=30.0, help="to measure the processes")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks at a GPU")
    parser.add_argument("--jobs", type=int, default=5, help="of each kind")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.jobs = min(options.seconds, 5.0), 1
    with tempfile.TemporaryDirectory() as directory:
        mock = MockNvml(build_library(Path(directory)), Path(directory) / "state", GPUS)
        os.environ.update(mock.variables())
        theirs, ours, delays = watch(mock, options.seconds, options.interval)
        print(f"{GPUS} GPUs, a look every {options.interval:g} s, for {options.seconds:g} s")
        print(f"the process that asks   {theirs * _HOUR:7.1f} s of a processor an hour ({theirs:.2%})")
        print(f"who listens to it       {ours * _HOUR:7.1f} s of a processor an hour ({ours:.2%})")
        median, longest = statistics.median(delays) * 1000, max(delays) * 1000
        print(f"from XID to finding     {median:7.1f} ms (median), {longest:.1f} ms (longest)")
        met = compare(options.jobs, STEPS)
        mock.close()
    return int(theirs >= LIMIT or not met)


if __name__ == "__main__":
    sys.exit(main())
