"""Process groups whose waits can be woken.

torch's own ways do not wake a thread that waits for a gloo collective: ``abort``, ``shutdown`` and
``destroy_process_group`` leave it waiting, and ranks that are no neighbours of a dead one wait until the time-out
(measured on torch 2.13). Here every ``Work.wait()`` is a loop of short waits in C++ which looks at the generation's
:class:`~lightning_ntp.comm.interruption.Life` in between. A short wait that ends by time-out leaves the operation
running. Since the groups are installed as torch's own, calls by third parties are covered too.

For gloo's ``send`` and ``recv`` there are no short waits: a time-out there closes the whole group. Closing it does not
wake a wait for a message of which a part was on its way (torch 2.13), so they are waited for in a thread of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work

from lightning_ntp.comm.interruption import Interrupted, Life
from lightning_ntp.launch import progress

_SLICE = timedelta(milliseconds=10)
"""One wait: how late an interruption may be noticed. A wait that ends by time-out costs 0.1 ms."""

_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "_end_coalescing",
)
_POINT_TO_POINT = ("send", "recv", "recv_anysource")
_PLAIN = ("_start_coalescing", "monitored_barrier")

_TRANSPORT = ("gloo/transport", "pair closure", "connection", "timed out", "broken pipe", "socket", "nccl", "context")
"""What an error at the start of a collective says when a peer is gone, rather than that an argument is wrong."""

NewGroup = Callable[..., "InterruptibleGroup | None"]


class InterruptibleWork(Work):
    """A running collective.

    Args:
        work: The backend's.
        life: Of the group's generation.
        sliced: Whether short waits are possible. They are not for gloo's ``send`` and ``recv`` (a time-out there closes
            the whole group) nor for NCCL (``wait`` only orders streams).
        mark: The group's, in what this rank shows of its progress.
        apart: How long to wait in a thread of its own, if not given; None not to.
    """

    def __init__(self, work: Any, life: Life, sliced: bool, mark: int = 0, apart: timedelta | None = None) -> None:
        super().__init__()
        self._work, self._life, self._sliced, self._mark, self._apart = work, life, sliced, mark, apart

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the collective has completed.

        Raises:
            Interrupted: If the membership has changed.
            RuntimeError: As the backend raises it, if nothing says that a member has gone.
        """
        shown = progress.current()
        if not shown.begin_wait(self._mark, blind=not self._sliced):
            return self._wait(timeout, lambda: None)
        try:
            return self._wait(timeout, shown.tick)
        finally:
            shown.end_wait()

    def _wait(self, timeout: timedelta, tick: Callable[[], None]) -> bool:
        work, life = self._work, self._life
        if self._apart is not None:
            return self._wait_apart(timeout or self._apart)
        if not self._sliced:
            try:
                return bool(work.wait(timeout) if timeout else work.wait())
            except RuntimeError as error:
                raise life.explain(error) from error
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        while True:
            try:
                return bool(work.wait(_SLICE))
            except RuntimeError as error:
                # Completed: with this error, or in the very moment in which the short wait gave up.
                if work.is_completed():
                    return self._finish()
                if life.interrupted:
                    raise Interrupted(f"a collective was interrupted: {life.reason}") from None
                if deadline is not None and time.monotonic() > deadline:
                    raise error
                tick()

    def _wait_apart(self, timeout: timedelta) -> bool:
        work, life, done = self._work, self._life, threading.Event()
        results: list[bool] = []
        errors: list[RuntimeError] = []

        def wait() -> None:
            try:
                results.append(bool(work.wait(timeout)))
            except RuntimeError as error:
                errors.append(error)
            done.set()

        threading.Thread(target=wait, name="ntp-message", daemon=True).start()
        while not done.wait(_SLICE.total_seconds()):
            if life.interrupted:
                raise Interrupted(f"a message was interrupted: {life.reason}")
        if errors:
            raise life.explain(errors[0]) from errors[0]
        return results[0]

    def _finish(self) -> bool:
        try:
            return bool(self._work.wait(_SLICE))
        except RuntimeError as error:
            raise self._life.explain(error) from error

    def get_future(self) -> Any:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()


class InterruptibleGroup(dist.ProcessGroup):
    """Hands every operation to a plain process group and makes waiting for it interruptible.

    Args:
        inner: A plain group with its backends.
        life: Of the generation.
        description: How people call it.
        sliced: See :class:`InterruptibleWork`.
        timeout: For every operation.
    """

    def __init__(
        self, inner: dist.ProcessGroup, life: Life, description: str, sliced: bool, timeout: timedelta
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        if inner.bound_device_id is not None:
            self.bound_device_id = inner.bound_device_id
        self.life = life
        self.description = description
        self._inner: dist.ProcessGroup | None = inner
        self._sliced, self._timeout = sliced, timeout
        self._name = ""
        self.mark = 0
        """In what this rank shows of its progress."""
        self.maker: NewGroup | None = None
        """Makes a subgroup of the world; only on the default group, where ``torch.distributed.new_group`` calls it."""

    def inner(self) -> dist.ProcessGroup:
        """The plain group.

        Raises:
            StaleGroupError, Interrupted: If the generation is over.
        """
        self.life.check(repr(self.description))
        assert self._inner is not None
        return self._inner

    def release(self) -> dist.ProcessGroup | None:
        """Let go of the plain group and return it: its destructor takes a while."""
        inner, self._inner = self._inner, None
        return inner

    # What torch asks of a group. A second spelling is what C++ calls.

    def getBackendName(self) -> str:
        return "ntp"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        return self.description

    def setGroupDesc(self, desc: str) -> None:
        if not self.description:
            self.description = desc

    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self.description

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner()._device_types

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner()._get_backend(device)

    def get_group_store(self) -> Any:
        return self.inner().get_group_store()

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner().set_timeout(timeout)
        self._timeout = timeout

    def shutdown(self) -> None:
        """Nothing: the generation lets go of its groups, in a thread of their own."""

    abort = shutdown

    def split_group(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("use torch.distributed.new_group: groups of lightning_ntp cannot be split")

    merge_remote_group = split_group

    def __getattr__(self, name: str) -> Any:
        # torch tests whether the default group has a method new_group
        if name == "new_group" and self.__dict__.get("maker") is not None:
            return self.maker
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _start(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], counts: bool) -> Any:
        try:
            inner = self.inner()
            if counts:
                progress.current().entered(self.mark)
            return getattr(inner, name)(*args, **kwargs)
        except Interrupted:
            raise
        except RuntimeError as error:
            # a group of a dead generation was asked, or a peer is gone; else the caller has made a mistake
            if self.life.interrupted or any(sign in str(error).lower() for sign in _TRANSPORT):
                self.life.check(repr(self.description))
                raise self.life.explain(error) from error
            raise


def _collective(name: str, sliced: bool) -> Callable[..., Any]:
    def start(self: InterruptibleGroup, *args: Any, **kwargs: Any) -> Any:
        # members send and receive unequally often, but enter collectives alike
        work = self._start(name, args, kwargs, counts=sliced)
        if work is None:
            return None
        apart = self._timeout if self._sliced and not sliced else None
        return InterruptibleWork(work, self.life, sliced and self._sliced, self.mark, apart)

    start.__name__ = name
    return start


def _plain(name: str) -> Callable[..., Any]:
    def call(self: InterruptibleGroup, *args: Any, **kwargs: Any) -> Any:
        return self._start(name, args, kwargs, counts=False)

    call.__name__ = name
    return call


for _name in _COLLECTIVES:
    setattr(InterruptibleGroup, _name, _collective(_name, sliced=True))
for _name in _POINT_TO_POINT:
    setattr(InterruptibleGroup, _name, _collective(_name, sliced=False))
for _name in _PLAIN:
    setattr(InterruptibleGroup, _name, _plain(_name))
