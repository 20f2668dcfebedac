"""Pickled messages over a socket, and the promise of a process to die with its parent."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


def send(sock: socket.socket, message: Any) -> None:
    """Send one message; blocks until the peer's buffer has taken it."""
    data = pickle.dumps(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Receive one message. Raises ``EOFError`` once the peer is gone."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return pickle.loads(_exactly(sock, length))


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = sock.recv(min(count - len(parts), 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError("the other process is gone")
        parts += part
    return bytes(parts)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` (a pid) dies; exit at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
