"""JSON lines over a socket pair: the control connection between supervisor and fork server."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]


class Channel:
    """One end of the connection. A peer that is gone shows as :attr:`closed`, never as an exception."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""
        self.closed = False

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends."""
        a, b = socket.socketpair()
        return cls(a), cls(b)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """The end that an exec'ed process inherited as file descriptor ``fd``."""
        channel = cls(socket.socket(fileno=fd))
        channel._socket.set_inheritable(False)
        return channel

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def send(self, message: Message) -> None:
        """Send one message."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """Block until the peer says something, then return all complete messages (none if it closed)."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def receive_first(self) -> tuple[Message | None, list[Message]]:
        """Block for at least one complete message: (it, further ones that came along), or (None, []) if closed."""
        while not self.closed:
            messages = self.receive()
            if messages:
                return messages[0], messages[1:]
        return None, []
