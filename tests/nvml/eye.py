"""One device looked at from the test's own process: what a poll reads, and what is new about it."""

from __future__ import annotations

from lightning_ntp.health.findings import Finding
from lightning_ntp.nvml.changes import Changes
from lightning_ntp.nvml.library import Library
from lightning_ntp.nvml.reader import DeviceReader, Poll
from tests.nvml.mock import MockNvml


class Eye:
    """Looks at one device, at times that the test names.

    Args:
        mock: the driver.
        gpu: number of the device.
        uuid: what to watch; the device if not given.
    """

    def __init__(self, mock: MockNvml, gpu: int = 0, uuid: str = "") -> None:
        self.uuid = uuid or str(mock.get("uuid", gpu))
        self.library = Library()
        self.library.start()
        self.reader = DeviceReader(self.uuid, self.library)
        self.changes = Changes(self.uuid)
        self.now = 0.0
        self.last: Poll | None = None

    def look(self, seconds: float = 1.0) -> list[Finding]:
        """Look again after so many seconds: what is new."""
        self.now += seconds
        self.last = self.reader.poll()
        findings = self.changes.see(self.last, self.now)
        healthy = self.changes.healthy(self.last)
        return findings + ([healthy] if healthy else [])

    def new(self, seconds: float = 1.0) -> list[tuple[str, int | None, bool]]:
        """Signal, code and whether it is over, of all that is new but the check."""
        return [(f.signal, f.code, f.clears) for f in self.look(seconds) if f.signal != "healthy"]

    @property
    def values(self) -> dict[str, float]:
        """What was read last."""
        assert self.last is not None
        return dict(self.last.reading.values)

    @property
    def unsupported(self) -> frozenset[str]:
        """What the last look said nothing about."""
        assert self.last is not None
        return self.last.reading.unsupported


def is_healthy(findings: list[Finding]) -> int | None:
    """The code of the check that was passed; None if none was."""
    return next((finding.code for finding in findings if finding.signal == "healthy"), None)
