"""What tests of sources share: a job as a source sees it, and what was said and told."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import strategies as st

from lightning_ntp.health import Finding, WatchedJob

GPUS = {slot: f"GPU-{slot}" for slot in range(4)}
SECONDS = 10.0
"""What must not block or work without end is over long before."""


@dataclass
class Job:
    """A job, as a source sees it."""

    live: set[int] = field(default_factory=lambda: set(GPUS))
    devices: dict[int, str] = field(default_factory=lambda: dict(GPUS))
    over: bool = False

    def __post_init__(self) -> None:
        self.watched = WatchedJob(Path(), lambda: dict(self.devices), lambda: sorted(self.live), lambda: self.over)


class Told:
    """What is logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __call__(self) -> list[str]:
        """Since it was called last."""
        messages = [record.getMessage() for record in self._caplog.records if record.levelno >= logging.WARNING]
        self._caplog.clear()
        assert all("\n" not in message and len(message) < 1500 for message in messages)
        return messages


def short(findings: list[Finding]) -> list[tuple[str | int, str, str]]:
    """Where, what to do or that it is over, and why."""
    assert {finding.signal for finding in findings} <= {"maintenance"}
    return [(each.gpu or each.slot, "over" if each.clears else str(each.action), each.text) for each in findings]


PIECES = st.sampled_from(
    [
        *("slot", "gpu", "host", "1", "drain", "log", "{", "}", '"', ":", ",", "[", "]", " ", "\n", "\r\n", "#", "\\"),
        *('{"slot": 1, "action": "drain"}', '"action"', "null", "1e999", "NaN", "\x00", "\u2028", "\ufeff", "é"),
    ]
)
"""Of what somebody may have written."""
