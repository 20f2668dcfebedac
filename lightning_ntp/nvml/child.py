"""The process that asks the driver, seen from who launched it: it can be left behind, and nobody waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ntp.nvml.process import GROUP_SIGNALS
from lightning_ntp.nvml.protocol import Lines

_BOOTSTRAP = (
    "import sys; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]\n"
    "from lightning_ntp.nvml.process import main; main()"
)
"""The package is found where this one is, and nothing in the working directory: a file there may be called like a
module."""
_GRACE_SECONDS = 0.4
"""For an end of its own, and again for one by force."""
_PIECE = 1 << 16
_left_behind: list[subprocess.Popen[bytes]] = []
"""Killed, but not dead: they hang inside the driver, and end when it lets them."""


class ChildGone(Exception):
    """The process has ended, or does not take part any more; says how."""

    in_order = False
    """Whether it has ended by itself, and as it should."""


class Child:
    """A running process.

    Args:
        arguments: For :func:`lightning_ntp.nvml.process.main`.
        environment: Its environment variables; None: those of this process.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        _reap()
        root = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-c", _BOOTSTRAP, root, arguments[0], str(os.getpid()), *arguments[1:]]
        # one of them between its start and its first line would end it; blocked ones wait (the mask is inherited)
        former = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        try:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, env=environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        self._lines = Lines()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Give it a line.

        Raises:
            ChildGone: If it does not take it.
        """
        try:
            if os.write(self._in.fileno(), message) == len(message):
                return
        except OSError:
            pass
        raise ChildGone(self._how())

    def receive(self, seconds: float) -> list[dict[str, Any]]:
        """Its messages; none if there are none for so long.

        Raises:
            ChildGone: If it has ended.
        """
        if not select.select([self._out], [], [], seconds)[0]:
            return []
        piece = os.read(self._out.fileno(), _PIECE)
        if not piece:
            gone = ChildGone(self._how())
            gone.in_order = self._process.returncode == 0
            raise gone
        try:
            return self._lines.feed(piece)
        except ValueError as error:
            raise ChildGone(f"it has said something that is no message: {error}") from None

    def close(self) -> None:
        """End it. Returns within a second, whatever it does: one that hangs inside the driver is left behind."""
        self._in.close()  # it ends by itself at that
        if not self._wait(_GRACE_SECONDS):
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            if not self._wait(_GRACE_SECONDS):
                _left_behind.append(self._process)
        self._out.close()

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def _how(self) -> str:
        if not self._wait(_GRACE_SECONDS):
            return "it does not take messages any more"
        code = self._process.returncode
        with contextlib.suppress(ValueError):
            if code < 0:
                return f"it was killed ({signal.Signals(-code).name})"
        return f"it has ended with code {code}"


def ask_once(arguments: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """The messages of a process that answers and ends, then ``silent`` with the reason if it has not ended by itself.

    Args:
        arguments: For :func:`lightning_ntp.nvml.process.main`.
        seconds: The longest that it may take: a driver that hangs costs that.
    """
    deadline = time.monotonic() + seconds
    with contextlib.closing(Child(arguments)) as child:
        try:
            while (left := deadline - time.monotonic()) > 0:
                yield from child.receive(left)
        except ChildGone as gone:
            if not gone.in_order:
                yield {"silent": f"the process that asks the driver is gone: {gone}"}
            return
    yield {"silent": f"the driver has not answered everything within {seconds:g} s"}


def _reap() -> None:
    _left_behind[:] = [process for process in _left_behind if process.poll() is None]
