"""``lightning-ntp drain SLOT``: let a rank of a running job leave as planned, from a terminal."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from lightning_ntp.commands.jobs import add_arguments, chosen_job, refuse, report
from lightning_ntp.launch.jobs import leave_reason


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-ntp drain`` with ``args`` (default: the process's arguments after the subcommand).

    Raises:
        SystemExit: With status 2 and one line that says what is wrong; with 1 if the rank has not left in time.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    job = chosen_job(parser, options.job)
    if options.slot not in job.pids:
        refuse(parser, f"job {job.name} has no slot {options.slot}; it has {sorted(job.pids)}")
    pid = job.pids[options.slot]
    if len(job.pids) == 1:
        how = f"to stop the job, send SIGTERM to its launching process (pid {job.supervisor})"
        refuse(parser, f"slot {options.slot} is the last rank of job {job.name}; {how}")
    leave_reason(job.directory, options.slot).write_text(options.reason)
    os.kill(pid, signal.SIGTERM)
    print(f"slot {options.slot} (pid {pid}) of job {job.name} was asked to leave: it goes in one of the next training")
    print("steps, or at once if the job is not training now, which costs no more than a loss")
    report(parser, job, options, lambda now: options.slot not in now.pids, "left")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ntp drain",
        description="Let a rank of a running job on this machine leave: its part of the model goes to the others beside"
        " a training step, and no step is lost. During validation it leaves at once, which costs a batch.",
    )
    add_arguments(parser, "left")
    parser.add_argument("--reason", default="asked for by lightning-ntp drain", help="for the log")
    return parser
