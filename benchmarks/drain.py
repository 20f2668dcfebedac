"""What a planned change costs the step in which it happens: a slot leaves, or a dead one comes back.

    python benchmarks/drain.py [--quick] [--jobs 5]

A slot of 2x2 leaves. A step waits a fixed time, as if a device computed, so that a core is left for what travels beside
it. Jobs alternate: as the package does it, and with the same state moved at once while the training waits; in a third
kind the slot is killed, started again, and joins. The step of the move (with what is between it and the step before)
against the median of its ten neighbours; aim: at most 1.10. Bytes over the wire against the lower bound: the leaving
slot's units, or what the slot holds that comes back. Needs Linux.
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
from _recovery_bytes import bounds, cut_tensors, shard_bytes
from _recovery_jobs import run_job
from _recovery_marks import read_marks
from _turns import Quartiles

AIM = 1.10
AT, AROUND = 12, 5
"""The step after which a slot is asked to leave, or dies, and neighbours on each side."""
BACK, SET_UP = "comes back", 40
"""A slot that was killed; how many steps it may take until it is ready, and what follows."""


@dataclass(frozen=True)
class Move:
    """One planned change.

    Args:
        step: An undisturbed step, median of the neighbours; seconds.
        worst: The longest of the two steps in which something is prepared, moved or changed.
        longest: The longest of the neighbours: what this machine's noise does to a step.
        moved: Bytes over the wire.
        seconds: Phases, of the slowest rank each.
    """

    step: float
    worst: float
    longest: float
    moved: int
    seconds: dict[str, float]


def run(slot: int, how: str) -> Move:
    """One job, in which ``slot`` leaves or comes back."""
    script = [sys.executable, str(Path(__file__).with_name("_drain_ntp.py"))]
    with tempfile.TemporaryDirectory(prefix="drain-") as name:
        steps = AT + 2 + AROUND + 3 if how != BACK else AT + SET_UP
        run_job([*script, name, str(steps), f"{slot}:{AT}", how], Path(name), limit=180)
        marks = read_marks(Path(name))
    ends: dict[int, float] = {}
    for mark in marks:
        if mark["kind"] == "step":
            ends[mark["step"]] = max(ends.get(mark["step"], 0.0), mark["at"])
    took = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends}
    changes = [mark for mark in marks if mark["kind"] == "change" and mark["joined"] == (how == BACK)]
    # told in the vote of a step, made in the next one; a blocking move waits between the two
    told = changes[0]["step"]
    moving = (told, told + 1)
    assert all(mark["step"] == told for mark in changes), changes
    assert how == BACK or told == AT + 1, changes
    around = [took[step] for step in range(told - AROUND, told + 2 + AROUND) if step in took and step not in moving]
    assert len(around) > AROUND, f"the slot came back in step {told}, too late to compare it with what follows"
    phases = {key for mark in changes for key in mark["seconds"]}
    seconds = {key: max(mark["seconds"].get(key, 0.0) for mark in changes) for key in phases}
    worst = max(took[step] for step in moving)
    return Move(statistics.median(around), worst, max(around), changes[0]["bytes"], seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one job of each: shows that the benchmark works, no more")
    parser.add_argument("--jobs", type=int, default=5, help="of each")
    arguments = parser.parse_args()
    jobs, began = 1 if arguments.quick else arguments.jobs, time.monotonic()
    found: dict[str, list[Move]] = {"planned": [], "blocking": [], BACK: []}
    for job in range(jobs):
        for how in found:
            found[how].append(run(1 + job % 3, how))
    least = bounds(cut_tensors(DEGREES[0]), DEGREES[0]).first
    print(
        f"one slot of {DEGREES} leaves or comes back; steps wait {1e3 * COMPUTE_SECONDS:.0f} ms and compute little;"
        f" {len(os.sched_getaffinity(0))} cores; {jobs} jobs of each, alternating; median [quartiles]\n"
    )
    print(f"{'':<36}{'planned':>24}{'moved at once':>24}{'comes back':>24}")
    for title, of in (
        ("an undisturbed step, ms", lambda each: 1e3 * each.step),
        ("the step of the move, ms", lambda each: 1e3 * each.worst),
        ("the step of the move / its neighbours", lambda each: each.worst / each.step),
        ("the longest of them / their median", lambda each: each.longest / each.step),
        *((f"  {phase}, ms", lambda each, p=phase: 1e3 * each.seconds.get(p, 0.0)) for phase in PHASES),
    ):
        cells = [_cell([of(each) for each in found[how]]) for how in found]
        print(f"{title:<36}" + "".join(f"{cell:>24}" for cell in cells))
    moved = [each.moved for how in ("planned", "blocking") for each in found[how]]
    step = statistics.median(each.step for each in found["planned"])
    for how, what in (("planned", "leaves"), (BACK, "comes back")):
        ratio = statistics.median(each.worst / each.step for each in found[how])
        print(f"\na slot {what}: {ratio:.2f} of its neighbours (aim: at most {AIM:.2f}, {_met(ratio <= AIM)})", end="")
    print(f"\nbytes of a leave {moved[0] / 1e6:.3f} MB, lower bound {least / 1e6:.3f} MB: {max(moved) / least:.3f}")
    back = max(each.moved for each in found[BACK])
    whole = shard_bytes(cut_tensors(DEGREES[0]), DEGREES[0])
    print(f"bytes of a return {back / 1e6:.3f} MB, what the slot holds {whole / 1e6:.3f} MB: {back / whole:.3f}")
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
