"""What the supervisor says while a job runs: one line per event."""

from __future__ import annotations

import contextlib
import sys
import time


def say(line: str) -> None:
    """Print a line with the time of day, on stderr. Where nobody reads any more, the job goes on without."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
