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

    Args:
        recovery: Gives who recovers; None while the job is not recoverable yet, then nothing is repeated.
    """

    def __init__(self, recovery: Callable[[], Recovers | None]) -> None:
        self._recovery = recovery
        self._completed = 0
        self._result: object = None

    def run(self, operation: Callable[[], T]) -> T:
        """Run a collective that has no effect until it returns, and may be called again.

        Raises:
            JobLost: If the job cannot go on.
        """
        while True:
            try:
                result = operation()
                break
            except Interrupted as error:
                recovery = self._recovery()
                if recovery is None:
                    raise
                interruption = error
            # outside of the `except` block: the frames of the failed attempt are free
            recovery.agree(interruption)
            recovery.complete()
            ahead = recovery.engine.operation_result(self._completed + 1)
            if ahead is not None:
                result = pickle.loads(base64.b64decode(ahead))
                break
        self._completed += 1
        self._result = result
        return result

    def record(self) -> dict[str, int | str]:
        """What other survivors must know: the last completed operation and its result."""
        encoded = base64.b64encode(pickle.dumps(self._result)).decode()
        return {"operation": self._completed, "result": encoded}
