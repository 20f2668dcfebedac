"""What ``redundancy="neighbor"`` costs a single replica of 4, and what a loss costs then.

    python benchmarks/neighbour_copies.py [--quick] [--pairs 5]

Two worlds, with and without copies, train the same model on the same cores and take turns long enough for several
copies; the table has the ratio of their steps, and the share that the copies reckon with: packing, for which a step
waits, and the processor time of sending. The aim is at most 1 % of a step. Then a job is run in which ranks
are killed: how many steps it goes back, and how long until it is where it was. Needs Linux.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _gpt import Size
from _minimum import parameter_bytes
from _recovery_jobs import run_copies
from _turns import Quartiles, compare
from _worlds import Setting

SIZE = Size(tokens=64)
QUICK = Size(dim=64, layers=2, hidden=176, vocab=256, tokens=32)
WITH, WITHOUT = Setting("ntp", (4,), copies=True), Setting("ntp", (4,))
STATE = 3
"""Tensors of a parameter's size that are copied: itself and AdamW's two moments."""
AIM = 0.01


def show_cost(size: Size, pairs: int) -> None:
    with WITH.start(size, clip=True) as ours, WITHOUT.start(size, clip=True) as theirs:
        # the first steps agree on how often copies are made
        ours.ready()
        ours.turn(20)
        found = [tuple(each) for each in ours.account("copies", 1)]
        interval = max(each[0] for each in found)
        turn = max(10, min(2 * interval, 60))
        theirs.ready()
        theirs.turn(20)
        measured = compare(_Ready(ours), _Ready(theirs), pairs, turn, warm_up=1)  # type: ignore[arg-type]
        found = [tuple(each) for each in ours.account("copies", 1)]
    step = Quartiles.of([t.seconds for t in measured.theirs]).median
    intervals, costs, kept = zip(*found, strict=True)
    shard = parameter_bytes(size) * STATE / 4
    share = max(costs) / max(intervals) / step
    print(f"a step without copies, ms{1e3 * step:>33.0f}")
    print(f"copies every so many steps{max(intervals):>32}")
    print(f"a copy, packed and sent, ms{1e3 * max(costs):>31.1f}")
    print(f"its share of the steps{100 * share:>34.2f} %  (aim: at most 1 %: {'met' if share <= AIM else 'MISSED'})")
    for name, ratio in (("wall", measured.wall), ("processor", measured.cpu)):
        print(
            f"{f'steps with / without, {name}':<40}{ratio.median:>10.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
            f"  ({pairs} pairs of {turn} steps)"
        )
    print(f"host memory per rank, MB{max(kept) / 1e6:>34.1f}  ({max(kept) / shard:.2f} x its shard and states)\n")


class _Ready:
    """A world that has begun."""

    def __init__(self, world: object) -> None:
        self.turn = world.turn  # type: ignore[attr-defined]

    def ready(self) -> None:
        pass


def show_losses(jobs: int) -> None:
    print(f"{'killed':<12}{'back, steps':>12}{'recovery, ms':>14}{'done again, s':>15}", end="")
    print(f"{'per step, ms':>14}{'moved, MB':>11}")
    for job in range(jobs):
        events = run_copies([(1 + job % 3, 30 + 7 * job), (0, 60)], limit=240)
        changes = [event for event in events if event["event"] == "change"]
        again = [event for event in events if event["event"] == "caught_up"]
        for change in changes:
            done = next((event for event in again if event["monotonic"] > change["monotonic"]), None)
            seconds = done["seconds"] if done is not None and change["gone_back"] else 0.0
            each = f"{1e3 * seconds / change['gone_back']:.0f}" if change["gone_back"] else "-"
            recovery = 1e3 * sum(change["seconds"].values())
            print(
                f"{'slot ' + str(change['lost'][0]):<12}{change['gone_back']:>12}{recovery:>14.0f}{seconds:>15.2f}"
                f"{each:>14}{change['bytes'] / 1e6:>11.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that the benchmark works, no more")
    parser.add_argument("--pairs", type=int, default=5, help="of turns, at least 5")
    arguments = parser.parse_args()
    if arguments.pairs < 5:
        parser.error(f"--pairs {arguments.pairs}: quartiles of fewer than 5 pairs mean nothing")
    size, began = QUICK if arguments.quick else SIZE, time.monotonic()
    print(
        f"GPT of {parameter_bytes(size) / 4e6:.1f} M parameters, {size.samples} x {size.tokens} tokens per step,"
        f" float32, AdamW,\n{len(os.sched_getaffinity(0))} cores, one thread per rank; degrees (4);"
        " median [quartiles]\n"
    )
    show_cost(size, arguments.pairs)
    show_losses(1 if arguments.quick else 3)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
