"""Puts one lever back, wherever its entry comes from: this process's journal, or a dead owner's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_ntp.nvml.errors import CallError, Kind
from lightning_ntp.power.entries import CLOCKS, Entry, Value, same, unlike
from lightning_ntp.power.levers import Levers


class Status(str, Enum):
    """What has become of a setting, or of putting one back."""

    DONE = "done"
    REFUSED = "refused"
    """It is not allowed; nothing was written."""
    DENIED = "denied"
    """The driver does not let this process write."""
    UNSUPPORTED = "unsupported"
    """The GPU has no such lever."""
    FAILED = "failed"
    """The driver has failed, or the journal cannot be written."""
    LATE = "late"
    """The driver has not answered yet; it may still do it."""
    LEFT = "left"
    """Somebody else has changed it since: it is left as it is."""
    LOST = "lost"
    """There is no helper (any more)."""


@dataclass(frozen=True)
class Result:
    """One lever.

    Args:
        status: What has become of it.
        why: In words, if it is not done.
        now: The value that it has, if that is known; None may also be an unlocked clock.
    """

    status: Status
    why: str = ""
    now: Value = None

    @property
    def over(self) -> bool:
        """Of putting back: whether there is nothing more to do."""
        return self.status in (Status.DONE, Status.LEFT)


def put_back(levers: Levers, entry: Entry, newer_elsewhere: bool, write: bool = True) -> Result:
    """Give a lever its first value, if it still has the one that the owner of the entry has written.

    Args:
        levers: Of the entry's GPU.
        entry: What was moved.
        newer_elsewhere: Whether another owner has moved it later. Decides over clocks, which cannot be read.
        write: Otherwise it is only said what would be done.

    Returns:
        What was done, or would be. Raises nothing of NVML's.
    """
    try:
        if entry.lever == CLOCKS:
            return _unlock(levers, entry.first, newer_elsewhere, write)
        return _write_back(levers, entry, write)
    except CallError as error:
        return failure(error)


def _unlock(levers: Levers, first: Value, newer_elsewhere: bool, write: bool) -> Result:
    if newer_elsewhere:
        return Result(Status.LEFT, "another owner has locked its clocks since")
    if write and isinstance(first, tuple):
        levers.lock_clocks(*first)
    elif write:
        levers.unlock_clocks()
    return Result(Status.DONE, now=first)


def _write_back(levers: Levers, entry: Entry, write: bool) -> Result:
    now, first = levers.read(entry.lever), entry.first
    if same(now, first):
        return Result(Status.DONE, now=now)
    if not entry.is_ours(now):
        what = unlike(entry.lever, now, entry.after)
        return Result(Status.LEFT, f"{what}: somebody else has changed it, or the GPU was reset", now)
    assert isinstance(first, int | frozenset)
    if not write:
        return Result(Status.DONE, now=first)
    levers.write(first)
    now = levers.read(entry.lever)
    if same(now, first):
        return Result(Status.DONE, now=now)
    return Result(Status.FAILED, unlike(entry.lever, now, first), now)


def failure(error: CallError) -> Result:
    """What an error of NVML means for who wants to move a lever."""
    status = {Kind.PERMISSION: Status.DENIED, Kind.UNSUPPORTED: Status.UNSUPPORTED}.get(error.kind, Status.FAILED)
    return Result(status, str(error))
