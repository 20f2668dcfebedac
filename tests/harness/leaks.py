"""What a test may not leave behind: processes, threads, signal handlers, environment variables, files in the cwd."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SESSION_VARIABLE = "LIGHTNING_NTP_TEST_SESSION"
"""Set for the whole session: marks processes that a test started, even when they were orphaned since."""

_ALLOWED_VARIABLES = {
    # set by pytest itself, and by libraries on first use; all but pytest's are restored anyway
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "CRC32C_SW_MODE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF2_BEHAVIOR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "COLUMNS",
    "LINES",
}
_ALLOWED_FILES = {"__pycache__", ".pytest_cache", ".hypothesis", ".coverage", ".mypy_cache", ".ruff_cache"}
_PATIENCE_SECONDS = 5.0


def mark_session() -> None:
    """Give this pytest process, and so all that it starts, a name of its own."""
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex


def session_processes() -> set[int]:
    """Pids of all processes started by this session: children, and marked descendants whoever their parent is."""
    mine, mark = os.getpid(), f"{SESSION_VARIABLE}={os.environ.get(SESSION_VARIABLE, '')}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == mine:
            continue
        try:
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            if parent == mine or mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:  # gone, or not ours to read
            continue
    return found


def command_line(pid: int) -> str:
    """Command line of a process for messages."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        text = "gone"
    return f"{pid}: {text or 'zombie'}"


def _is_ours(pid: int, server: int | None) -> bool:
    """Is it the fork server, one of its ranks, or a helper of the standard library that lives until the end?"""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return server in (pid, int(stat[1])) or b"multiprocessing.resource_tracker" in line


@contextmanager
def no_process_leaks(server: Callable[[], int | None]) -> Iterator[None]:
    """Fail if processes started inside still live a few seconds after the test.

    Args:
        server: gives the pid of the fork server, whose ranks live as long as the session does.
    """
    before = session_processes()
    yield
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        multiprocessing.active_children()  # reaps
        getattr(subprocess, "_cleanup", lambda: None)()
        left = {pid for pid in session_processes() - before if not _is_ours(pid, server())}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if left:
        names = [command_line(pid) for pid in sorted(left)]
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        raise AssertionError("the test left processes behind (now killed):\n" + "\n".join(names))


@contextmanager
def no_thread_leaks() -> Iterator[None]:
    """Fail if non-daemon threads started inside still run after the test."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        left = [t for t in threading.enumerate() if t not in before and not t.daemon]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert not left, f"the test left non-daemon threads running: {left}"


@contextmanager
def no_signal_handler_changes() -> Iterator[None]:
    """Fail (and put things right) if a signal's handler is another one after the test."""
    # SIGALRM is pytest-timeout's.
    numbers = [s for s in signal.Signals if s not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM)]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    changed = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != before[n]}
    for number in changed:
        if before[number] is not None:
            signal.signal(number, before[number])
    assert not changed, f"the test changed signal handlers: {changed}"


@contextmanager
def no_environment_changes() -> Iterator[None]:
    """Fail (and put things right) if environment variables differ after the test."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    current = after.get("PYTEST_CURRENT_TEST")
    os.environ.clear()
    os.environ.update(before)
    if current is not None:
        os.environ["PYTEST_CURRENT_TEST"] = current
    names = (before.keys() | after.keys()) - _ALLOWED_VARIABLES
    changed = {n: (before.get(n), after.get(n)) for n in sorted(names) if before.get(n) != after.get(n)}
    assert not changed, f"the test changed environment variables (before, after): {changed}"


@contextmanager
def no_file_leaks() -> Iterator[None]:
    """Fail if the test left files in the current directory, or another current directory."""
    directory = Path.cwd()
    before = {p.name for p in directory.iterdir()}
    yield
    here = Path.cwd()
    os.chdir(directory)
    assert here == directory, f"the test changed the current directory to {here}"
    left = {p.name for p in directory.iterdir()} - before - _ALLOWED_FILES
    left = {name for name in left if not name.startswith(".coverage")}
    assert not left, f"the test left files in {directory}: {sorted(left)}; use tmp_path"
