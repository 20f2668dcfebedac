"""What ends a collective before its time, and the errors that say so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Interrupted(RuntimeError):
    """A collective was cut short, because the membership of the job has changed. Recover, then do the work again."""


class JobLost(RuntimeError):
    """The job cannot go on; the message says why."""

    __plain_reason__ = True  # no bug: the supervisor prints the message alone


class StaleGroupError(RuntimeError):
    """A process group was used that was made before the membership changed."""


class Life:
    """The time in which a generation's collectives work.

    Args:
        number: The generation: the position of its commit in the log.
        explain: Turns the error of a collective into the one to raise; may wait for the log to say who died.
        may_start: Called with a group's description before each of its collectives: raises if none may start now.
    """

    def __init__(
        self,
        number: int,
        explain: Callable[[Life, RuntimeError], RuntimeError],
        may_start: Callable[[str], None] = lambda group: None,
    ) -> None:
        self.number = number
        self.reason = ""
        self.interrupted = False
        """No collective of the generation succeeds any more. Reading it costs nothing."""
        self.retired = False
        """The process has left the generation for another one."""
        self.interrupted_at = 0.0
        self.over = threading.Event()
        """Set with :attr:`interrupted`, for waiting."""
        self._explain, self._may_start = explain, may_start

    def interrupt(self, reason: str) -> None:
        """End all collectives. Those that wait notice by themselves."""
        if not self.interrupted:
            self.reason = reason
            self.interrupted_at = time.monotonic()
            self.interrupted = True
            self.over.set()

    def check(self, group: str) -> None:
        """Let nothing start that would wait for the dead.

        Args:
            group: How the group is called, for the error.

        Raises:
            StaleGroupError: If the process has moved on to another generation.
            Interrupted: If it has not yet.
        """
        if self.retired:
            raise StaleGroupError(
                f"the process group {group} belongs to generation {self.number} of the job, which is over"
                f"{f' ({self.reason})' if self.reason else ''}: some of its ranks may be gone or have other numbers."
                " Ask for the group anew at each use, or make it again with torch.distributed.new_group after the"
                " membership has changed"
            )
        if self.interrupted:
            raise Interrupted(f"a collective was interrupted: {self.reason}")
        self._may_start(group)

    def explain(self, error: RuntimeError) -> RuntimeError:
        """The error to raise when a collective failed with ``error``."""
        return self._explain(self, error)
