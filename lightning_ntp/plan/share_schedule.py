"""From which batch on replicas take which numbers of samples: one list that all ranks of a fit have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_ntp.plan.dealing import Counts

_KEPT = 256
"""Entries: steps that are done again, after a way back to neighbours' copies, need those of their time."""


class Entry(NamedTuple):
    """From this batch on these counts hold."""

    epoch: int
    batch: int
    """Its number in the epoch."""
    counts: Counts | None
    """None: equal, as in the launch."""


@dataclass(frozen=True)
class ShareSchedule:
    """The shares of a fit so far and from now on. A value: an announcement gives another one.

    Args:
        version: Of the newest announcement; a larger one is newer, and knows all of the smaller one.
        entries: In order; before the first of them shares are equal.
    """

    version: int = 0
    entries: tuple[Entry, ...] = ()

    @property
    def newest(self) -> Counts | None:
        """The counts that hold at last."""
        return self.entries[-1].counts if self.entries else None

    def at(self, epoch: int, batch: int) -> Counts | None:
        """The counts of a batch; None if shares are equal."""
        for entry in reversed(self.entries):
            if (entry.epoch, entry.batch) <= (epoch, batch):
                return entry.counts
        return None

    def announce(self, version: int, entry: Entry | None) -> ShareSchedule:
        """The schedule after an announcement.

        Args:
            version: Of the announcement.
            entry: None if nothing comes of it. It begins where the last one does, if that is later: whoever had drawn
                the most batches may be gone.
        """
        if entry is None:
            return replace(self, version=version)
        if self.entries:
            last = self.entries[-1]
            epoch, batch = max((entry.epoch, entry.batch), (last.epoch, last.batch))
            entry = Entry(epoch, batch, entry.counts)
        before = [known for known in self.entries if known[:2] != entry[:2]]
        return ShareSchedule(version, (*before[1 - _KEPT :], entry))

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"version": self.version, "entries": [list(entry) for entry in self.entries]}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ShareSchedule:
        """From :meth:`record`."""
        entries = (Entry(epoch, batch, counts and tuple(counts)) for epoch, batch, counts in record["entries"])
        return cls(int(record["version"]), tuple(entries))
