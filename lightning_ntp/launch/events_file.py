"""A run's ``events.jsonl``, for whoever reads it; :mod:`lightning_ntp.engine.events` writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

FILE_NAME = "events.jsonl"


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a file in order; lines that were cut off are left out."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(event, dict):
                yield event
