"""The driver's library in this process: who is in which call, and a new start of it while others wait.

NVML keeps what it knows of a device that was lost or reset until it is shut down and started again. That is done for
the whole process, so every call passes a gate here; a handle belongs to the epoch in which it was given.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from lightning_ntp.nvml.errors import FUNCTION_NOT_FOUND, UNINITIALIZED, CallError

INIT, _SHUTDOWN = "nvmlInit", "nvmlShutdown"
_HANGING_SECONDS = 1.0
"""A call that takes longer does not end soon: no new start is tried meanwhile."""
_GATE_SECONDS = 2.0


class Renewed(Exception):
    """NVML was started again since: handles and event sets are no longer valid."""


@dataclass(frozen=True)
class Call:
    """A call that has not returned."""

    name: str
    gpu: str
    """UUID; empty if it is about no device, or about all."""
    since: float
    """On the machine's monotonic clock, in seconds."""


class Library:
    """NVML through pynvml. Any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[int, Call] = {}
        self._renewing = False
        self._down: CallError | None = CallError(INIT, UNINITIALIZED)
        self.epoch = 0
        """How often NVML was started."""

    def start(self) -> None:
        """Start NVML.

        Raises:
            CallError: If it does not start; what is asked before :meth:`renew` has helped fails likewise.
            ImportError: If there is no pynvml.
        """
        # here, so that a missing one is not taken for a fault of the driver
        import pynvml  # type: ignore[import-untyped]  # noqa: F401

        self._restart(first=True)
        if self._down is not None:
            raise self._down

    def ask(self, name: str, gpu: str, epoch: int, *arguments: Any) -> Any:
        """Call a function of pynvml, after a new start that is under way.

        Args:
            name: Of the function.
            gpu: UUID of the device, for those who look at who hangs.
            epoch: In which handles among the arguments were given.
            arguments: For the function.

        Raises:
            CallError: What NVML says.
            Renewed: If the epoch is over.
        """
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._renewing)
            if epoch != self.epoch:
                raise Renewed
            if self._down is not None:
                raise self._down
            self._calls[me] = Call(name, gpu, time.monotonic())
        try:
            return _call(name, arguments)
        finally:
            with self._changed:
                del self._calls[me]
                if self._renewing:
                    self._changed.notify_all()

    def in_flight(self) -> list[Call]:
        """The calls that have not returned."""
        with self._changed:
            return list(self._calls.values())

    def renew(self, seen: int) -> bool:
        """Shut NVML down and start it again, so that it looks at its devices anew.

        Args:
            seen: The epoch that is not good enough.

        Returns:
            Whether there is a newer one. Not if a call hangs, in which case it would hang too.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._renewing)
            if self.epoch != seen:
                return True
            now = time.monotonic()
            if any(now - call.since > _HANGING_SECONDS for call in self._calls.values()):
                return False
            self._renewing = True
            if not self._changed.wait_for(lambda: not self._calls, _GATE_SECONDS):
                self._renewing = False
                self._changed.notify_all()
                return False
        self._restart(first=False)
        return True

    def _restart(self, first: bool) -> None:
        me, down = threading.get_ident(), None
        for name in (INIT,) if first else (_SHUTDOWN, INIT):
            with self._changed:
                self._calls[me] = Call(name, "", time.monotonic())
            try:
                _call(name, ())
            except CallError as error:
                down = error if name == INIT else None  # a shutdown of what was not started
        with self._changed:
            del self._calls[me]
            self._down, self._renewing = down, False
            self.epoch += 1
            self._changed.notify_all()


def _call(name: str, arguments: tuple[Any, ...]) -> Any:
    import pynvml

    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as error:
        raise CallError(name, error.value, str(error)) from None
    except (pynvml.NVMLLibraryMismatchError, AttributeError):
        raise CallError(name, FUNCTION_NOT_FOUND) from None
