"""The membership log in the job's store: written by ranks and by the supervisor, read by all.

Entry n is the value of the key ``ev/n``. Writing is a compare-and-set on the first free key, so the log has no gaps
and one order for everybody: the store's server is single-threaded.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import Protocol

from lightning_ntp.plan.membership import Entry

RECOVERABLE = "recoverable"
"""Key: the ranks go on without a member that dies, so a death is announced instead of ending the job."""


def entry_key(position: int) -> str:
    """Key of the entry at ``position``, counted from 1."""
    return f"ev/{position}"


FINISHED = "finished"
"""Value of :func:`left_key` if the others do not go on for long without the process."""


def left_key(uid: str) -> str:
    """Key that a process sets before it leaves in good order; its value says why it goes before the others do."""
    return f"left/{uid}"


def released_key(uid: str) -> str:
    """Key that a process sets before it leaves healthy, because the others have no place for it just now."""
    return f"released/{uid}"


def dismissed_key(uid: str) -> str:
    """Key that a member sets when a process that was to join did not do its part; its value says what happened."""
    return f"dismissed/{uid}"


class KeyValueStore(Protocol):
    """The part of torch's ``Store`` that the log needs."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class Log:
    """One writer's view of the log. Not for several threads at once, as little as the store's client is.

    Args:
        store: A client of its own.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._end = 1
        """All positions below this one are taken, as far as this writer knows."""

    def append(self, entry: Entry) -> int:
        """Write ``entry`` behind all others and return its position."""
        own = replace(entry, nonce=f"{os.getpid()}-{secrets.token_hex(6)}").encode()
        while True:
            position = self._end
            winner = self._store.compare_set(entry_key(position), "", own)
            self._end += 1
            if winner.decode() == own:
                return position

    def read_all(self) -> list[Entry]:
        """All entries so far."""
        entries: list[Entry] = []
        while self._store.check([entry_key(len(entries) + 1)]):
            entries.append(Entry.decode(self._store.get(entry_key(len(entries) + 1))))
        return entries
