"""One lane for gradient communication beside the backward pass: first in, first out.

Work is a plain function with straight-line code. On CPU (gloo) one thread runs it, on process groups nobody
else uses: two threads on one gloo group corrupt each other's collectives. On CUDA a side stream takes it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from lightning_ntp.launch import progress

Job = Callable[[], None]

_PATIENCE_SECONDS = 5.0
"""For a job to end after the interruption of its collective, which takes milliseconds."""


class _Dropped(RuntimeError):
    """Jobs were dropped by a reset."""


class Lane:
    """Runs jobs in the order in which they are submitted, beside the caller.

    ``drain`` waits for all of them and raises the first error. After an error the remaining jobs of that
    round are dropped: their peers' collectives would not match.
    """

    def submit(self, job: Job) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        raise NotImplementedError

    def reset(self) -> Lane:
        """A lane that is idle: this one once it has dropped its jobs, or another one if it is stuck.

        For after an interruption, when every collective ends by itself.
        """
        return self

    def close(self) -> None:
        """End the lane. Pending jobs are dropped."""


class ThreadLane(Lane):
    """A lane on one thread, for gloo."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._pending = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        # daemon: a job stuck in a collective must not keep a process alive that wants to end
        self._thread = threading.Thread(target=self._run, name="ntp-gradient-sync", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._changed:
            self._pending += 1
        self._jobs.put(job)

    def drain(self) -> None:
        with self._changed:
            progress.current().wait_for(self._changed, lambda: self._pending == 0, None, progress.NOBODY)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def reset(self) -> Lane:
        with self._changed:
            if self._error is None:
                self._error = _Dropped()  # jobs that have not begun do not
            idle = progress.current().wait_for(
                self._changed, lambda: self._pending == 0, _PATIENCE_SECONDS, progress.NOBODY
            )
            if idle:
                self._error = None
                return self
        self._jobs.put(None)
        return ThreadLane()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        with progress.current().beside():
            self._run_jobs()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            finally:
                del job  # its buffers
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()


class StreamLane(Lane):
    """A lane on a CUDA side stream. No GPU with several ranks has confirmed it yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, job: Job) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            job()

    def drain(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def make_lane(device: torch.device) -> Lane:
    return StreamLane(device) if device.type == "cuda" else ThreadLane()
