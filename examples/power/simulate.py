"""Run ``train.py`` on eight simulated GPUs, tell what happened, and draw it. Needs a C compiler (``cc``), and no GPU.

    python examples/power/simulate.py [--plot PATH.svg] [--case headroom|lent|found] [arguments of train.py]

The driver is the stand-in of the tests, with its model of power, clocks and heat; ranks train for real, and compute as
slowly as their GPU would, so the power loop closes: limit, clock, step time, limit. About a minute and a half.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from _svg import Panel, draw
from recording import Machine, Moment, Recording, record

GROUPS = {"replica 0, GPUs 0 to 3": range(4), "replica 1, GPUs 4 to 6": range(4, 7), "GPU 7, lost": range(7, 8)}
CASES = {
    "headroom": ["--budget", "3400", "--ceiling", "700"],
    "lent": ["--ceiling", "maximum"],
    "found": [],
}
"""Arguments of the script: power enough; what the lost GPU does not draw; nothing above the limits at start."""


def show(recording: Recording) -> None:
    """Print what happened."""
    lost, back = recording.lost_at, recording.back_at
    shrunken = recording.shrunken
    print(f"\n{'':<22} {'watts of replica':>19} {'limit per GPU':>17} {'compute time':>15} {'joules':>8}")
    print(f"{'':<22} {'0':>9} {'1':>9} {'0':>8} {'1':>8} {'0':>7} {'1':>7} {'a step':>8}")
    if lost is None or not shrunken:
        _row("all along", recording.moments)
    else:
        _row("before the loss", [m for m in recording.moments if lost - 5 < m.at < lost])
        _row("just after it", [m for m in shrunken if m.at < shrunken[0].at + 1.5])
        _row("with the boost", [m for m in shrunken if m.at > shrunken[-1].at - 6])
        if back is not None:
            _row("slot 7 is back", [m for m in recording.moments if m.at > back + 3])
    hottest = max(max(m.temperatures) for m in recording.moments)
    budget = max((m.state.get("budget_w") or 0.0 for m in recording.moments), default=0.0)
    highest, largest = max(recording.written_w, default=0.0), recording.largest_sum_w
    print(
        f"hottest GPU {hottest:.0f} C; {len(recording.written_w)} writes of limits, the highest {highest:.0f} W;",
        end=" ",
    )
    print(f"their sum at most {largest:.0f} W of {budget:.0f} W")
    print(f"limits at the end: {', '.join(f'{watts:.0f}' for watts in recording.limits_at_end)} W")


def _row(name: str, moments: Sequence[Moment]) -> None:
    known = [m for m in moments if m.state.get("replicas")]
    if not known:
        return
    numbers = []
    for key, unit in (("watts", 1.0), ("limit_w", 1.0), ("compute_s", 1000.0)):
        for replica in ("0", "1"):
            values = []
            for moment in known:
                each = moment.state["replicas"].get(replica, {})
                if each.get(key) is not None:
                    values.append(unit * each[key] / (len(each["gpus"]) if key == "limit_w" else 1))
            numbers.append(f"{statistics.median(values):.0f}" if values else "-")
    joules = [m.state["joules_per_step"] for m in known if m.state.get("joules_per_step")]
    numbers.append(f"{statistics.median(joules):.0f}" if joules else "-")
    units = (" W", " W", " W", " W", "ms", "ms", " J")
    wide = (7, 7, 6, 6, 5, 5, 6)
    print(f"{name:<22} " + " ".join(f"{n:>{w}}{u}" for n, w, u in zip(numbers, wide, units, strict=True)))


def plot(recording: Recording, path: Path) -> None:
    """Draw power, limits, temperature, clock and compute time over time."""
    moments = [m for m in recording.moments if m.state.get("replicas") and m.work.get("training")][::2]
    begin = moments[0].at
    times = [m.at - begin for m in moments]
    lines: dict[str, dict[str, list[float]]] = {"watts": {}, "limit": {}, "heat": {}, "clock": {}}
    for name, gpus in GROUPS.items():
        lines["watts"][name] = [statistics.fmean(m.watts[g] for g in gpus) for m in moments]
        lines["limit"][name] = [max(m.limits_w[g] for g in gpus) for m in moments]
        lines["heat"][name] = [max(m.temperatures[g] for g in gpus) for m in moments]
        lines["clock"][name] = [min(m.clocks_mhz[g] for g in gpus) for m in moments]
    # while the members change, what the job's files say does not fit together for a moment
    steady = [m.replicas == moments[max(0, at - 3)].replicas for at, m in enumerate(moments)]
    times_by_clocks = [m.compute() if same else {} for m, same in zip(moments, steady, strict=True)]
    full_ms = 1000 * recording.full_step_s
    pace = {f"replica {r}, by its clocks": _held([_of(t, r, full_ms) for t in times_by_clocks]) for r in (0, 1)}
    pace |= {f"replica {r}, as measured": _measured(moments, str(r)) for r in (0, 1)}
    joules = _held([m.state.get("joules_per_step") for m in moments])
    panels = [
        Panel("power limit, W", lines["limit"]),
        Panel("power, W (mean of the GPUs)", lines["watts"]),
        Panel("temperature, C (hottest of the GPUs)", lines["heat"]),
        Panel("clock, MHz (slowest of the GPUs)", lines["clock"]),
        Panel("compute time of a step, ms", pace),
        Panel("energy of a step, J", {"all GPUs": joules}),
    ]
    marks = {"GPU 7 is lost": recording.lost_at, "slot 7 is back": recording.back_at}
    shown = {name: at - begin for name, at in marks.items() if at is not None}
    title = "A GPU is lost, and comes back: simulated GPUs, real training"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(title, times, panels, shown, "seconds"))
    print(f"\n{path}")


def _of(times: Mapping[int, float], replica: int, unit: float) -> float | None:
    return unit * times[replica] if replica in times else None


def _measured(moments: Sequence[Moment], replica: str) -> list[float]:
    found = [m.state["replicas"].get(replica, {}).get("compute_s") for m in moments]
    return _held([None if each is None else 1000 * each for each in found])


def _held(values: Sequence[float | None]) -> list[float]:
    """What is not known is as it was last, and at first as it will be."""
    last = next((each for each in values if each is not None), 0.0)
    held = []
    for each in values:
        last = last if each is None else each
        held.append(last)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="headroom", help="how much power there is")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="where the picture goes (default: OUTPUT/loss.svg)")
    parser.add_argument("--output", type=Path, default=Path("outputs/power"))
    options, more = parser.parse_known_args()  # the rest is for train.py
    arguments = ["--interval", "1", "--restart-after", "20", *CASES[options.case], *more]
    recording = record(arguments, Machine(), options.output)
    show(recording)
    plot(recording, options.plot or options.output / "loss.svg")


if __name__ == "__main__":
    main()
