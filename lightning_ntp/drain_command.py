"""``lightning-ntp drain SLOT``: let a rank of a running job leave as planned, from a terminal."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from lightning_ntp.launch.jobs import RunningJob, leave_reason, running_jobs

_TICK = 0.1


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-ntp drain`` with ``args`` (default: the process's arguments after the subcommand).

    Raises:
        SystemExit: With status 2 and one line that says what is wrong; with 1 if the rank has not left in time.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    job = _chosen(parser, options.job)
    if options.slot not in job.pids:
        parser.exit(2, f"{parser.prog}: error: job {job.name} has no slot {options.slot}; it has {sorted(job.pids)}\n")
    pid = job.pids[options.slot]
    leave_reason(job.directory, options.slot).write_text(options.reason)
    os.kill(pid, signal.SIGTERM)
    print(f"slot {options.slot} (pid {pid}) of job {job.name} was asked to leave: it goes in one of the next training")
    print("steps, or at once if the job is not training now, which costs no more than a loss")
    deadline = time.monotonic() + options.wait
    while time.monotonic() < deadline:
        if options.slot not in _now(job).pids:
            print(f"slot {options.slot} has left")
            return
        time.sleep(_TICK)
    if options.wait:
        parser.exit(1, f"slot {options.slot} has not left within {options.wait:g} s\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ntp drain",
        description="Let a rank of a running job on this machine leave: its part of the model goes to the others beside"
        " a training step, and no step is lost. During validation it leaves at once, which costs a batch.",
    )
    parser.add_argument("slot", type=int, metavar="SLOT", help="which one, as in the log: slot 0, 1, ...")
    parser.add_argument("--reason", default="asked for by lightning-ntp drain", help="for the log")
    parser.add_argument("--job", help="which job, if several run: its id, or how it begins")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait until it has left")
    return parser


def _chosen(parser: argparse.ArgumentParser, name: str | None) -> RunningJob:
    jobs = running_jobs()
    fitting = [job for job in jobs if name is None or job.name.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    there = "".join(f"\n  {j.name} (pid {j.supervisor}, slots {sorted(j.pids)})" for j in jobs) or " none"
    what = f"--job={name!r} fits {len(fitting)} jobs" if name is not None else "say which job with --job"
    parser.exit(2, f"{parser.prog}: error: {what if jobs else 'no job runs here'}; running:{there}\n")


def _now(job: RunningJob) -> RunningJob:
    same = [each for each in running_jobs() if each.name == job.name]
    return same[0] if same else RunningJob(job.name, job.supervisor, {}, job.directory)
