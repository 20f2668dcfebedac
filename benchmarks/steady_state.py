"""Time, traffic and memory of training steps: ntp against Lightning's DDP and ModelParallelStrategy.

    python benchmarks/steady_state.py [--quick] [--pairs 8] [--only time|traffic|memory]

Two worlds at a time train the same model on the same cores and take turns of a few steps; a ratio is that of two turns
side by side, and the table has its median and quartiles. Wall time is that of the slowest rank; processor time is that
of all ranks together, which other work on the machine changes less. The gradient norm is clipped against DDP, and not
against ModelParallelStrategy, whose clipping raises in a model with sharded and ordinary parameters (Lightning 2.6.6).
The aim is a ratio of at most 1.00 of either, and at worst 1.05 of DDP at degree 1. Needs Linux.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _accounts import Memory, Traffic
from _gpt import Size
from _minimum import minimum, parameter_bytes
from _turns import Comparison, Quartiles, compare
from _worlds import Setting

QUICK = Size(dim=64, layers=2, hidden=176, vocab=256, tokens=32)
STEPS = 3
"""Of a turn."""
WATCHED_STEPS = 2
SNAPSHOT_STEPS = 10
COMPARISONS = [
    (Setting("ntp", (1, 1)), Setting("ddp", (1, 1)), True),
    (Setting("ntp", (2, 2)), Setting("dtensor", (2, 2)), False),
    (Setting("ntp", (4,)), Setting("dtensor", (4,)), False),
]
FOR_INFORMATION = [
    (Setting("ntp", (2, 2)), Setting("ddp", (1, 1)), True),
    (Setting("ntp", (2, 1)), Setting("ddp", (1, 1)), True),
]
WATCHED = [
    Setting("ddp", (1, 1)),
    Setting("ntp", (1, 1)),
    Setting("dtensor", (2, 2)),
    Setting("ntp", (2, 2)),
    Setting("dtensor", (4,)),
    Setting("ntp", (4,)),
    Setting("ntp", (4, 3)),
]


def show_times(size: Size, pairs: int) -> None:
    print(f"{'step time':<34}{'ms':>6} {'against':>8}  {'wall: ratio':<20} {'processor: ratio'}")
    for ours, theirs, clip in COMPARISONS + FOR_INFORMATION:
        with ours.start(size, clip) as ours_world, theirs.start(size, clip) as theirs_world:
            found = compare(ours_world, theirs_world, pairs, STEPS, warm_up=2)
        print(f"{f'{ours.name} / {theirs.name}':<34}{_milliseconds(found)}  {_ratio(found.wall)} {_ratio(found.cpu)}")


def show_snapshot(size: Size) -> None:
    setting, _, clip = COMPARISONS[0]
    with setting.start(size, clip) as world:
        world.ready()
        world.turn(2)
        began = time.perf_counter()
        seconds = max(world.account("snapshot", SNAPSHOT_STEPS))
        step = (time.perf_counter() - began) / SNAPSHOT_STEPS
    share = 100 * seconds / SNAPSHOT_STEPS / step
    print(f"the snapshot of a step: {1000 * seconds / SNAPSHOT_STEPS:.2f} ms, {share:.2f} % of it (aim: at most 1 %)")


def show_accounts(size: Size, only: str | None) -> None:
    traffic: dict[Setting, list[Traffic]] = {}
    memory: dict[Setting, list[list[Memory]]] = {}
    for setting in WATCHED:
        # memory first: the recorder of the traffic leaves some behind
        found = _watch(setting, size, ["memory", "traffic"] if only is None else [only])
        if only != "memory":
            traffic[setting] = found[-1]
        if only != "traffic":
            memory[setting] = [found[0], *_watch(setting, size.wider(2), ["memory"])]
    if traffic:
        show_traffic(size, traffic)
    if memory:
        show_memory(memory)


def show_traffic(size: Size, traffic: dict[Setting, list[Traffic]]) -> None:
    print(f"\n{'MB sent per step':<19}{'mean of ranks':>13}{'minimum':>9}{'ratio':>7}", end="")
    print(f"{'largest':>9}{'minimum':>9}{'gradients':>11}{'collectives':>13}")
    for setting, found in traffic.items():
        sent = [rank.bytes_sent / WATCHED_STEPS / 1e6 for rank in found]
        least = minimum(size, setting.degrees)
        total, gradients = [b / 1e6 for b in least.total], [b / 1e6 for b in least.gradients]
        calls = max(sum(rank.collectives.values()) for rank in found) / WATCHED_STEPS
        print(f"{setting.name:<19}{_mean(sent):>13.2f}{_mean(total):>9.2f}{_mean(sent) / _mean(total):>7.3f}", end="")
        print(f"{max(sent):>9.2f}{max(total):>9.2f}{_mean(gradients):>11.2f}{calls:>13.0f}")
    print("sent: as the kernel counts; minimum, and its part for gradients: from the layouts, see _minimum.py")


def show_memory(memory: dict[Setting, list[list[Memory]]]) -> None:
    print(f"\n{'MB, largest rank':<19}{'parameters':>13}{'x 4':>9}{'peak':>9}{'peak / x 4':>12}")
    for setting, found in memory.items():
        # what does not grow with the model (interpreter, sockets, threads) cancels in the difference of two models
        small, large = (max(ranks, key=lambda memory: memory.state) for ranks in found)
        state = (large.state - small.state) / (large.parameters - small.parameters)
        growth = (large.peak - small.peak) / (large.parameters - small.parameters)
        held = large.parameters / 1e6
        print(f"{setting.name:<19}{held:>13.1f}{held * state:>9.1f}{held * growth:>9.1f}{growth / state:>12.2f}")
    print("of a model twice as wide; x 4: parameters, gradients, two moments; peak: in a step of 8 tokens, without")
    print("what does not grow with the model. ModelParallel 2x2 cuts parameters over replicas too (FSDP2).")


def _watch(setting: Setting, size: Size, requests: list[str]) -> list[list[Any]]:
    # without clipping, so that all can be compared
    with setting.start(size, clip=False, accounts=True) as world:
        world.ready()
        world.turn(2)
        return [world.account(request, WATCHED_STEPS) for request in requests]


def _milliseconds(found: Comparison) -> str:
    ours, theirs = (Quartiles.of([t.seconds for t in turns]).median for turns in (found.ours, found.theirs))
    return f"{ours * 1000:>6.0f} {theirs * 1000:>8.0f}"


def _ratio(q: Quartiles) -> str:
    return f"{q.median:.3f} [{q.low:.3f}, {q.high:.3f}]"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that the benchmark works, no more")
    parser.add_argument("--pairs", type=int, default=8, help="of turns per comparison, at least 5")
    parser.add_argument("--only", choices=["time", "traffic", "memory"], help="one table")
    arguments = parser.parse_args()
    if arguments.pairs < 5:
        parser.error(f"--pairs {arguments.pairs}: quartiles of fewer than 5 pairs mean nothing")
    size, began = QUICK if arguments.quick else Size(), time.monotonic()
    cores = len(os.sched_getaffinity(0))
    print(
        f"GPT of {parameter_bytes(size) / 4e6:.1f} M parameters ({size.layers} layers of {size.dim}, vocabulary"
        f" {size.vocab}), {size.samples} x {size.tokens} tokens per step,\nfloat32, AdamW, {cores} cores, one thread"
        f" per rank; {arguments.pairs} interleaved pairs of {STEPS} steps; replicas x degree: median [quartiles]\n"
    )
    if arguments.only in (None, "time"):
        show_times(size, arguments.pairs)
        show_snapshot(size)
    if arguments.only != "time":
        show_accounts(size, arguments.only)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
