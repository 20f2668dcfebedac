"""Running what a membership change may interrupt, so that nothing of a failed attempt stays alive."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from lightning_ntp.comm.interruption import Interrupted

T = TypeVar("T")


class Failure:
    """An interruption, its frames cleared; ``agreed`` once the survivors know that the step is replayed."""

    def __init__(self, error: Interrupted) -> None:
        self.error, self.agreed = error, False


class Unwind(BaseException):
    """Takes a failure out of code that is not ours: no ``except Exception`` there may hold it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


def attempt(run: Callable[[], T]) -> tuple[T | None, Failure | None]:
    """Run once: the result, or what has interrupted it."""
    try:
        return run(), None
    except Interrupted as error:
        failure = Failure(error)
        _release(error)
    except Unwind as error:
        failure = error.failure
        _release(error)
    return None, failure


def _release(error: BaseException | None) -> None:
    """Let go of everything that the frames of an exception hold."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
