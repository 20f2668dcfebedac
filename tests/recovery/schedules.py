"""Seeded random schedules of faults: ``python -m tests.recovery.schedules --seeds 0 500``.

One seed is one script (fit with validation and checkpoints, test, predict) in which any number of ranks die at any
time: at a phase of a training step, at a place outside of steps, or whenever a clock says so. None may hang, and each
must end as the policy says: all survivors return with the numbers of the undisturbed script, or all say that no copy of
something is left, which takes deaths in every replica. ``--seeds N`` replays one.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lightning_ntp.lightning.callbacks.fault_schedule import PHASES
from tests.harness import Crew, World
from tests.harness.leaks import mark_session, session_processes
from tests.recovery.jobs import Result
from tests.recovery.places import PLACES
from tests.recovery.whole_runs import Found, Script, compare, run_script, undisturbed

DEGREES = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (3, 3), (2, 2, 2), (1, 2, 1))
STEPS = 6


def draw(seed: int) -> Script:
    """The script of a seed."""
    generator = random.Random(seed)
    degrees = generator.choice(DEGREES)
    slots = list(range(sum(degrees)))
    generator.shuffle(slots)
    count = min(len(slots), 1 + int(generator.expovariate(1.0)))
    deaths, faults, timed = [], [], []
    for slot in slots[:count]:
        kind = generator.random()
        if kind < 0.4:
            faults.append((slot, generator.randrange(STEPS), generator.choice(PHASES)))
        elif kind < 0.8:
            deaths.append((slot, generator.choice(PLACES), generator.randint(1, 3)))
        else:
            timed.append((slot, round(generator.uniform(0.0, 2.0), 3)))
    return Script(degrees, tuple(deaths), tuple(faults), tuple(timed), more=generator.randrange(3))


@dataclass
class Line:
    """What became of one schedule."""

    seed: int
    script: Script
    end: str
    """``same``, ``lost`` (said so), or ``WRONG``."""
    died: int
    recoveries: int
    slowest: float
    """Seconds of the slowest recovery."""
    seconds: float
    why: str = ""


def judge(result: Result, script: Script, crew: Crew, directory: Path) -> str:
    """How a schedule has ended.

    Raises:
        AssertionError: If it must not end so.
    """
    died = {o.slot for o in result.outcomes if o.state == "died"}
    raised = {o.slot: o.error.strip().splitlines()[-1] for o in result.outcomes if o.state == "raised"}
    stuck = [o for o in result.outcomes if o.state == "running"]
    assert not stuck, "\n".join(f"slot {o.slot} hangs:\n{o.stacks}\n{o.output[-1500:]}" for o in stuck)
    assert died <= script.victims, f"slots {sorted(died - script.victims)} died of themselves"
    if not raised:
        if died == set(range(sum(script.degrees))):
            return "all dead"
        got = Found(result.survivors, result.directory)
        compare(got, undisturbed(lambda n, fresh: World(crew, n, fresh), script, directory), died)
        return "same"
    assert not result.survivors, f"slots {sorted(raised)} ended and {sorted(result.survivors)} went on: {raised}"
    first, replicas = 0, []
    for degree in script.degrees:
        replicas.append(set(range(first, first + degree)))
        first += degree
    for error in raised.values():
        assert "JobLost" in error and "only copies" in error, error
    assert all(died & replica for replica in replicas), f"a copy of everything was left: {sorted(died)} died, {raised}"
    return "lost"


def run(seed: int, crew: Crew, directory: Path) -> Line:
    """Run the schedule of a seed."""
    script, began = draw(seed), time.monotonic()
    result = run_script(lambda n, fresh: World(crew, n, fresh), script, directory / str(seed))
    seconds = time.monotonic() - began
    try:
        end, why = judge(result, script, crew, directory), ""
    except AssertionError as error:
        end, why = "WRONG", str(error)
    changes = _changes(directory / str(seed) / "rows" / "events.jsonl")
    slowest = max((sum(change["seconds"].values()) for change in changes), default=0.0)
    died = sum(o.state == "died" for o in result.outcomes)
    if end != "WRONG":
        shutil.rmtree(directory / str(seed), ignore_errors=True)
    return Line(seed, script, end, died, len(changes), slowest, seconds, why)


def _changes(path: Path) -> list[dict[str, dict[str, float]]]:
    if not path.exists():
        return []
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] == "change"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 100], help="one seed, or the first and the end")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no schedule after that")
    options = parser.parse_args()
    seeds = range(*options.seeds) if len(options.seeds) == 2 else options.seeds
    directory, began = Path(tempfile.mkdtemp(prefix="schedules-")), time.monotonic()
    lines: list[Line] = []
    mark_session()
    crew = Crew()
    try:
        for seed in seeds:
            if time.monotonic() - began > 60 * options.minutes:
                break
            line = run(seed, crew, directory)
            lines.append(line)
            if line.end == "WRONG":
                print(f"seed {seed}: {line.script}\n{line.why[:4000]}\n", flush=True)
            if sys.stderr.isatty() or len(lines) % 25 == 0:
                print(f"{len(lines)} done, {sum(each.end == 'WRONG' for each in lines)} wrong", file=sys.stderr)
    finally:
        crew.close()
    ends = Counter(line.end for line in lines)
    print(f"{len(lines)} schedules in {time.monotonic() - began:.0f} s: {dict(ends)}")
    print(f"{sum(line.died for line in lines)} deaths, {sum(line.recoveries for line in lines)} recoveries")
    slowest = max(lines, key=lambda line: line.slowest)
    print(f"slowest recovery {slowest.slowest:.3f} s (seed {slowest.seed}, {slowest.script.degrees})")
    print(f"processes left: {len(session_processes())}")
    wrong = [line.seed for line in lines if line.end == "WRONG"]
    print(f"wrong: {wrong or 'none'}{f', kept in {directory}' if wrong else ''}")
    if not wrong:
        shutil.rmtree(directory, ignore_errors=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
