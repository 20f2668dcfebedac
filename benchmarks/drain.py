"""What a planned leave costs the step in which it happens.

    python benchmarks/drain.py [--quick] [--jobs 5]

A slot of 2x2 leaves. A step waits a fixed time, as if a device computed, so that a core is left for what travels beside
it. Jobs alternate: as the package does it, and with the same state moved at once while the training waits. The step of
the move (with what is between it and the step before) against the median of its ten neighbours; aim: at most 1.10.
Bytes over the wire against the lower bound, the leaving slot's units. Needs Linux.
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

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _drain_ntp import COMPUTE_SECONDS, DEGREES
from _recovery_bytes import bounds, cut_tensors
from _recovery_jobs import run_job
from _recovery_marks import read_marks
from _turns import Quartiles

AIM = 1.10
AT, AROUND = 12, 5
"""The step after which a slot is asked to leave, and neighbours on each side."""


@dataclass(frozen=True)
class Leave:
    """One planned leave.

    Args:
        step: An undisturbed step, median of the neighbours; seconds.
        worst: The longest of the two steps in which something is prepared, moved or changed.
        moved: Bytes over the wire.
        seconds: Phases, of the slowest rank each.
    """

    step: float
    worst: float
    moved: int
    seconds: dict[str, float]


def run(slot: int, how: str) -> Leave:
    """One job, in which ``slot`` leaves."""
    script = [sys.executable, str(Path(__file__).with_name("_drain_ntp.py"))]
    with tempfile.TemporaryDirectory(prefix="drain-") as name:
        run_job([*script, name, str(AT + 2 + AROUND + 3), f"{slot}:{AT}", how], Path(name), limit=180)
        marks = read_marks(Path(name))
    ends: dict[int, float] = {}
    for mark in marks:
        if mark["kind"] == "step":
            ends[mark["step"]] = max(ends.get(mark["step"], 0.0), mark["at"])
    took = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends}
    changes = [mark for mark in marks if mark["kind"] == "change"]
    # asked for after step AT, told in the vote of AT + 1, made in AT + 2; a blocking move waits at the end of AT + 1
    moving = (AT + 1, AT + 2)
    assert all(mark["step"] == AT + 1 for mark in changes) and changes, changes
    around = [took[step] for step in range(AT + 1 - AROUND, AT + 3 + AROUND) if step in took and step not in moving]
    phases = {key for mark in changes for key in mark["seconds"]}
    seconds = {key: max(mark["seconds"].get(key, 0.0) for mark in changes) for key in phases}
    return Leave(statistics.median(around), max(took[step] for step in moving), changes[0]["bytes"], seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one job of each: shows that the benchmark works, no more")
    parser.add_argument("--jobs", type=int, default=5, help="of each")
    arguments = parser.parse_args()
    jobs, began = 1 if arguments.quick else arguments.jobs, time.monotonic()
    found: dict[str, list[Leave]] = {"planned": [], "blocking": []}
    for job in range(jobs):
        for how in found:
            found[how].append(run(1 + job % 3, how))
    least = bounds(cut_tensors(DEGREES[0]), DEGREES[0]).first
    print(
        f"one slot of {DEGREES} leaves; steps that wait {1e3 * COMPUTE_SECONDS:.0f} ms and compute little;"
        f" {len(os.sched_getaffinity(0))} cores; {jobs} jobs of each, alternating; median [quartiles]\n"
    )
    print(f"{'':<36}{'planned':>24}{'moved at once':>24}")
    for title, of in (
        ("an undisturbed step, ms", lambda each: 1e3 * each.step),
        ("the step of the move, ms", lambda each: 1e3 * each.worst),
        ("the step of the move / its neighbours", lambda each: each.worst / each.step),
        *((f"  {phase}, ms", lambda each, p=phase: 1e3 * each.seconds.get(p, 0.0)) for phase in PHASES),
    ):
        cells = [_cell([of(each) for each in found[how]]) for how in found]
        print(f"{title:<36}{cells[0]:>24}{cells[1]:>24}")
    moved = [each.moved for leaves in found.values() for each in leaves]
    ratio = statistics.median(each.worst / each.step for each in found["planned"])
    step = statistics.median(each.step for each in found["planned"])
    print(f"\nstep of the move: {ratio:.2f} of its neighbours (aim: at most {AIM:.2f}, {_met(ratio <= AIM)})")
    print(f"bytes moved {moved[0] / 1e6:.3f} MB, lower bound {least / 1e6:.3f} MB: {max(moved) / least:.3f}")
    print(f"beside one step: {moved[0] / 1e6 / step:.1f} MB/s of step")
    print(f"\n{time.monotonic() - began:.0f} s")


PHASES = ("prepare", "travel", "wait", "switch")


def _cell(values: list[float]) -> str:
    q = Quartiles.of(values)
    digits = 3 if q.median < 10 else 0
    return f"{q.median:.{digits}f} [{q.low:.{digits}f}, {q.high:.{digits}f}]"


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


if __name__ == "__main__":
    main()
