"""Clients of the job's store that do not wait for ever. A rank without its store ends: it can agree on nothing."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_ntp.comm import background

STORE_LOST_EXIT_CODE = 75
"""Exit code of a rank whose store is gone (EX_TEMPFAIL: starting again may help)."""

_CALL_SECONDS = 30.0
"""A store call that takes longer counts as a store that is gone: a reply takes well under a millisecond."""
_LOOK_SECONDS = 1.0
"""Between looks at the running calls."""
_END_SECONDS = 1.0
"""If the launching process is gone, its fork server says so, once, and ends all ranks within this time."""

_T = TypeVar("_T")


class StoreLostError(RuntimeError):
    """The store cannot be reached any more."""


class StoreGuard:
    """Makes clients and watches their calls by the wall clock: some of torch's calls know no time-out.

    Args:
        host, port: Of the TCPStore.
        timeout: For reaching it.
        who: How this process is called in messages.
    """

    def __init__(self, host: str, port: int, timeout: timedelta, who: str) -> None:
        self._host, self._port, self._timeout, self._who = host, port, timeout, who
        self._running: dict[int, float] = {}
        self._spare: queue.SimpleQueue[TCPStore] = queue.SimpleQueue()
        self._closing, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ntp-store-guard", daemon=True)
        self._thread.start()

    def client(self) -> TCPStore:
        """A new connection: a blocking call blocks all threads that share one.

        Raises:
            torch.distributed.DistNetworkError: If the store cannot be reached in time.
        """
        return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=self._timeout)

    def borrow(self) -> TCPStore:
        """A connection that was made in advance, if there is one.

        Each connection asks the name server who 127.0.0.1 is (torch 2.13 describes it for its log), and a lost packet
        there costs 5 s: not while others wait for us.
        """
        try:
            return self._spare.get_nowait()
        except queue.Empty:
            return self.client()

    def give_back(self, client: TCPStore) -> None:
        """Keep a connection that no thread uses any more for the next who borrows."""
        self._spare.put(client)

    def stock(self, count: int) -> None:
        """Make connections in advance, in the background."""

        def make() -> None:
            with contextlib.suppress(RuntimeError):
                for _ in range(count - self._spare.qsize()):
                    if not self._closing.is_set():
                        self._spare.put(self.client())

        background.run("ntp-store-stock", make)

    def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """A short call of a client; if it fails or takes long, the process ends."""
        key = threading.get_ident()
        self._running[key] = time.monotonic()
        try:
            return function(*args)
        except RuntimeError as error:
            self.lost(str(error))
        finally:
            self._running.pop(key, None)

    def lost(self, why: str) -> NoReturn:
        """End the process: the store is gone. Unless it is ending anyway.

        Raises:
            StoreLostError: If :meth:`close` was called before.
        """
        if self._closing.is_set():
            raise StoreLostError(why)
        time.sleep(_END_SECONDS)
        first_line = why.splitlines()[0][:200] if why else ""
        self._end(
            f"cannot be reached any more ({first_line}); its supervisor is gone or hangs. This rank ends, since it"
            " cannot agree with the others on anything."
        )

    def close(self) -> None:
        """From now on a lost store is no news, but calls of it are still watched."""
        self._closing.set()

    def join(self) -> None:
        """Wait for the watching thread to end."""
        self._stop.set()
        self._thread.join(5.0)

    def _end(self, why: str) -> NoReturn:
        print(f"{self._who}: the job's store at {self._host}:{self._port} {why}", file=sys.stderr, flush=True)
        os._exit(STORE_LOST_EXIT_CODE)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if now - before > 2 * _LOOK_SECONDS:
                # this process was stopped too: a call that was under way has had no time
                self._running.update(dict.fromkeys(list(self._running), now))
            before = now
            if now - min(list(self._running.values()), default=now) > _CALL_SECONDS:
                self._end(
                    f"has given no answer within {_CALL_SECONDS:g} s: the launching process, which hosts it, is stopped"
                    " or hangs. This rank ends, since it cannot agree with the others on anything."
                )
