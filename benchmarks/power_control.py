"""How soon and how quietly a replica that has lost a GPU keeps pace again, on a simulated machine.

    python benchmarks/power_control.py [--quick] [--plot PATH.svg]

The machine is that of the tests (``tests/power/plant.py``): two replicas of four GPUs, or of eight, with power, heat,
clocks, measurement noise and one interval of dead time. Replica 1 loses a GPU. All numbers are of what really was,
without noise; with noise they are the median and the worst of several runs. Aims: within 2 % inside 20 intervals
where there is headroom; where there is none, a step at most 2 % longer than with the best split of the batch.

No number here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _svg import Panel, draw

from lightning_ntp.power.control import BoostSettings, OperatingPoint, boost_prices
from tests.power.plant import Machine, Plant
from tests.power.runs import LOST, Run, simulate

LOST_AT, SOON, LATER = 5, 40, 240
ROOMY = Machine(start_w=300, budget_w=4400)
LOCKED = Machine(start_w=700, ceiling_w=None, start_clock=1200)


@dataclass(frozen=True)
class Scenario:
    """A machine and what may be turned."""

    name: str
    machine: Machine
    settings: BoostSettings | None = None
    headroom: bool = True


BOTH = BoostSettings(levers=frozenset({"power_limit", "clocks"}))
SCENARIOS = (
    Scenario("4 -> 3, power, no noise", ROOMY),
    Scenario("4 -> 3, power, noise 1 %", dataclasses.replace(ROOMY, noise=0.01, spread=0.05)),
    Scenario("4 -> 3, power, noise 3 %", dataclasses.replace(ROOMY, noise=0.03, spread=0.05)),
    Scenario("... 40 % follow no clock, 1 %", dataclasses.replace(ROOMY, noise=0.01, serial=0.4)),
    Scenario("8 -> 7, power, noise 1 %", dataclasses.replace(ROOMY, degree=8, start_w=400, budget_w=9000, noise=0.01)),
    Scenario("4 -> 3, locked clocks, 1 %", dataclasses.replace(LOCKED, noise=0.01), BOTH),
    Scenario("4 replicas, noise 3 %", dataclasses.replace(ROOMY, replicas=4, budget_w=8000, noise=0.03)),
    Scenario("4 -> 3, the lost GPU's power", Machine(noise=0.01), None, False),
    Scenario("8 -> 7, the lost GPU's power", Machine(degree=8, start_w=400, noise=0.01), None, False),
    Scenario("4 -> 3, operator's limit", Machine(ceiling_w=None, noise=0.01), None, False),
    Scenario(
        "4 -> 3, heat", dataclasses.replace(ROOMY, resistance=0.1, ambient=35, noise=0.01, spread=0.05), None, False
    ),
)


def best_step_s(plant: Plant) -> float:
    """The shortest step of any split of the batch between two replicas."""
    batch = plant.machine.batch
    return min(max(plant.compute_s(0, n), plant.compute_s(1, batch - n)) for n in range(1, batch))


def row(scenario: Scenario, runs: list[Run]) -> bool:
    """Print what became of a scenario; whether the aims were met."""
    overshoot = max(100 * max(0.0, *(-gap for gap in run.gaps[LOST_AT + 1 :])) for run in runs)
    hottest = max(max(record.temperatures.values()) for run in runs for record in run.plant.records)
    early, late = [run.writes(0, SOON) for run in runs], [run.writes(SOON, LATER) for run in runs]
    if scenario.headroom:
        reached = [run.intervals_to(0.02) for run in runs]
        known = sorted(each if each is not None else 999 for each in reached)
        pace, split, good = (
            f"{statistics.median_low(known)} / {known[-1]}",
            "",
            statistics.median_low(known) <= SOON / 2,
        )
    else:
        worst = max(run.plant.records[-1].step_s / best_step_s(run.plant) - 1 for run in runs)
        missing = statistics.median(run.decisions[-1].missing_percent.get(1, 0.0) for run in runs)
        pace, split, good = f"{missing:.0f} % missing", f"{100 * worst:+.1f} %", worst <= 0.02
    print(
        f"{scenario.name:<30} {pace:>13} {overshoot:>9.1f} % {statistics.median_low(early):>7} / {max(early):<4}"
        f" {statistics.median_low(late):>5} / {max(late):<4} {hottest:>6.1f} {split:>8}  {'ok' if good else 'MISSED'}"
    )
    return good


def prices(run: Run) -> None:
    """What the boost of a run costs in energy: the job before the boost, and at every power after it."""
    points: dict[int, OperatingPoint] = {}
    for record in run.plant.records[LOST_AT + 1 :]:
        points.setdefault(round(record.power_w, -2), OperatingPoint(record.power_w, 1000 / record.step_s))
    print(f"\n{'power of the job':>17} {'speed':>7} {'per watt':>9} {'J per more token':>17}   (1,000 tokens a step)")
    for price in boost_prices(list(points.values())):
        print(
            f"{price.point.watts:>15.0f} W {price.speed:>7.3f} {price.efficiency:>9.3f}"
            f" {price.joules_per_more_token:>17.2f}"
        )


def plot(path: Path) -> None:
    """Power, temperature, clock and step time over a loss and a return."""
    machine = dataclasses.replace(ROOMY, noise=0.01)
    events = {45: lambda plant: plant.announce(LOST), 46: lambda plant: plant.give_back(LOST)}
    run = simulate(machine, 70, 10, events=events)
    records = run.plant.records
    shown = {"GPU-00": "replica 0", "GPU-10": "replica 1", LOST: "lost GPU"}
    panels = [
        Panel("power limit, W", {n: [r.limits_w[g] for r in records] for g, n in shown.items()}),
        Panel("temperature, C", {n: [r.temperatures[g] for r in records] for g, n in shown.items()}),
        Panel(
            "clock, MHz",
            {n: [machine.max_clock * r.clocks[g] for r in records] for g, n in shown.items() if g != LOST},
        ),
        Panel("compute time of a step, s", {f"replica {k}": [r.compute_s[k] for r in records] for k in (0, 1)}),
    ]
    marks = {"loss": 10, "return": 46}
    path.write_text(draw("A loss and a return (simulated)", list(range(len(records))), panels, marks, "intervals"))
    print(f"\n{path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs per scenario instead of eight")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a loss and a return into this SVG file")
    options = parser.parse_args()
    print(
        f"{'scenario':<30} {'to 2 %':>13} {'overshoot':>11} {'writes to ' + str(SOON):>14} {'to ' + str(LATER):>12}"
        f" {'max C':>6} {'vs best':>8}"
    )
    good = True
    for scenario in SCENARIOS:
        seeds = range(2 if options.quick else 8) if scenario.machine.noise else range(1)
        runs = [
            simulate(
                dataclasses.replace(scenario.machine, seed=seed),
                LOST_AT + LATER,
                LOST_AT,
                scenario.settings,
                shares=not scenario.headroom,
            )
            for seed in seeds
        ]
        good &= row(scenario, runs)
    print("median / worst of the runs; intervals from the loss; a write is one limit or clock of one GPU")
    prices(simulate(ROOMY, 40, LOST_AT))
    if options.plot is not None:
        plot(options.plot)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
