"""What the loss of a rank costs: time until the step it happened in is finished, and bytes that move.

    python benchmarks/recovery.py [--quick] [--no-torchrun]

Jobs of 8 ranks at degrees (4, 4) train a small GPT. A rank is killed (SIGKILL) in the middle of a backward, and after
some steps another one, at another index of the other replica. The clock runs from the kill until the last survivor has
finished the optimizer step that was under way; the aim is at most 0.3 s more than such a step takes. Against it, in the
same run: the same training by plain DDP under torchrun, which starts all workers again from the newest checkpoint
(every 6 steps); its clock stops when all are beyond the step of the kill. The aim is 30 times its speed. Bytes are held
against the bounds N/n (first loss) and (2 - 1/(n - 1)) N/n (later loss at another index); the aim is 1.05 of each.
Takes less than 6 minutes, with ``--quick`` 2: jobs for which no time is left are left out. Linux only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _recovery_bytes import bounds, cut_tensors, planned
from _recovery_jobs import PHASES, RANKS, Loss, Restart, run_ntp, run_torchrun
from _recovery_model import DIM, HEADS, LAYERS, SAMPLES, TOKENS, VOCAB

DEGREE = 4
FIRST, SECOND = 3, 9
"""Steps of the kills in a job of ours."""
PAIRS = [(5, 2), (0, 7), (3, 4), (6, 0), (2, 5), (4, 1)]
"""Slots that are killed, job by job."""
EVERY = 6
TORCHRUN_KILLS = [(5, 9), (0, 15), (3, 21)]
AIM_SECONDS, AIM_SPEED, AIM_BYTES = 0.3, 30.0, 1.05


class Budget:
    """Starts jobs as long as one more is likely to end in time.

    Args:
        seconds: For everything.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._took: dict[str, float] = {}

    def run(self, kind: str, job: Callable[[float], list[Loss] | list[Restart]], reserve: float) -> bool:
        """Run ``job(limit)`` unless jobs of its kind take longer than what is left but for ``reserve`` seconds."""
        began = time.monotonic()
        left = self._end - began - reserve
        if left < self._took.get(kind, 0.0) * 1.1:
            return False
        job(left)
        self._took[kind] = max(self._took.get(kind, 0.0), time.monotonic() - began)
        return True


def measure(quick: bool, torchrun: bool) -> tuple[list[Loss], list[Restart]]:
    """Jobs of both kinds, ours before and after theirs."""
    losses: list[Loss] = []
    restarts: list[Restart] = []
    seconds = 100.0 if quick else 330.0
    budget = Budget(seconds)

    def ours(kills: tuple[int, int]) -> Callable[[float], list[Loss]]:
        def job(limit: float) -> list[Loss]:
            found = run_ntp([(kills[0], FIRST), (kills[1], SECOND)], limit)
            losses.extend(found)
            return found

        return job

    def theirs(limit: float) -> list[Restart]:
        restarts.extend(run_torchrun(TORCHRUN_KILLS[: 1 if quick else 3], EVERY, limit))
        return restarts

    pairs = PAIRS[:2] if quick else PAIRS
    half = len(pairs) // 2
    reserve = seconds / 2 if torchrun else 0.0
    for pair in pairs[:half]:
        budget.run("ntp", ours(pair), reserve)
    if torchrun:
        budget.run("torchrun", theirs, 0.0)
    for pair in pairs[half:]:
        budget.run("ntp", ours(pair), 0.0)
    return losses, restarts


def show_losses(losses: list[Loss]) -> None:
    first, later = _split(losses)
    head = [f"{n} -> {n - 1} ranks ({len(group)})" for n, group in ((RANKS, first), (RANKS - 1, later))]
    print(f"{'kill -> step finished by all, ms':<36}{head[0]:>22}{head[1]:>24}{f'all ({len(losses)})':>24}")
    rows: list[tuple[str, Callable[[Loss], float]]] = [
        ("detect", lambda loss: loss.phases["detect"]),
        ("  of it until announced", lambda loss: loss.announced),
        *((phase, lambda loss, p=phase: loss.phases[p]) for phase in PHASES[1:]),  # type: ignore[misc]
        ("total", lambda loss: loss.total),
        ("an undisturbed step", lambda loss: loss.step),
        ("total beyond such a step", lambda loss: loss.beyond),
    ]
    for name, value in rows:
        cells = [_milliseconds([value(loss) for loss in g]) if g else "-" for g in (first, later, losses)]
        print(f"{name:<36}{cells[0]:>22}{cells[1]:>24}{cells[2]:>24}")
    print("rest: unwinding the step, putting its start back, what follows the change; replay: the step, done again")


def show_restarts(restarts: list[Restart], losses: list[Loss]) -> None:
    print(f"\n{f'torchrun, {RANKS} workers: kill -> beyond the step, s':<58}{f'({len(restarts)})':>24}")
    for name, values in (
        ("until a new worker runs the script", [r.gone for r in restarts]),
        ("until all workers train", [r.training for r in restarts]),
        ("total", [r.total for r in restarts]),
        (f"steps done again (a checkpoint every {EVERY})", [float(r.redone) for r in restarts]),
    ):
        print(f"{name:<58}{_cell(values, '.1f'):>24}")
    if not all(r.complete for r in restarts):
        print("time was up before a restart was through: its times are lower bounds")
    speed = statistics.median([r.total for r in restarts]) / statistics.median([loss.total for loss in losses])
    aside = statistics.median([r.total for r in restarts]) / statistics.median([loss.beyond for loss in losses])
    print(
        f"ours is {speed:.0f} times faster, {aside:.0f} times without the replayed step {_verdict(speed >= AIM_SPEED)}"
    )


def show_bytes(losses: list[Loss]) -> None:
    tensors = cut_tensors(DEGREE)
    least = bounds(tensors, DEGREE)
    print(f"\n{'bytes moved, MB':<36}{'moved':>10}{'bound':>10}{'ratio':>22}")
    first, later = _split(losses)
    for name, group, bound in (("first loss", first, least.first), ("later loss, other index", later, least.later)):
        moved = [loss.moved for loss in group]
        if not moved:
            continue
        largest = max(moved) / bound
        ratios = f"{min(moved) / bound:.3f} to {largest:.3f}"
        print(f"{name:<36}{statistics.median(moved) / 1e6:>10.3f}{bound / 1e6:>10.3f}{ratios:>22}", end=" ")
        print(_verdict(largest <= AIM_BYTES))
    print(f"{'planned, for all losses':<36}{'first, at most':>20}{'later, at most':>22}")
    for name, degree, sizes in (
        ("this model, 2 x 4", DEGREE, {}),
        ("32 heads, 8 of them k/v, 2 x 4", DEGREE, {"dim": 512, "num_heads": 32, "num_kv_heads": 8, "hidden": 1408}),
        ("32 heads, 2 x 8", 8, {"dim": 512, "num_heads": 32, "num_kv_heads": 32, "hidden": 1408}),
    ):
        once, again = planned(cut_tensors(degree, **sizes), degree)
        print(f"{name:<36}{max(once):>20.3f}{max(again):>22.3f}")
    print(
        "bounds: N/n and (2 - 1/(n - 1)) N/n of what is cut. Heads are whole, and one that several ranks share travels"
    )
    print("to all that need it")


def _split(losses: list[Loss]) -> tuple[list[Loss], list[Loss]]:
    whole = tuple([DEGREE] * (RANKS // DEGREE))
    return [loss for loss in losses if loss.before == whole], [loss for loss in losses if loss.before != whole]


def _milliseconds(values: Sequence[float]) -> str:
    return _cell([value * 1e3 for value in values], ".0f")


def _cell(values: Sequence[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def _verdict(met: bool) -> str:
    return "(aim met)" if met else "(AIM MISSED)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer jobs: 2 minutes instead of 6")
    parser.add_argument("--no-torchrun", action="store_true", help="only ours")
    arguments = parser.parse_args()
    began = time.monotonic()
    load = os.getloadavg()[0]
    losses, restarts = measure(arguments.quick, not arguments.no_torchrun)
    millions = sum(t.elements for t in cut_tensors(DEGREE)) / 1e6
    print(
        f"{RANKS} ranks at degrees {(DEGREE,) * (RANKS // DEGREE)}, {len(os.sched_getaffinity(0))} cores (load average"
        f" at the start: {load:.1f}); GPT of {millions:.1f} M parameters ({LAYERS} layers of {DIM},\n{HEADS} heads,"
        f" vocabulary {VOCAB}), {SAMPLES} x {TOKENS} tokens per step, float32, AdamW; median [quartiles] (losses)\n"
    )
    if not losses:
        sys.exit("no job came as far as a loss in time: is the machine busy?")
    show_losses(losses)
    beyond = statistics.median([loss.beyond for loss in losses])
    print(f"beyond the step: {beyond:.3f} s {_verdict(beyond <= AIM_SECONDS)}")
    if restarts:
        show_restarts(restarts, losses)
    show_bytes(losses)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
