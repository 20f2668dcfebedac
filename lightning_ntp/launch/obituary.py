"""Announce a death to the survivors, milliseconds after it: see :mod:`lightning_ntp.launch.log`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from lightning_ntp.launch.environment import SLOT, STORE
from lightning_ntp.launch.log import RECOVERABLE, Log, left_key
from lightning_ntp.launch.report import is_newcomer
from lightning_ntp.plan.membership import Entry

_PATIENCE = timedelta(seconds=5)

_expected = False


def expect_deaths() -> None:
    """In a rank: the job recovers from deaths, so lower slots may be gone at its end."""
    global _expected
    _expected = True


def announce_death(store: Any, uid: str, slot: int, reason: str, log: Log | None = None) -> bool:
    """Write into the membership log that a process is dead, so that the others go on without it.

    Never call it for a process that may still be alive: kill it first.

    Args:
        store: A client of the job's store, used by this thread alone.
        uid: The dead process's unique id.
        slot: Its slot.
        reason: For people, for example ``"SIGKILL"``.
        log: A log on the same store, to save walking the whole log each time.

    Returns:
        False, and nothing is written, if the process had left in good order or the job does not recover from deaths.
    """
    if not store.check([RECOVERABLE]) or store.check([left_key(uid)]):
        return False
    (log or Log(store)).append(Entry("dead", slot, uid, reason, at=time.monotonic()))
    return True


def is_first_survivor() -> bool:
    """In a rank: whether all lower slots are gone for good, so that it speaks for the job.

    A process that was started again and has not joined has no part in what the members have done.
    """
    if is_newcomer():
        return False
    # Not RankIdentity: Lightning's teardown has taken WORLD_SIZE away by then.
    slot = int(os.environ[SLOT])
    if slot == 0:
        return True
    if not _expected:
        return False
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = os.environ[STORE].rpartition(":")
    try:
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        entries = Log(store).read_all()
    except RuntimeError:  # the store is gone, and with it the caller who waits for a result
        return False
    return _gone(entries).issuperset(range(slot))


def _gone(entries: Iterable[Entry]) -> set[int]:
    """Slots without a rank that sees the job to its end."""
    gone: set[int] = set()
    for entry in entries:
        # who leaves in the middle names the generation that goes on without it
        if entry.kind == "dead" or entry.kind == "left" and entry.round:
            gone.add(entry.slot)
        gone.difference_update(join.slot for join in entry.joins)
    return gone
