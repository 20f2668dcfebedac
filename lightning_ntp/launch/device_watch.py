"""What the supervisor asks of somebody who watches the devices of a job, in the launching process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class DeviceWatch(Protocol):
    """Watches devices, and says which ranks shall end or may start. All of it returns at once but :meth:`unfit`."""

    def check(self, slots: int) -> None:
        """Before anything starts.

        Args:
            slots: How many there are, spares included.

        Raises:
            ValueError: If it cannot watch what it was told to.
        """

    def begin(self, job_dir: Path) -> None:
        """The job begins. Threads may start."""

    def started(self, slot: int) -> None:
        """A rank has started."""

    def ended(self, slot: int) -> None:
        """A rank has ended."""

    def condemned(self) -> Mapping[int, str]:
        """Slots whose rank shall end now, each with the reason. Everyone is named once."""

    def failed(self) -> str:
        """Why the job must end, for its user; empty as long as it need not."""

    def leaving(self) -> Mapping[int, str]:
        """Slots whose rank was told to leave as planned and has not yet, each with the reason. One that has joined
        nobody so far has nothing to take along, so it can be ended."""

    def sent_away(self, slot: int) -> bool:
        """Whether a rank that has left is to be started again once its device is fit for it."""

    def unfit(self, slot: int) -> str:
        """Why the device of a slot is not fit for a new rank; empty if nothing speaks against it.

        Asked in a thread of its own, so it may take seconds. If it is not fit, it is asked again after the backoff.
        """

    def pardon(self, slot: int) -> None:
        """A person demands that a slot is started again."""

    def close(self) -> None:
        """The job is over: threads and processes end."""
