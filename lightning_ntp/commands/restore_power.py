"""``lightning-ntp restore-power``: put back limits, clocks and profiles that a job has left when it was killed."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_ntp.power.entries import CLAIM, CLOCKS, Entry, show
from lightning_ntp.power.files import DIRECTORY_VARIABLE, default_directory
from lightning_ntp.power.journal import Journal, Leftovers
from lightning_ntp.power.levers import Levers, Nvml
from lightning_ntp.power.putting_back import Result, Status, put_back

_SECONDS = 15.0
_DYING_SECONDS = 2.0
"""A process that was killed still holds its journal until the last of its threads has come back from the disk."""


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-ntp restore-power`` with ``args`` (default: the process's arguments after the subcommand).

    Raises:
        SystemExit: With status 1 if something is not put back.
    """
    options = _parser().parse_args(sys.argv[2:] if args is None else args)
    directory = options.directory or default_directory()
    journal = Journal(directory, lambda line: print(line, file=sys.stderr))
    leftovers = Leftovers(journal, change=not options.dry_run)
    leftovers.refresh()
    deadline = time.monotonic() + _DYING_SECONDS
    while any(found.owner.seems_alive(journal.owner) is False for found in leftovers.alive):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
        leftovers.refresh()
    for found in leftovers.alive:
        gpus = {entry.gpu for entry in found.entries if entry.lever != CLAIM}
        how = "somebody puts them back, or it dies" if found.owner.seems_alive(journal.owner) is False else "it lives"
        print(f"left alone: {len(gpus)} GPUs of job {found.entries[0].job!r}, {found.owner}: {how} ({found.path})")
    entries = leftovers.entries()
    if not entries:
        print(f"nothing to put back ({directory})")
    results = _put_all_back(entries, leftovers, not options.dry_run, options.timeout)
    for entry in entries:
        result = results.get(entry)
        late = Result(Status.LATE, f"the driver has not answered within {options.timeout:g} s")
        print(f"{entry.gpu} {entry.lever}: {_text(entry, result or late, options.dry_run)}")
    missed = [entry for entry in entries if entry not in results or not results[entry].over]
    if missed:
        print(f"\n{len(missed)} of {len(entries)} could not be put back; they stay in the journal ({directory})")
    sys.stdout.flush()
    if len(results) < len(entries):
        os._exit(1)  # not sys.exit(): a thread hangs in the driver, and holds pynvml's locks
    leftovers.close()
    if missed:
        raise SystemExit(1)


def _put_all_back(entries: list[Entry], leftovers: Leftovers, write: bool, seconds: float) -> dict[Entry, Result]:
    """What has become of each, as far as the driver has answered; a GPU that hangs does not hold up the others."""
    results: dict[Entry, Result] = {}
    nvml = Nvml()

    def run(gpu: str) -> None:
        levers = Levers(gpu, nvml)
        for entry in [entry for entry in entries if entry.gpu == gpu]:
            newer = entry.lever == CLOCKS and leftovers.newer_elsewhere(entry)
            try:
                result = put_back(levers, entry, newer, write)
            except ImportError as error:
                result = Result(Status.FAILED, f"nvidia-ml-py cannot be imported ({error})")
            if result.over and write:
                leftovers.drop(entry)
            results[entry] = result

    threads = [threading.Thread(target=run, args=(gpu,), daemon=True) for gpu in {entry.gpu for entry in entries}]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(results)


def _text(entry: Entry, result: Result, dry: bool) -> str:
    what = f"{show(entry.lever, entry.first)} (job {entry.job!r} had set {show(entry.lever, entry.after)})"
    if result.status is Status.DONE:
        return f"{'would be put back' if dry else 'put back'}: {what}"
    if result.status is Status.LEFT:
        return f"left as it is: {result.why}"
    hint = "; run this as root" if result.status is Status.DENIED else ""
    return f"not put back: {what}: {result.why}{hint}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ntp restore-power",
        description="Put back power limits, clocks and workload power profiles of GPUs on this machine that jobs have"
        " left which were killed together with their helper. What somebody else has changed since is left as it is."
        " Writing takes root.",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; nothing is written")
    parser.add_argument(
        "--directory", type=Path, help=f"where journals lie (default: ${DIRECTORY_VARIABLE}, or see docs/power.md)"
    )
    parser.add_argument("--timeout", type=float, default=_SECONDS, metavar="SECONDS", help="for the driver (15)")
    return parser
