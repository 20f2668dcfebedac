"""Journals of owners that are dead, or somewhere else, or not even journals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_ntp.power.entries import POWER_LIMIT, Entry, Value
from lightning_ntp.power.owners import Owner


def dead_owner(**changed: Any) -> Owner:
    """One of this boot: the pid is that of this process, which was started at another time."""
    here = Owner.here()
    return replace(here, started=here.started - 1, **changed)


def left(gpu: str, first: Value, after: Value, lever: str = POWER_LIMIT, at: float = 1.0, **owner: Any) -> Entry:
    """An entry of a dead owner."""
    return Entry(gpu, lever, first, first, after, dead_owner(**owner), "gone", 1.0, at)


def leave(directory: Path, *entries: Entry, name: str = "dead", more: bytes = b"") -> Path:
    """A journal with these entries, and whatever else."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.jsonl"
    path.write_bytes(b"".join(entry.to_line() for entry in entries) + more)
    return path
