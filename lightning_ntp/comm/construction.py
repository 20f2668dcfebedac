"""Building a generation's process groups in a thread that can be abandoned, since a peer may die and never come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lightning_ntp.comm import background
from lightning_ntp.launch import progress

_T = TypeVar("_T")


class Construction(Generic[_T]):
    """Runs ``build`` in a thread. It must touch no global state: if nobody waits any more, its result is dropped.

    Args:
        build: Returns what is wanted.
        done: Notified at the end.
    """

    def __init__(self, build: Callable[[], _T], done: threading.Condition) -> None:
        self._build, self._done = build, done
        self._result: list[_T] = []
        self.error: BaseException | None = None
        self.finished = False
        self._abandoned = False
        background.run("ntp-construction", self._run)

    def wait(self, give_up: Callable[[], Any]) -> _T | None:
        """The result, or None if ``give_up`` became true first (asked whenever ``done`` is notified).

        Raises:
            BaseException: What ``build`` raised.
        """
        with self._done:
            progress.current().wait_for(self._done, lambda: self.finished or give_up(), None)
            if not self.finished:
                self._abandoned = True
                return None
        if self.error is not None:
            raise self.error
        return self._result.pop()

    def abandon(self) -> None:
        """Nobody waits for the result any more."""
        with self._done:
            self._abandoned = True

    def _run(self) -> None:
        try:
            result = self._build()
        except BaseException as error:
            self.error = error
        else:
            with self._done:
                if not self._abandoned:
                    self._result.append(result)
            del result
        with self._done:
            self.finished = True
            self._done.notify_all()
