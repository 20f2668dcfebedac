"""What the supervisor says while a job runs: one line per event."""

from __future__ import annotations

import sys
import time


def say(line: str) -> None:
    """Print a line with the time of day, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
