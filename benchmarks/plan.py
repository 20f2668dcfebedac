"""How long planning takes: all layouts of 4,096 units at degrees 72 to 1, all exchanges for 1,024 replicas.

Run ``python benchmarks/plan.py``. Caches are cold: every plan is made once. The exit code is 1 if it takes a second or
more of processor time, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from lightning_ntp.plan import (
    LayoutFamily,
    Segment,
    Sharding,
    SyncPlan,
    Topology,
    UnitSpace,
    plan_reshard,
    plan_sync,
)

UNITS = 4096
FULL_DEGREE = 72
REPLICAS = 1024
LIMIT_SECONDS = 1.0


class Watch:
    """Time since the last reading, on the wall and on the processor."""

    def __init__(self) -> None:
        self._last = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        now = time.perf_counter(), time.process_time()
        wall, cpu = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        return wall, cpu


def row(part: str, count: int, seconds: tuple[float, float]) -> None:
    print(f"{part:<58} {count:>7,} {seconds[0] * 1000:>9.1f} {seconds[1] * 1000:>9.1f}")


def sync_table(degrees: tuple[int, ...], plans: dict[int, SyncPlan]) -> None:
    """What one replica of a degree sends before the all-reduce (and gets back after it)."""
    print(f"\n{'degree':>6} {'replicas':>9} {'largest share':>14} {'units sent':>11} {'messages':>9} {'pieces':>7}")
    numbers = Counter(degrees)
    shown = sorted(plans, reverse=True)
    for degree in [shown[round(k * (len(shown) - 1) / 8)] for k in range(9)]:
        plan = plans[degree]
        share = max(len(units) for units in plan.compute[0].owned.values())
        traveling = plan.before.traveling if plan.before else ()
        sent, pieces = sum(m.length for m in traveling), sum(len(m.runs) for m in traveling)
        print(f"{degree:>6} {numbers[degree]:>9} {share:>14} {sent:>11} {len(traveling):>9} {pieces:>7}")


def reshard_table(sharding: Sharding) -> None:
    """What a loss moves, once, in a job of full replicas."""
    print(f"\n{'change in a job of 16 x ' + str(FULL_DEGREE):<58} {'units':>7} {'wall ms':>9} {'CPU ms':>9}")
    start = Topology.start([FULL_DEGREE] * 16)
    first, _ = start.lose([5])
    changes = {
        "first loss (index 5 of replica 0)": (start, first),
        "later loss at the listed index (index 5 of replica 1)": (first, first.lose([FULL_DEGREE + 5])[0]),
        "later loss at another index (index 9 of replica 1)": (first, first.lose([FULL_DEGREE + 9])[0]),
        "repair of the first loss": (first, first.join(0, 5)),
        "a whole replica comes back with one member": (start, start.lose(range(FULL_DEGREE))[0].join(0, 5)),
    }
    for name, (before, after) in changes.items():
        watch = Watch()
        exchange = plan_reshard(before, after, sharding, gone=None if name.startswith(("first", "later")) else {5})
        row(name, exchange.elements, watch.read())


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; the exit code says whether the limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="of the degrees of the replicas")
    draw = random.Random(parser.parse_args(arguments).seed)
    degrees = tuple(draw.randint(1, FULL_DEGREE) for _ in range(REPLICAS))
    family, space = LayoutFamily(FULL_DEGREE), UnitSpace(UNITS)
    sharding = Sharding(0, (Segment(space, 1),))

    print(f"{UNITS:,} units, {REPLICAS:,} replicas of degrees {min(degrees)} to {max(degrees)}\n")
    print(f"{'part':<58} {'count':>7} {'wall ms':>9} {'CPU ms':>9}")
    watch = Watch()
    layouts = [family.layout(space, degree) for degree in range(FULL_DEGREE, 0, -1)]
    planning = watch.read()
    row(f"layouts of degrees {FULL_DEGREE} to 1", len(layouts), planning)
    plans = [plan_sync(sharding, family, degrees, degree) for degree in degrees]
    syncing = watch.read()
    exchanges = sum((plan.before is not None) + (plan.after is not None) for plan in plans)
    row(f"exchanges of {len(plans):,} replicas, there and back", exchanges, syncing)
    wall, cpu = planning[0] + syncing[0], planning[1] + syncing[1]
    row(f"total (limit: {LIMIT_SECONDS * 1000:.0f} ms of CPU)", len(layouts) + exchanges, (wall, cpu))

    sync_table(degrees, dict(zip(degrees, plans, strict=True)))
    reshard_table(sharding)
    return 0 if cpu < LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
