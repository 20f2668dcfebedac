"""The helper: the only process that writes limits, clocks and profiles (``python -m lightning_ntp.power``).

As a child of a launching process it has one client, its parent, at the other end of a pair of sockets, and ends with
it. Alone, under sudo or systemd, it listens on a socket. However it ends, short of being killed, it puts back first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ntp.power.connection import Connection, Terms
from lightning_ntp.power.desk import Desk
from lightning_ntp.power.log import Log
from lightning_ntp.power.requests import MOST_LINE_BYTES

END_SECONDS = 5.0
"""For putting everything back at the end, if the driver hangs."""
_PARENT_SECONDS = 0.2
"""Between two looks whether the parent lives: somebody else may hold its end of the sockets too."""
_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid (unix(7))."""
_DONE = "its only client is gone"
"""Why a child ends in good order."""


@dataclass(frozen=True)
class Options:
    """How a helper works.

    Args:
        directory: Where journals lie.
        terms: What each client may do.
        ceiling: As for :class:`~lightning_ntp.power.hand.Hand`.
        clients: How many there may be at a time.
        allowed: Uids of users who may connect to the socket.
    """

    directory: Path
    terms: Terms = Terms()
    ceiling: str = ""
    clients: int = 16
    allowed: Sequence[int] = ()


class Helper:
    """See the module.

    Args:
        options: How it works.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._log = options, Log()
        self._desk = Desk(options.directory, options.ceiling, self._log.say)
        self._connections: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()
        self._why = ""

    def run(self, parent: tuple[int, socket.socket] | None, listener: socket.socket | None) -> None:
        """Work, put everything back, and end the process.

        Args:
            parent: Pid of the process to end with, and the socket to it.
            listener: Where clients come from.
        """
        ignored = (signal.SIGINT, signal.SIGHUP) if parent else ()
        for number in ignored:  # a terminal sends them to everybody, and means who has started this process
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number not in ignored:
                signal.signal(number, self._told)
        code = 1
        try:
            asyncio.run(self._run(parent, listener))
            code = 0
        except BaseException as error:  # whatever it is: first put back
            self._log.say(f"the helper has failed: {error!r}")
        finally:
            with contextlib.suppress(Exception):
                if self._why != _DONE:
                    self._log.say(f"the helper ends: {self._why or 'its own mistake'}")
                self._desk.end(END_SECONDS)
                self._log.close()
            os._exit(code)  # not sys.exit(): that would wait for threads, of which one may hang in the driver

    def _told(self, number: int, _: object) -> None:
        self._end(f"it was told to ({signal.Signals(number).name})")

    def _end(self, why: str) -> None:
        self._why = self._why or why
        with contextlib.suppress(RuntimeError):  # it does not run any more
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._over.set)

    async def _run(self, parent: tuple[int, socket.socket] | None, listener: socket.socket | None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._why:
            return
        tasks = [self._loop.create_task(self._tidy())]
        if parent is not None:
            pid, channel = parent
            reader, writer = await asyncio.open_connection(sock=channel, limit=MOST_LINE_BYTES)
            tasks.append(self._loop.create_task(self._serve_parent(reader, writer)))
            tasks.append(self._loop.create_task(self._watch(pid)))
        server = None
        if listener is not None:
            server = await asyncio.start_unix_server(self._meet, sock=listener, limit=MOST_LINE_BYTES)
        await self._over.wait()
        if server is not None:
            server.close()
        for task in [*tasks, *self._connections]:
            task.cancel()
        await asyncio.wait([*tasks, *self._connections], timeout=1.0)

    async def _tidy(self) -> None:
        try:
            await self._desk.tidy()
        except Exception as error:
            self._end(f"its own mistake: {error!r}")

    async def _serve_parent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # what is usual with one client is no news
        connection = Connection(reader, writer, self._desk, self._options.terms, "the parent", self._log.say, True)
        await connection.serve()
        self._end(_DONE)

    async def _watch(self, parent: int) -> None:
        while os.getppid() == parent:
            await asyncio.sleep(_PARENT_SECONDS)
        self._end("its parent has died")

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        peer: socket.socket = writer.get_extra_info("socket")
        pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        name = f"process {pid} of user {uid}"
        connection = Connection(reader, writer, self._desk, self._options.terms, name, self._log.say)
        why = ""
        if uid not in self._options.allowed:
            why = f"user {uid} is not among those that are allowed (--allow-uid)"
        elif len(self._connections) >= self._options.clients:
            why = f"there are {self._options.clients} clients already (--clients)"
        if why:
            self._log.say(f"{name} is refused: {why}")
            connection.send(ended=why)
            writer.close()
            return
        self._connections.add(task)
        try:
            await connection.serve()
        finally:
            self._connections.discard(task)
