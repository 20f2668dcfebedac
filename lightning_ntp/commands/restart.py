"""``lightning-ntp restart SLOT``: start a rank of a running job again, from a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_ntp.commands.jobs import add_arguments, chosen_job, refuse, report
from lightning_ntp.launch.jobs import restart_demand


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-ntp restart`` with ``args`` (default: the process's arguments after the subcommand).

    Raises:
        SystemExit: With status 2 and one line that says what is wrong; with 1 if no rank has started in time.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    job, slot = chosen_job(parser, options.job), options.slot
    if not 0 <= slot < job.ranks:
        refuse(parser, f"job {job.name} has no slot {slot}; it was launched with slots 0 to {job.ranks - 1}")
    if slot in job.pids:
        refuse(parser, f"slot {slot} of job {job.name} is alive (pid {job.pids[slot]}); drain it first to replace it")
    restart_demand(job.directory, slot).touch()
    print(f"slot {slot} of job {job.name} is to be started again; what comes of it is told by the job, on its stderr")
    report(parser, job, options, lambda now: slot in now.pids, "started")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ntp restart",
        description="Start a rank of a running job on this machine again, whether it has died or was drained: once its"
        " device is repaired, say. It joins the others while they train. max_restarts and may_restart are not asked.",
    )
    add_arguments(parser, "started")
    return parser
