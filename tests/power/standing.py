"""A helper that runs by itself, and raw clients of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 20.0
ROOT = Path(__file__).parents[2]


def wait_until(done: Callable[[], object], why: str = "it does not happen") -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


class Standing:
    """``python -m lightning_ntp.power --socket ...``.

    Args:
        directory: Where its socket and what it says lie.
        arguments: Further ones.
    """

    def __init__(self, directory: Path, *arguments: str) -> None:
        number = len(list(directory.glob("*.log")))
        self.path, self._log = directory / f"{number}.sock", directory / f"{number}.log"
        command = [sys.executable, "-m", "lightning_ntp.power", "--socket", str(self.path), *arguments]
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=log)
        self._clients: list[Raw] = []
        wait_until(lambda: self.path.exists() or self.process.poll() is not None, "the helper does not listen")
        assert self.process.poll() is None, self.said

    @property
    def said(self) -> str:
        return self._log.read_text()

    def client(self) -> Raw:
        """A connection."""
        self._clients.append(Raw(self.path))
        return self._clients[-1]

    def end(self) -> None:
        """Tell it to end; what it has moved is back then."""
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_SECONDS)


class Raw:
    """A connection that says what the test wants.

    Args:
        path: Of the socket.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self._socket.connect(os.fspath(path))
                break
            except ConnectionRefusedError:  # it is bound, and does not listen yet
                assert time.monotonic() < deadline
                time.sleep(0.01)
        self._rest = b""

    def say(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def hear(self) -> dict[str, Any] | None:
        """The next message; None if it has hung up."""
        while b"\n" not in self._rest:
            try:
                piece = self._socket.recv(1 << 16)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line))

    def ask(self, **message: Any) -> dict[str, Any]:
        self.say(json.dumps(message).encode() + b"\n")
        answer = self.hear()
        assert answer is not None, "the helper has hung up"
        return answer

    def close(self) -> None:
        self._socket.close()
