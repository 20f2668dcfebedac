"""The power loop around real training: how soon a replica that has lost a GPU keeps pace, and what that costs.

    python benchmarks/power_loop.py [--quick] [--plot PATH.svg]

Jobs of eight ranks, 2x4, on eight simulated GPUs (``examples/power``): ranks compute as slowly as the GPUs' model of
power, clocks and heat says, and the loop writes the limits of that model, so it closes for real. Slot 7 is killed, and
comes back. Aims: where there is headroom, compute times within 2 % inside 20 intervals; where there is none, a step at
most 2 % longer than with the best split of the batch; no limit above its ceiling, no GPU hotter than allowed, the sum
of the limits within the budget after every single write; everything back at the end.

"by clocks" is what the model says of the GPUs, "measured" what the loop has measured of the ranks, which are disturbed
by whatever else this machine does. No number here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/power"))

from recording import GPUS, Machine, Moment, Recording, record
from simulate import CASES, plot

from lightning_ntp.power.control import OperatingPoint, boost_prices
from tests.nvml.mock import MockNvml

CLOSE, INTERVALS, INTERVAL = 0.02, 20, 1.0
ALLOWED_C = 87.0 - 4.0
"""The slowdown temperature of the model's GPUs, less the default margin."""
HOLDS = (1.0, 1.1, 1.2)
"""Powers at which the price is measured."""
HOLD_SECONDS = 9.0


@dataclass(frozen=True)
class Scenario:
    """How much power there is."""

    name: str
    case: str
    ceiling_w: float
    budget_w: float
    headroom: bool = False
    machine: Machine = Machine()


SCENARIOS = (
    Scenario("headroom: 3400 W, up to 700 W", "headroom", 700, 3400, True),
    Scenario("the lost GPU's watts: 2400 W", "lent", 700, 2400),
    Scenario("heat: 3400 W, but 0.09 C per W", "headroom", 700, 3400, machine=Machine(resistance=0.09)),
    Scenario("defaults: nothing above 300 W", "found", 300, 2400),
)


def ratio(moment: Moment, measured: bool) -> float | None:
    """Compute time of the shrunken replica over that of the other one; None if it is not known."""
    if not measured:
        times = moment.compute()
        return times[1] / times[0] if len(times) == 2 else None
    each = [moment.state["replicas"].get(replica, {}).get("compute_s") for replica in ("1", "0")]
    return None if None in each else each[0] / each[1]


def intervals(looks: Sequence[Moment], measured: bool) -> int | None:
    """How many intervals after the loss the ratio is within 2 % for good; None if it is not at the end.

    Of measurements it is the median of three in a row: one is of two or three steps, on a machine that has other work.
    """
    known = [(number, each) for number, moment in enumerate(looks) if (each := ratio(moment, measured)) is not None]
    if measured:
        known = [
            (known[at][0], statistics.median(r for _, r in known[at - 1 : at + 2])) for at in range(1, len(known) - 1)
        ]
    wrong = [number for number, each in known if abs(each - 1) > CLOSE]
    return next((number for number, _ in known if not wrong or number > wrong[-1]), None)


def last(looks: Sequence[Moment], measured: bool) -> float:
    """The ratio at the end: the median of the last intervals."""
    known = [each for moment in looks[-6:] if (each := ratio(moment, measured)) is not None]
    return statistics.median(known) if known else float("nan")


def joules(moments: Sequence[Moment]) -> float:
    """Of a step, as the loop says: the median."""
    found = [moment.state["joules_per_step"] for moment in moments if moment.state.get("joules_per_step")]
    return statistics.median(found) if found else float("nan")


def row(scenario: Scenario, got: Recording) -> bool:
    """Print what became of a scenario; whether the aims were met."""
    looks, shrunken = got.looks(got.shrunken), got.shrunken
    lost = got.lost_at
    assert lost is not None and looks, "nobody was lost"
    soon, true = intervals(looks, True), intervals(looks, False)
    over = max(shrunken[-1].compute().values()) / shrunken[-1].best_compute - 1
    highest = max(got.written_w, default=0.0)
    hottest = max(max(moment.temperatures) for moment in got.moments)
    largest = got.largest_sum_w
    back = got.limits_at_end == [300.0] * GPUS
    before = joules([m for m in got.looks(got.moments) if lost - 6 < m.at < lost])
    after = joules(looks[-6:])
    paced = true is not None and true <= INTERVALS if scenario.headroom else over <= CLOSE
    moved = shrunken[-1].work["samples"]
    print(
        f"{scenario.name:<30} {_or(soon):>4} /{_or(true):>4} {last(looks, True):>7.3f} /{last(looks, False):>6.3f}"
        f" {100 * over:>+7.1f} % {'/'.join(map(str, moved.values())):>6}"
        f" {highest:>5.0f} /{scenario.ceiling_w:>4.0f} {hottest:>5.1f} /{ALLOWED_C:>3.0f}"
        f" {largest:>6.0f} /{scenario.budget_w:>5.0f} {'all' if back else 'NO':>5} {before:>6.0f} /{after:>5.0f}"
        f"  {'ok' if paced else 'MISSED'}"
    )
    safe = highest <= scenario.ceiling_w and hottest <= ALLOWED_C and largest <= scenario.budget_w and back
    if not safe:
        print("  a limit, a temperature, a sum or what was left is NOT as it must be")
    return paced and safe


def _or(number: int | None) -> str:
    return "-" if number is None else str(number)


class Holder:
    """Sets the limits of replica 1 from outside, as an operator would, one after the other."""

    def __init__(self, start_w: float) -> None:
        self._limits = [start_w * factor for factor in HOLDS]
        self._since: float | None = None
        self.spans: list[tuple[float, float]] = []
        """From when until when each limit held and was measured, seconds."""

    def __call__(self, mock: MockNvml, recording: Recording) -> None:
        moments = recording.moments
        if not moments or not moments[-1].state.get("replicas") or len(self.spans) == len(self._limits):
            return
        now = moments[-1].at
        if self._since is None:
            self._since = now
            for gpu in range(GPUS // 2, GPUS):
                mock.set(gpu, power_limit=int(1000 * self._limits[len(self.spans)]))
        elif now - self._since > HOLD_SECONDS:
            self.spans.append((self._since + 3, now))  # the first seconds mix two powers
            self._since = None


def prices(directory: Path) -> None:
    """What more power costs: a healthy replica of four GPUs, held at some powers."""
    machine = Machine()
    holder = Holder(machine.start_w)
    arguments = ["--straggler", "none", "--lose-at", "-1", "--interval", str(INTERVAL), "--steps", "110"]
    got = record(arguments, machine, directory, show=False, meanwhile=holder)
    print("\na replica of four GPUs held at these powers from outside, its compute time as the loop measures it:")
    print(f"{'power':>8} {'x the power':>12} {'x the speed':>12} {'x samples per joule':>20}")
    points = []
    for begin, end in holder.spans:
        looks = [m.state["replicas"]["1"] for m in got.looks(got.moments) if begin < m.at <= end]
        seconds = statistics.median(each["compute_s"] for each in looks if each["compute_s"] is not None)
        points.append(OperatingPoint(statistics.fmean(each["watts"] for each in looks), 1 / seconds))
    for price in boost_prices(points):
        more = price.point.watts / points[0].watts
        print(f"{price.point.watts:>6.0f} W {more:>12.3f} {price.speed:>12.3f} {price.efficiency:>20.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first scenario only, and shorter")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the first scenario into this SVG file")
    parser.add_argument("--show", action="store_true", help="show what the jobs print")
    options = parser.parse_args()
    steps, restart = ("90", "14") if options.quick else ("140", "26")
    good = True
    print(f"one interval is {INTERVAL:g} s; intervals and ratios: measured / by clocks; then what was / what may be")
    print(
        f"{'scenario':<30} {'to 2 %':>10} {'ratio at the end':>16} {'vs best':>9} {'split':>6} {'limit, W':>11}"
        f" {'hottest, C':>10} {'sum, W':>13} {'back':>5} {'J per step':>13}"
    )
    with tempfile.TemporaryDirectory(prefix="power-loop-") as name:
        for number, scenario in enumerate(SCENARIOS[: 1 if options.quick else None]):
            arguments = ["--interval", str(INTERVAL), "--steps", steps, "--lose-at", "35", "--restart-after", restart]
            directory = Path(name, str(number))
            got = record([*arguments, *CASES[scenario.case]], scenario.machine, directory, show=options.show)
            good &= row(scenario, got)
            for event in got.events:
                if event["kind"] == "price":
                    print(f"  {event['text']}")
            if options.plot is not None and number == 0:
                plot(got, options.plot)
        if not options.quick:
            prices(Path(name, "prices"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
