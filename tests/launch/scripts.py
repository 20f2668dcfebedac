"""Run small scripts as real processes, always with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

TIMEOUT = 60.0

#: A script that launches itself. No store is hosted, which spares the import of torch.
HEAD = """\
import os, sys, time
from datetime import timedelta
from lightning_ntp.launch import RankIdentity, StopRequest, is_rank, run_script
"""
LAUNCH = """\
if not is_rank():
    sys.exit(run_script({ranks}, store_address="127.0.0.1:9"{options}))
slot = RankIdentity.from_environ().slot
"""


def write(directory: Path, body: str, *, ranks: int = 2, options: str = "", before: str = "") -> Path:
    """``directory/script.py``: ``before`` runs in the supervisor too, ``body`` in the ranks only."""
    launch = LAUNCH.format(ranks=ranks, options=f", {options}" if options else "")
    path = directory / "script.py"
    path.write_text(HEAD + textwrap.dedent(before) + launch + textwrap.dedent(body))
    return path


def run(
    *command: str | Path, cwd: Path, stdin: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python *command`` to its end."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        input=stdin,
        # Buffered, so that a line which ranks print at the same moment stays in one piece.
        env={**os.environ, "PYTHONUNBUFFERED": "", **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@contextlib.contextmanager
def running(*command: str | Path, cwd: Path, session: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Start ``python *command`` in a session of its own; whatever is left of it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=session,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(directory: Path, pattern: str, count: int) -> list[Path]:
    """Wait until ``count`` files match."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        found = sorted(directory.glob(pattern))
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"{count} files {pattern} did not appear in {directory}: {list(directory.iterdir())}")


def alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not: an orphan's new parent may never reap it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    """Those of ``pids`` that still run after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
