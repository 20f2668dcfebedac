"""Several watches in one job: each sees everything, and any of them may object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lightning_ntp.launch.device_watch import DeviceWatch


class DeviceWatches:
    """Implements :class:`~lightning_ntp.launch.device_watch.DeviceWatch`.

    Args:
        watches: In the order in which they are asked.
    """

    def __init__(self, watches: Sequence[DeviceWatch]) -> None:
        self._watches = tuple(watches)

    def check(self, slots: int) -> None:
        for watch in self._watches:
            watch.check(slots)

    def begin(self, job_dir: Path) -> None:
        for watch in self._watches:
            watch.begin(job_dir)

    def started(self, slot: int) -> None:
        for watch in self._watches:
            watch.started(slot)

    def ended(self, slot: int) -> None:
        for watch in self._watches:
            watch.ended(slot)

    def condemned(self) -> Mapping[int, str]:
        return self._merged(watch.condemned() for watch in self._watches)

    def failed(self) -> str:
        return next(filter(None, (watch.failed() for watch in self._watches)), "")

    def leaving(self) -> Mapping[int, str]:
        return self._merged(watch.leaving() for watch in self._watches)

    def sent_away(self, slot: int) -> bool:
        return any(watch.sent_away(slot) for watch in self._watches)

    def unfit(self, slot: int) -> str:
        """Later ones are asked only if nothing speaks against the slot before: what they do for it may cost."""
        for watch in self._watches:
            if why := watch.unfit(slot):
                return why
        return ""

    def pardon(self, slot: int) -> None:
        for watch in self._watches:
            watch.pardon(slot)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # all of them, whatever one raises
            for watch in self._watches:
                closing.callback(watch.close)

    @staticmethod
    def _merged(found: Iterable[Mapping[int, str]]) -> Mapping[int, str]:
        merged: dict[int, str] = {}
        for each in found:
            merged = {**each, **merged} if each else merged
        return merged
