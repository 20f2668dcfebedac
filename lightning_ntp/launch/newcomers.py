"""Processes that were started again and are no members of the running job yet."""

from __future__ import annotations

from pathlib import Path

from lightning_ntp.launch.report import member_mark

REFUSED = 76
"""Exit code of a newcomer that the job does not take, and would not take the next time: another version of the code,
say. Of sysexits.h: "the remote system returned something invalid in a protocol exchange"."""


class Newcomers:
    """The slots whose process has still to become a member.

    Args:
        job_dir: Where a mark says that one has.
    """

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self._uids: dict[int, str] = {}

    def add(self, slot: int, uid: str) -> None:
        self._uids[slot] = uid

    def discard(self, slot: int) -> None:
        """It is a member, or has ended."""
        self._uids.pop(slot, None)

    def joined(self) -> list[int]:
        """Those that have become members; they count as newcomers until they are discarded."""
        return [slot for slot, uid in self._uids.items() if member_mark(self._job_dir, uid).exists()]

    def __contains__(self, slot: object) -> bool:
        return slot in self._uids
