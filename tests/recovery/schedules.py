"""Seeded random schedules of faults: ``python -m tests.recovery.schedules --seeds 0 500``.

One seed is one script (fit with validation and checkpoints, test, predict) in which faults happen to any number of
ranks at any time: at a phase of a training step, at a place outside of steps, or whenever a clock says so. In some
schedules every fault is a kill; these run in the tests' own worlds. In the others ranks are killed, stopped, hang in
Python, raise alone or are told to go by SIGTERM; these run under the package's own supervisor, which must find those
that hang.

None may hang, and each must end as the policy says: all survivors return with the numbers of the undisturbed script, or
all say that no copy of something is left, which takes losses in every replica, or the exception of a rank that was the
last of its replica ends the job, because then it is one of a whole replica. ``--seeds N`` replays one, ``--jobs 2``
runs two at a time.

With ``--rejoin`` everybody who is lost is started again at once, under the package's own supervisor, and faults befall
newcomers as well, on their way in and later, and those who let them in. Whoever is back at the end, the numbers are
those of the undisturbed script.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from lightning_ntp.engine.events import FILE_NAME, read_events
from lightning_ntp.lightning.callbacks.fault_schedule import STEP_PHASES
from tests.harness import Crew, World
from tests.harness.leaks import command_line, mark_session, session_processes
from tests.recovery.fates import OF_MEMBERS, ON_THE_WAY, Fate
from tests.recovery.jobs import Result
from tests.recovery.places import PLACES
from tests.recovery.supervised import HEARTBEAT, Supervised, SupervisingProcess
from tests.recovery.whole_runs import Found, Script, compare, recoveries, run_script, undisturbed

DEGREES = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (3, 3), (2, 2, 2), (1, 2, 1))
STEPS = 6
_SUPERVISED = 0.4
"""Share of the schedules with other faults than kills."""
_OF_NEWCOMERS = ("kill", "kill", "stop", "raise")
_PATIENCE_SECONDS = 6.0
"""For newcomers to stand by, so that they come back before the script is over."""
_AT_ONCE = {"max_restarts": 20, "restart_backoff": timedelta(0)}
_FOUND_SECONDS = HEARTBEAT + 2.0
"""For a stopped rank to be found; this machine may be busy with what else runs on it."""

# where nobody waits for a rank, or before the first batch, a hang in Python may be the user's
_WHERE_HANGS_ARE_FOUND = (
    "sanity",
    "validation",
    "validation_middle",
    "validation_forward",
    "validation_end",
    "metric_sync",
    "write",
    "test",
    "test_forward",
    "predict",
    "predict_forward",
)


def draw(seed: int) -> Script:
    """The script of a seed."""
    generator = random.Random(seed)
    degrees = generator.choice(DEGREES)
    slots = list(range(sum(degrees)))
    generator.shuffle(slots)
    supervised = generator.random() < _SUPERVISED
    # where some are stopped, somebody must be left: a job whose ranks are all stopped is paused
    count = min(len(slots) - supervised, 1 + int(generator.expovariate(1.0)))
    deaths, faults, timed, kinds = [], [], [], []
    left = ["stop", "stop", "hang", "raise", "term", "term", "kill", "kill"]
    for slot in slots[:count]:
        # one hang, which may take ten heartbeats to be found; one exception, for the second of a kind ends the job
        kind = generator.choice(left) if supervised else "kill"
        if kind in ("hang", "raise"):
            left.remove(kind)
        kinds.append((slot, kind))
        how = generator.random()
        if kind == "term" and how < 0.4:
            how = 0.9
        elif kind in ("hang", "raise") and how >= 0.8:
            how -= 0.4
        if how < 0.4:
            faults.append((slot, generator.randrange(STEPS), generator.choice(STEP_PHASES)))
        elif how < 0.8:
            places = _WHERE_HANGS_ARE_FOUND if kind == "hang" else PLACES
            place, number = generator.choice(places), generator.randint(1, 3)
            # after the last teardown predictions are made, and those of a replica that is gone go with it
            deaths.append((slot, place, min(number, 2) if place == "teardown" else number))
        else:
            timed.append((slot, round(generator.uniform(0.0, 2.0), 3)))
    more = generator.randrange(3)
    return Script(degrees, tuple(deaths), tuple(faults), tuple(timed), tuple(kinds) if supervised else (), more=more)


def draw_rejoining(seed: int) -> Script:
    """The script of a seed in which everybody is started again."""
    script, generator = draw(seed), random.Random(f"rejoining {seed}")
    kinds = dict(script.kinds) or dict.fromkeys(script.victims, "kill")
    # who leaves when it is told to does not come back
    kinds = {slot: "kill" if kind == "term" else kind for slot, kind in kinds.items()}
    fates = [
        Fate(slot, life, generator.choice(ON_THE_WAY), generator.choice((1, 1, 2)), generator.choice(_OF_NEWCOMERS))
        for slot in sorted(script.victims)
        for life in (1, 2)
        if generator.random() < 0.4
    ]
    if generator.random() < 0.4:
        slot = generator.randrange(sum(script.degrees))
        fates.append(Fate(slot, 0, generator.choice(OF_MEMBERS), generator.choice((1, 2)), "kill"))
        kinds.setdefault(slot, "kill")
    if {*script.victims, *(fate.slot for fate in fates)} == set(range(sum(script.degrees))):
        # who is stopped might be the only member: that is a job that is paused
        kinds = {slot: "kill" if kind == "stop" else kind for slot, kind in kinds.items()}
        fates = [fate._replace(kind="kill") if fate.kind == "stop" else fate for fate in fates]
    waits = tuple(step for step in range(1, STEPS) if generator.random() < 0.4)
    return replace(script, kinds=tuple(kinds.items()), fates=tuple(fates), waits=waits, patience=_PATIENCE_SECONDS)


@dataclass
class Line:
    """What became of one schedule."""

    seed: int
    script: Script
    end: str
    """``same``, ``lost`` (said so), ``all dead``, ``one's mistake`` (ended by an exception), or ``WRONG``."""
    gone: set[int] = field(default_factory=set)
    recoveries: int = 0
    returned: int = 0
    """Newcomers that have become members."""
    slowest: float = 0.0
    """Seconds of the slowest recovery, since the last of its losses was known."""
    waited: float = 0.0
    """Seconds of the slowest recovery as a whole: others may have waited for a rank that hung, until it was found."""
    deviation: float = 0.0
    seconds: float = 0.0
    why: str = ""


def judge(result: Result, script: Script, want: Found) -> tuple[str, float]:
    """How a schedule has ended, and the largest relative difference of its numbers.

    Raises:
        AssertionError: If it must not end so.
    """
    stuck = [o for o in result.outcomes if o.state == "running"]
    assert not stuck, "\n".join(
        f"slot {o.slot} {'hangs' if o in stuck else o.state}, {o.exit_code}\n{o.error}{o.stacks}\n{o.output[-1500:]}"
        for o in (stuck + [o for o in result.outcomes if o not in stuck])
    )
    gone = gone_of(result)
    raised = {o.slot: o.error for o in result.outcomes if o.state == "raised"}
    if isinstance(result, Supervised):
        _judge_supervisor(result, script)
        assert bool(result.code) == bool(raised or not result.survivors), (result.code, result.cause, raised)
    assert gone <= script.victims, f"slots {sorted(gone - script.victims)} have gone of themselves"
    if not raised:
        if gone == set(range(sum(script.degrees))):
            return "all dead", 0.0
        return "same", compare(Found(result.survivors, result.directory), want, gone)
    assert not result.survivors, f"slots {sorted(raised)} ended and {sorted(result.survivors)} went on: {raised}"
    replicas = _replicas(script)
    mistakes = [slot for slot in script.of_kind("raise") if "PlannedError" in raised.get(slot, "")]
    mistakes += [slot for slot in script.of_kind("raise") if "InjectedFault" in raised.get(slot, "")]
    if mistakes:
        mates = next(replica for replica in replicas if mistakes[0] in replica) - {mistakes[0]}
        assert mates <= gone, f"slot {mistakes[0]} raised alone, and its exception ended the job: {raised}"
        return "one's mistake", 0.0
    for error in raised.values():
        assert "only copies" in error, error
    assert all(gone & replica for replica in replicas), f"a copy of everything was left: {sorted(gone)} gone, {raised}"
    return "lost", 0.0


def judge_rejoining(result: Supervised, script: Script, want: Found) -> tuple[str, float]:
    """As :func:`judge`, where everybody who is lost is started again."""
    assert not result.left, f"temporary files are left: {result.left}"
    members = {number: value for number, value in result.survivors.items() if value["joined"]}
    raised = {o.slot: o.error for o in result.outcomes if o.state == "raised"}
    if result.code == 0:
        assert members, "nobody has seen the end"
        partial = any(0 in change["degrees_after"] for change in _changes(result.directory / "rows" / FILE_NAME))
        absent = set(range(sum(script.degrees))) - members.keys()
        return "same", compare(Found(members, result.directory), want, absent, partial)
    assert not members, f"slots {sorted(members)} went on, and the job has ended with {result.code}: {result.cause}"
    if "only copies" in result.cause:
        assert all(script.victims & replica for replica in _replicas(script)), result.cause
        return "lost", 0.0
    if script.of_kind("raise") and any("PlannedError" in e or "InjectedFault" in e for e in raised.values()):
        return "one's mistake", 0.0
    assert script.victims == set(range(sum(script.degrees))), result.cause
    return "all dead", 0.0


def gone_of(result: Result) -> set[int]:
    """Who has died or left."""
    return {o.slot for o in result.outcomes if o.state == "died"}


def _replicas(script: Script) -> list[set[int]]:
    firsts = [sum(script.degrees[:k]) for k in range(len(script.degrees))]
    return [set(range(first, first + degree)) for first, degree in zip(firsts, script.degrees, strict=True)]


def _judge_supervisor(result: Supervised, script: Script) -> None:
    """It has blamed whom it must, soon, and left nothing."""
    for outcome in result.outcomes:
        told = outcome.exit_code in (0, -15) and outcome.state == "died"
        assert not told or outcome.slot in script.of_kind("term"), f"slot {outcome.slot} left unasked\n{result.output}"
    hung = {int(s): how for s, how in re.findall(r"slot (\d) \(pid \d+\) died: hung: (.+?) \(", result.output)}
    assert hung.keys() <= script.of_kind("stop", "hang"), f"{hung} blamed\n{result.output[-3000:]}"
    stopped = [float(s) for s in re.findall(r"is stopped \(SIGSTOP\) since ([\d.]+) s", result.output)]
    assert all(seconds < _FOUND_SECONDS for seconds in stopped), f"stopped ranks were found after {stopped} s"
    if result.code == 0:
        told = result.output.count("Traceback")
        assert told <= len(script.of_kind("raise")), result.output[-3000:]
    assert not result.left, f"temporary files are left: {result.left}"


class Runner:
    """Runs schedules.

    Args:
        directory: For all their files.
        rejoining: Whether everybody who is lost is started again.
    """

    def __init__(self, directory: Path, rejoining: bool = False) -> None:
        self.directory, self.rejoining = directory, rejoining
        self.crew, self.supervising = Crew(), SupervisingProcess()

    def close(self) -> None:
        self.crew.close()
        self.supervising.close()

    def run(self, seed: int) -> Line:
        """Run the schedule of a seed."""
        script = draw_rejoining(seed) if self.rejoining else draw(seed)
        began, directory = time.monotonic(), self.directory / str(seed)
        line = Line(seed, script, "WRONG")
        try:
            want = undisturbed(self._world, script, self.directory)
            began = time.monotonic()
            result = (
                self.supervising.run_script(script, directory, **(_AT_ONCE if self.rejoining else {}))
                if script.kinds
                else run_script(self._world, script, directory)
            )
            line.seconds, line.gone = time.monotonic() - began, gone_of(result)
            if isinstance(result, Supervised) and result.code == -1:
                raise AssertionError(f"{result.cause}\n{result.output[-3000:]}\n{[o.stacks for o in result.outcomes]}")
            if self.rejoining:
                assert isinstance(result, Supervised)
                line.end, line.deviation = judge_rejoining(result, script, want)
            else:
                line.end, line.deviation = judge(result, script, want)
        except AssertionError as error:
            line.why = str(error) or traceback.format_exc()
        changes = _changes(directory / "rows" / FILE_NAME)
        line.recoveries, line.returned = len(changes), sum(len(change["joined"]) for change in changes)
        for whole, since_known in recoveries(directory):
            line.waited, line.slowest = max(line.waited, whole), max(line.slowest, since_known)
        if line.end != "WRONG":
            shutil.rmtree(directory, ignore_errors=True)
        return line

    def _world(self, n: int, fresh: bool = False) -> World:
        return World(self.crew, n, fresh)


def _changes(path: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(path) if event["event"] == "change"] if path.exists() else []


_runner: Runner | None = None


def _begin(directory: Path, rejoining: bool) -> None:
    """A process that runs schedules begins."""
    global _runner
    _runner = Runner(directory / str(os.getpid()), rejoining)
    Finalize(None, _runner.close, exitpriority=10)


def _run(seed: int, deadline: float) -> Line | None:
    assert _runner is not None
    return _runner.run(seed) if time.monotonic() < deadline else None


def summary(lines: list[Line], seconds: float, left: dict[str, list[str]]) -> list[str]:
    """The table."""
    ends, faults = Counter(line.end for line in lines), Counter[str]()
    for line in lines:
        faults.update(line.script.kind(slot) for slot in line.gone)
        faults.update(["raise"] * (line.end == "one's mistake"))
    slowest = max(lines, key=lambda line: line.slowest)
    waited = max(lines, key=lambda line: line.waited)
    worst = max(lines, key=lambda line: line.deviation)
    longest = max(lines, key=lambda line: line.seconds)
    wrong = [line for line in lines if line.end == "WRONG"]
    supervised = sum(bool(line.script.kinds) for line in lines)
    table = [
        ("schedules", f"{len(lines)} in {seconds:.0f} s, {supervised} of them under the package's supervisor"),
        ("ended", ", ".join(f"{count} {end}" for end, count in ends.most_common())),
        ("faults", ", ".join(f"{count} {kind}" for kind, count in faults.most_common()) or "none"),
        ("recoveries", str(sum(line.recoveries for line in lines))),
        *((("came back", str(back)),) if (back := sum(line.returned for line in lines)) else ()),
        ("worst deviation", f"{worst.deviation:.1e} (seed {worst.seed})"),
        ("slowest recovery", f"{slowest.slowest:.3f} s (seed {slowest.seed}, degrees {slowest.script.degrees})"),
        ("... with waiting", f"{waited.waited:.3f} s (seed {waited.seed}), until who else hung was found"),
        ("longest schedule", f"{longest.seconds:.1f} s (seed {longest.seed})"),
        *((f"{what} left", ", ".join(names) or "none") for what, names in left.items()),
        ("wrong", "none" if not wrong else ""),
    ]
    return [f"{name:<22}{text}".rstrip() for name, text in table] + [
        f"  seed {line.seed}: {(line.why.strip().splitlines() or ['?'])[0][:150]}\n"
        f"    again: {os.path.relpath(sys.executable)} -m tests.recovery.schedules --seeds {line.seed}"
        f"{' --rejoin' if line.script.patience else ''}"
        for line in wrong
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 100], help="one seed, or the first and the end")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no schedule after that")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    parser.add_argument("--rejoin", action="store_true", help="start everybody again who is lost")
    options = parser.parse_args()
    seeds = range(*options.seeds) if len(options.seeds) == 2 else options.seeds
    directory, began = Path(tempfile.mkdtemp(prefix="schedules-")), time.monotonic()
    deadline = began + 60 * options.minutes
    # everybody's temporary files, so that those that are left can be told
    temporary = directory / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    shared = set(os.listdir("/dev/shm"))
    lines: list[Line] = []
    mark_session()
    begin = (directory, options.rejoin)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), _begin, begin) as pool:
        for done in as_completed([pool.submit(_run, seed, deadline) for seed in seeds]):
            line = done.result()
            if line is None:
                continue
            lines.append(line)
            if line.end == "WRONG":
                print(f"seed {line.seed}: {line.script}\n{line.why[:12000]}\n", flush=True)
            if sys.stderr.isatty() or len(lines) % 25 == 0:
                print(f"{len(lines)} done, {sum(each.end == 'WRONG' for each in lines)} wrong", file=sys.stderr)
    processes = [line for line in map(command_line, sorted(session_processes())) if "resource_tracker" not in line]
    left = {
        "processes": processes,
        "/dev/shm": sorted(set(os.listdir("/dev/shm")) - shared),
        "temporary files": sorted(os.listdir(temporary)),
    }
    print("\n".join(summary(lines, time.monotonic() - began, left)))
    failed = any(line.end == "WRONG" for line in lines) or any(left.values())
    if failed:
        print(f"kept: {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
