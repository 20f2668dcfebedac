"""One client of the helper: its lines, its lease, its rate."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from lightning_ntp.power.desk import Desk
from lightning_ntp.power.hand import Open
from lightning_ntp.power.putting_back import Result, Status
from lightning_ntp.power.requests import Refusal, Request, parse, value_record
from lightning_ntp.power.scan import Say

_MOST_WAITING = 32
_MOST_UNREAD_BYTES = 1 << 18
_LINES_PER_SECOND = 10.0
"""Of the log, for what is refused."""


@dataclass(frozen=True)
class Terms:
    """What a client may do.

    Args:
        lease: Seconds after which a client that says nothing is gone.
        rate: Writes per second.
    """

    lease: float = 5.0
    rate: float = 50.0


class Allowance:
    """So many per second, and as many at once.

    Args:
        rate: How many.
    """

    def __init__(self, rate: float) -> None:
        self._rate = self._left = rate
        self._last = time.monotonic()

    def take(self, count: int) -> bool:
        """Whether there are so many left; if so, they are taken."""
        now = time.monotonic()
        self._left = min(self._rate, self._left + (now - self._last) * self._rate)
        self._last = now
        if count > self._left:
            return False
        self._left -= count
        return True


_HUNG_UP = "it has hung up"


class Connection:
    """See the module.

    Args:
        reader: From the client.
        writer: To the client.
        desk: Who holds what.
        terms: What it may do.
        name: For the log.
        say: For the log.
        quiet: Whether what is usual is no news: it is the only client, and says itself what it was refused.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        desk: Desk,
        terms: Terms,
        name: str,
        say: Say,
        quiet: bool = False,
    ) -> None:
        self._quiet = quiet
        self._reader, self._writer, self._desk, self._terms = reader, writer, desk, terms
        self._name, self._log = name, say
        self._lines = Allowance(_LINES_PER_SECOND)
        self._writes = Allowance(terms.rate)
        self._requests: asyncio.Queue[Request] = asyncio.Queue(_MOST_WAITING)

    async def serve(self) -> None:
        """Until the client is gone; then its GPUs are given back."""
        why = "the helper ends"
        worker = asyncio.get_running_loop().create_task(self._work())
        try:
            why = await self._listen()
        except Exception as error:
            why = repr(error)
        finally:
            worker.cancel()
            self._desk.leave(self)
            if not self._quiet or why != _HUNG_UP:
                self._log(f"{self._name} is gone: {why}")
            self.send(ended=why)
            self._writer.close()

    def send(self, **message: Any) -> None:
        """Say something; who does not read it is cut off."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n")
            if self._writer.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
                self._writer.transport.abort()

    async def _listen(self) -> str:
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), self._terms.lease)
            except asyncio.TimeoutError:
                return f"nothing was heard for {self._terms.lease:g} s"
            except ValueError:
                return "a line was too long"
            except OSError as error:
                return f"it cannot be heard: {error.strerror}"
            if not line.endswith(b"\n"):
                return _HUNG_UP
            self._take(line)
            await asyncio.sleep(0)  # others' turn, also if there are more lines already

    def _take(self, line: bytes) -> None:
        try:
            request = parse(line)
            if request.do == "ping" and request.id is None:
                return
            try:
                self._requests.put_nowait(request)
            except asyncio.QueueFull:
                raise Refusal(f"{_MOST_WAITING} requests wait already", request.id) from None
        except Refusal as refusal:
            self._refused(f"{refusal}: {line[:80]!r}")
            self.send(id=refusal.id, refused=str(refusal))

    async def _work(self) -> None:
        while True:
            request = await self._requests.get()
            try:
                answer = await self._answer(request)
            except Exception as error:  # a mistake of ours, which shall not take everything down
                self._log(f"{self._name}: {request.do}: {error!r}")
                answer = {"refused": f"the helper has failed: {error!r}"}
            self.send(id=request.id, **answer)

    async def _answer(self, request: Request) -> dict[str, Any]:
        if request.do == "hello":
            taken = await self._desk.hello(self, request.job, request.gpus, request.clocks_mhz)
            if not self._quiet:
                self._log(f"{self._name} is job {request.job!r} with {len(request.gpus)} GPUs")
            return {"lease_s": self._terms.lease, "gpus": {gpu: self._opened(gpu, each) for gpu, each in taken.items()}}
        if request.do == "set":
            return {"settings": await self._set(request)}
        if request.do == "release":
            released = await self._desk.release(self, request.gpus)
            return {"gpus": {gpu: self._result(gpu, each) for gpu, each in released.items()}}
        return {"gpus": self._desk.state()} if request.do == "state" else {}

    async def _set(self, request: Request) -> list[dict[str, Any]]:
        if self._writes.take(len(request.settings)):
            results = await self._desk.set(self, request.settings)
        else:
            why = f"more than {self._terms.rate:g} writes per second"
            results = [Result(Status.REFUSED, why)] * len(request.settings)
        return [
            {"gpu": each.gpu, "lever": each.lever, **self._result(each.gpu, result), **_now(each.lever, result)}
            for each, result in zip(request.settings, results, strict=True)
        ]

    def _opened(self, gpu: str, answer: Open | Result) -> dict[str, Any]:
        if isinstance(answer, Result):
            return self._result(gpu, answer)
        lowest, highest = answer.bounds.limit_mw
        return {
            "status": Status.DONE.value,
            "why": "",
            "limit_w": answer.limit_mw / 1000,
            "minimum_w": lowest / 1000,
            "ceiling_w": answer.ceiling_mw / 1000,
            "maximum_w": highest / 1000,
            "clocks_mhz": answer.bounds.clocks_mhz,
        }

    def _result(self, gpu: str, result: Result) -> dict[str, Any]:
        if result.status is not Status.DONE:
            self._refused(f"{gpu}: {result.status.value}: {result.why}")
        return {"status": result.status.value, "why": result.why}

    def _refused(self, what: str) -> None:
        if not self._quiet and self._lines.take(1):
            self._log(f"{self._name}: {what}")


def _now(lever: str, result: Result) -> dict[str, Any]:
    return value_record(lever, result.now) if result.now is not None or result.status is Status.DONE else {}
