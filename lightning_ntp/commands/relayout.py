"""``lightning-ntp relayout``: let the slots of a running job go back to their places, from a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_ntp.commands.jobs import add_job, chosen_job
from lightning_ntp.launch.jobs import relayout_demand


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-ntp relayout`` with ``args`` (default: the process's arguments after the subcommand).

    Raises:
        SystemExit: With status 2 and one line that says what is wrong.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    job = chosen_job(parser, options.job)
    relayout_demand(job.directory).touch()
    print(f"the slots of job {job.name} go back to their places beside one of the next training steps")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ntp relayout",
        description="After losses and returns the slots of a replica may hold other parts of the model than at launch,"
        " which is as right, but perhaps not as near to those they talk to. Let them go back, beside a training step.",
    )
    add_job(parser)
    return parser
