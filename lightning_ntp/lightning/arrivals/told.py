"""What ranks have told each other before training began: a newcomer sets up alone, and hears it afterwards.

Names and versions of runs, directories of checkpoints and whatever a user broadcasts while the trainer is set up must
be the same on a rank that joins later.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from typing import TypeVar

from lightning_ntp.comm import Runtime
from lightning_ntp.lightning.arrivals import calls

_LARGEST = 1 << 20
"""Bytes of a value that is kept; in place of a larger one a newcomer takes its own."""
_TICK = 0.02
_JOB = "job"

T = TypeVar("T")


class Told:
    """The broadcasts of one trainer call, up to the beginning of its training.

    Args:
        current: The rank's runtime.
        call: The number of the call in the script.
        fits: Whether it is a fit; nobody joins another one.
    """

    def __init__(self, current: Runtime, call: int, fits: bool) -> None:
        self._runtime, self._call = current, call
        self._count, self._started = 0, not fits

    def broadcast(self, own: T, send: Callable[[], T]) -> T:
        """The value that rank 0 has, or had.

        Args:
            own: This rank's.
            send: Makes the broadcast among the members.
        """
        if self._started:
            return send()
        self._count += 1
        if self._runtime.joining:
            return self._heard(self._count, own)
        value = send()
        if self._runtime.generation.rank == 0:
            try:
                content = pickle.dumps(value)
            except Exception:  # it may be anything
                return value
            if len(content) <= _LARGEST:
                self._runtime.membership.post(self._key(self._count), content)
        return value

    def training_starts(self, job: Callable[[], dict[str, str]]) -> None:
        """Everything that is told from now on is told to members.

        Args:
            job: Describes what this rank runs.
        """
        if not self._started and not self._runtime.joining and self._runtime.generation.rank == 0:
            self._runtime.membership.post(calls.key(self._call, _JOB), json.dumps(job()))
        self._started = True

    def job(self) -> dict[str, str] | None:
        """What the members run, once their training has started."""
        found = self._runtime.membership.find(calls.key(self._call, _JOB))
        described: dict[str, str] | None = None if found is None else json.loads(found)
        return described

    def is_over(self) -> bool:
        """Whether the members have finished the call."""
        return self._runtime.membership.find(calls.key(self._call)) is not None

    def _heard(self, number: int, own: T) -> T:
        membership = self._runtime.membership
        while True:
            found = membership.find(self._key(number))
            if found is not None:
                value: T = pickle.loads(found)  # from the job's own store
                return value
            if not membership.roster.members or self.is_over() or membership.find(calls.key(self._call, _JOB)):
                return own  # nobody keeps it, or the members have not said as much
            time.sleep(_TICK)

    def _key(self, number: int) -> str:
        return calls.key(self._call, f"told/{number}")
