"""Nothing outlives its parent: the kernel's parent-death signal and the walk over descendants (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when the thread that forked it ends.

    The setting survives ``execve`` and is cleared in this process's own children. A parent that died before the call
    would never trigger it, hence the check of ``getppid``. Does nothing outside Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def live_on_after_parent() -> None:
    """Undo :func:`die_with_parent`, for a process that watches its parent by itself."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that a dead rank's own children can still be found."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> set[int]:
    """Living children of ``pid``."""
    return set(_children_by_parent().get(pid, ()))


def descendants(roots: set[int]) -> set[int]:
    """All living descendants of ``roots``, without them."""
    children = _children_by_parent()
    found: set[int] = set()
    stack = list(roots)
    while stack:
        for child in children.get(stack.pop(), ()):
            if child not in found and child not in roots:
                found.add(child)
                stack.append(child)
    return found


def _children_by_parent() -> dict[int, list[int]]:
    """From ``/proc``; empty where there is none."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                # A process may vanish between listdir and open.
                with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{entry}/stat", "rb") as f:
                    # The second field, the command name, may contain spaces and brackets.
                    state, parent = f.read().rpartition(b")")[2].split()[:2]
                    if state not in (b"Z", b"X"):
                        children.setdefault(int(parent), []).append(int(entry))
    return children


def kill_trees(roots: set[int]) -> None:
    """SIGKILL ``roots`` and their descendants: DataLoader workers would otherwise linger until they notice."""
    victims = roots | descendants(roots)
    for pid in victims:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
