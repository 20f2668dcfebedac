"""What the commands that speak to a running job have in common: which job, which slot, and waiting for what comes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NoReturn

from lightning_ntp.launch.jobs import RunningJob, running_jobs

_TICK = 0.1


def add_arguments(parser: argparse.ArgumentParser, wait_for: str) -> None:
    """Add ``SLOT``, ``--job`` and ``--wait``."""
    parser.add_argument("slot", type=int, metavar="SLOT", help="which one, as in the log: slot 0, 1, ...")
    add_job(parser)
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help=f"wait until it has {wait_for}")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add ``--job``."""
    parser.add_argument("--job", help="which job, if several run: its id, or how it begins")


def chosen_job(parser: argparse.ArgumentParser, name: str | None) -> RunningJob:
    """The job that is meant.

    Raises:
        SystemExit: With status 2 and a list of the jobs, if that is not clear.
    """
    jobs = running_jobs()
    fitting = [job for job in jobs if name is None or job.name.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    there = "".join(f"\n  {j.name} (pid {j.supervisor}, slots {sorted(j.pids)})" for j in jobs) or " none"
    what = f"--job={name!r} fits {len(fitting)} jobs" if name is not None else "say which job with --job"
    refuse(parser, f"{what if jobs else 'no job runs here'}; running:{there}")


def refuse(parser: argparse.ArgumentParser, why: str) -> NoReturn:
    """Raises:
    SystemExit: With status 2 and one line that says what is wrong.
    """
    parser.exit(2, f"{parser.prog}: error: {why}\n")


def report(
    parser: argparse.ArgumentParser,
    job: RunningJob,
    options: argparse.Namespace,
    done: Callable[[RunningJob], bool],
    what: str,
) -> None:
    """Wait as long as ``--wait`` says, and say what has come of it.

    Raises:
        SystemExit: With status 1 if nothing has.
    """
    if not options.wait:
        return
    if not wait_until(job, done, options.wait):
        parser.exit(1, f"slot {options.slot} has not {what} within {options.wait:g} s\n")
    print(f"slot {options.slot} has {what}")


def wait_until(job: RunningJob, done: Callable[[RunningJob], bool], seconds: float) -> bool:
    """Whether ``done`` holds of the job within so many seconds. A job that has ended has no ranks."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        now = [each for each in running_jobs() if each.name == job.name]
        if done(now[0] if now else RunningJob(job.name, job.supervisor, job.ranks, {}, job.directory)):
            return True
        time.sleep(_TICK)
    return False
