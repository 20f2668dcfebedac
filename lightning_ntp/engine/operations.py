"""Collectives between steps: repeated after a membership change, so that callers never see one.

Every rank makes the same operations in the same order, and nobody completes one before all have entered it. So
survivors differ by at most one: who has missed the end of an operation gets its result from who has not.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Protocol, TypeVar

from lightning_ntp.comm import Interrupted
from lightning_ntp.engine.recovery import Outcome, RecoveryEngine

T = TypeVar("T")


class Recovers(Protocol):
    """Brings survivors together again."""

    engine: RecoveryEngine

    def agree(self, error: Interrupted) -> Outcome: ...

    def complete(self) -> None: ...


class Operations:
    """Numbers the operations of a rank and repeats those that are interrupted.

    Numbers are those of the job, not of one trainer: when a rank is lost between two runs, some survivors may have
    begun the next one.

    Args:
        recovery: Who recovers.
    """

    def __init__(self, recovery: Recovers) -> None:
        self._recovery = recovery
        self._completed = 0
        self._result: object = None
        self._inside: list[object] | None = None
        self._again: list[object] = []
        self._running = False

    @property
    def completed(self) -> int:
        """How many this rank has completed."""
        return self._completed

    @property
    def inside(self) -> bool:
        """Whether a piece of work is under way that is done again as a whole."""
        return self._inside is not None or self._running

    def run(self, operation: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Run a collective that may be called again. Others inside of it are part of it.

        Args:
            operation: The collective.
            undo: Undoes what a run has changed that is followed by another one.

        Raises:
            JobLost: If the job cannot go on.
            Interrupted: Between :meth:`enter` and :meth:`leave`, and inside of another operation, only.
        """
        if self._running:
            return operation()
        if self._again:
            return self._again.pop(0)  # type: ignore[return-value]
        result = self._complete(operation, undo)
        self._completed += 1
        self._result = result
        if self._inside is not None:
            self._inside.append(result)
        return result

    def _result_of_others(self) -> str | None:
        return self._recovery.engine.operation_result(self._completed + 1)

    def enter(self) -> None:
        """A piece of work begins that is done again as a whole if it is interrupted, with the operations in it."""
        self._inside, self._again = [], []

    def rewind(self) -> None:
        """That work begins again: operations that it has completed give their results once more."""
        self._again = list(self._inside or ())

    def leave(self) -> None:
        """That work is done, for good."""
        self._inside, self._again = None, []

    def settle(self) -> None:
        """After a change: all survivors drop what they were doing, and go on with the same number."""
        self._completed = max(int(each["operation"]) for each in self._recovery.engine.records.values())
        self.leave()

    def stand_at(self, completed: int) -> None:
        """In a newcomer: stand where the others stand."""
        self._completed, self._result = completed, None
        self.leave()

    def record(self) -> dict[str, int | str]:
        """What other survivors must know: the last completed operation and its result."""
        encoded = base64.b64encode(pickle.dumps(self._result)).decode()
        return {"operation": self._completed, "result": encoded}

    def _complete(self, operation: Callable[[], T], undo: Callable[[], None]) -> T:
        undone = True
        while True:
            found = self._result_of_others()
            if found is not None:
                result: T = pickle.loads(base64.b64decode(found))
                return result
            if not undone:
                undo()
            undone, self._running = False, True
            try:
                return operation()
            except Interrupted as error:
                if self._inside is not None:
                    raise
                interruption = error
            finally:
                self._running = False
            # outside of the `except` block: the frames of the failed attempt are free
            self._recovery.agree(interruption)
            if self._result_of_others() is None:
                undo()  # before the shards move: what was remembered is of the layout of then
                undone = True
            self._recovery.complete()
            if self._recovery.engine.over:
                return None  # type: ignore[return-value]
