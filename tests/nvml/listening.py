"""A job whose devices :class:`~lightning_ntp.nvml.NvmlSource` watches, without a job: what it finds, in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lightning_ntp.health.findings import Finding, WatchedJob
from lightning_ntp.launch.lifeline import children_of
from lightning_ntp.nvml import NvmlSource
from tests.nvml.mock import MockNvml

PATIENCE_SECONDS = 20.0


class Listening:
    """Runs a source in a thread, as the launching process does."""

    def __init__(self, source: NvmlSource, devices: Mapping[int, str]) -> None:
        self.source, self.devices = source, dict(devices)
        self.findings: list[Finding] = []
        self._heard = threading.Condition()
        self._over = threading.Event()
        self.job = WatchedJob(Path(), lambda: dict(self.devices), lambda: sorted(self.devices), self._over.is_set)
        self._before = children_of(os.getpid())
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        for finding in self.source(self.job):
            with self._heard:
                self.findings.append(finding)
                self._heard.notify_all()
        with self._heard:
            self._heard.notify_all()

    def wait_for(
        self, signal: str, gpu: str = "", code: int | None = None, clears: bool = False, since: int = 0
    ) -> Finding:
        """The first such finding from number ``since`` on."""

        def found() -> Finding | None:
            for finding in self.findings[since:]:
                if (finding.signal, finding.clears) == (signal, clears) and gpu in ("", finding.gpu):
                    if code in (None, finding.code):
                        return finding
            return None

        with self._heard:
            assert self._heard.wait_for(found, PATIENCE_SECONDS), f"no {signal} ({gpu}): {self.told()}"
            finding = found()
        assert finding is not None
        return finding

    def wait_for_look(self, gpu: str) -> None:
        """Until a device was looked at again: two looks that are whole, since one of them may have begun before."""
        for _ in range(2):
            with self._heard:
                number = len(self.findings)
            self.wait_for("healthy", gpu, since=number)

    def wait_for_events(self, mock: MockNvml, *gpus: str) -> None:
        """Until events are waited for, and the devices were looked at."""
        wait_until(lambda: mock.calls("nvmlEventSetWait") > 0)
        for gpu in gpus:
            self.wait_for("healthy", gpu)

    def told(self) -> list[tuple[str, str, int | None, bool]]:
        """All but the checks that were passed."""
        return [(f.signal, f.gpu[-1:], f.code, f.clears) for f in self.findings if f.signal != "healthy"]

    def signals(self) -> set[str]:
        return {finding.signal for finding in self.findings} - {"healthy"}

    def pid(self) -> int:
        """Of the process that asks the driver."""
        wait_until(lambda: len(self.children()) == 1)
        return self.children().pop()

    def children(self) -> set[int]:
        return children_of(os.getpid()) - self._before

    def end(self) -> None:
        """End the job."""
        self._over.set()
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive(), "the source goes on after the end of the job"


@contextmanager
def listening(source: NvmlSource, devices: Mapping[int, str]) -> Iterator[Listening]:
    """A source that watches these devices, by slot."""
    ears = Listening(source, devices)
    try:
        yield ears
    finally:
        ears.end()


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)
