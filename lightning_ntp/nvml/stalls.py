"""Whose driver call does not return: from who is in which call since when, findings that begin and end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from lightning_ntp.health.findings import Finding

EVENT_WAIT = "nvmlEventSetWait"
"""Devices can be read while it hangs."""
Calls = Iterable[tuple[str, str, float]]
"""Name, UUID of the device or ``""``, since when in seconds on the machine's monotonic clock."""


class Stalls:
    """Keeps which devices' calls hang.

    Args:
        seconds: What takes longer hangs.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stalled: set[str] = set()
        self._hanging: dict[str, str] = {}

    def heard(self, calls: Calls, gpus: Collection[str], now: float) -> Iterator[Finding]:
        """Calls that have not returned.

        Args:
            calls: All of them.
            gpus: The devices that are watched.
            now: On the same clock.
        """
        self._hanging = {}
        for name, gpu, since in calls:
            if now - since > self._seconds and name != EVENT_WAIT:
                text = f"{name} has not answered for {now - since:.0f} s"
                for each in [gpu] if gpu else gpus:  # a call about none holds up all of them
                    self._hanging.setdefault(each, text)
        yield from self._begin(gpus)

    def silent(self, gpus: Collection[str], text: str) -> Iterator[Finding]:
        """Nobody says anything any more."""
        self._hanging = dict.fromkeys(gpus, text)
        yield from self._begin(gpus)
        self._hanging = {}  # whoever says something next knows better

    def looked(self, gpu: str) -> Iterator[Finding]:
        """The driver has answered about a device. Until then a new process has only not asked yet."""
        if gpu in self._stalled and gpu not in self._hanging:
            self._stalled.discard(gpu)
            yield Finding("stalled", "the driver answers again", gpu, clears=True)

    def _begin(self, gpus: Collection[str]) -> Iterator[Finding]:
        for gpu in gpus:
            if gpu in self._hanging and gpu not in self._stalled:
                self._stalled.add(gpu)
                yield Finding("stalled", self._hanging[gpu], gpu)
