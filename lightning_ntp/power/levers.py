"""The levers of one GPU, through pynvml: its power limit, the range to which its graphics clock is locked, and the
workload power profiles that are requested.

A limit is written by ``nvmlDeviceSetPowerManagementLimit``: its successor ``..._v2`` returns nothing in
nvidia-ml-py 13.615, not even that it has failed. Locked clocks cannot be read by any call of NVML.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_ntp.nvml.errors import UNINITIALIZED, CallError, Kind
from lightning_ntp.nvml.library import INIT, Library, Renewed
from lightning_ntp.nvml.profiles import Profiles, read_profiles, read_requested, request_profiles
from lightning_ntp.power.entries import PROFILE

_GRAPHICS = 0
"""NVML_CLOCK_GRAPHICS."""
_RENEW_SECONDS = 1.0
"""Between two new starts of NVML."""
T = TypeVar("T")


class Nvml:
    """NVML for all devices of this process, started when it is first needed. Any thread may call.

    What NVML knows of a device that was lost stays wrong until it is started again, which is done here.
    """

    def __init__(self) -> None:
        self.library = Library()
        self._guard = threading.Lock()
        self._started = False
        self._renewed = 0.0

    def start(self) -> None:
        """Start NVML, if it does not run.

        Raises:
            CallError: If it does not start.
            ImportError: If there is no pynvml.
        """
        if self._started:
            return
        with self._guard:
            if not self._started:
                self.library.start()
                self._started = True

    def renew(self, epoch: int) -> bool:
        """Start NVML again, unless that was just done. Whether there is a newer one than ``epoch``."""
        if not self._guard.acquire(timeout=_RENEW_SECONDS):
            return False
        try:
            if self.library.epoch == epoch and time.monotonic() - self._renewed < _RENEW_SECONDS:
                return False
            self._renewed = time.monotonic()
            return self.library.renew(epoch)
        finally:
            self._guard.release()


@dataclass(frozen=True)
class Bounds:
    """What may be written.

    Args:
        limit_mw: The lowest and the highest power limit, in mW.
        clocks_mhz: The lowest and the highest graphics clock, in MHz; None if the device does not say them.
    """

    limit_mw: tuple[int, int]
    clocks_mhz: tuple[int, int] | None


class Levers:
    """Reads and moves the levers of one GPU. A call may hang as long as the driver does.

    Args:
        gpu: UUID.
        nvml: NVML.
    """

    def __init__(self, gpu: str, nvml: Nvml) -> None:
        self.gpu, self._nvml = gpu, nvml
        self._handle: Any = None
        self._epoch = -1

    def bounds(self) -> Bounds:
        """Raises:
        CallError: If it does not say them.
        """
        lowest, highest = self._ask("nvmlDeviceGetPowerManagementLimitConstraints")
        try:
            clocks = self._clocks()
        except CallError as error:
            if error.kind not in (Kind.UNSUPPORTED, Kind.PERMISSION):
                raise
            clocks = None
        return Bounds((int(lowest), int(highest)), clocks)

    def limit(self) -> int:
        """The power limit that was set, in mW. (The one that is enforced may be lower.)

        Raises:
            CallError: If it does not say it.
        """
        return int(self._ask("nvmlDeviceGetPowerManagementLimit"))

    def set_limit(self, milliwatts: int) -> None:
        """Write the power limit; what has become of it, :meth:`limit` says.

        Raises:
            CallError: If it was not written, as far as the driver knows.
        """
        self._ask("nvmlDeviceSetPowerManagementLimit", milliwatts)

    def profiles(self) -> Profiles:
        """Its workload power profiles.

        Raises:
            CallError: If it does not say them, or has none.
        """
        return read_profiles(self._ask)

    def read(self, lever: str) -> int | frozenset[int]:
        """The value of a lever that can be read: the power limit, or the requested profiles.

        Raises:
            CallError: If it does not say it.
        """
        return read_requested(self._ask) if lever == PROFILE else self.limit()

    def write(self, value: int | frozenset[int]) -> None:
        """Write such a value; what has become of it, :meth:`read` says.

        Raises:
            CallError: If it was not written, as far as the driver knows.
        """
        if isinstance(value, int):
            self.set_limit(value)
        else:
            request_profiles(self._ask, value)

    def lock_clocks(self, lowest: int, highest: int) -> None:
        """Lock the graphics clock to a range, in MHz.

        Raises:
            CallError: If it was not, as far as the driver knows.
        """
        self._ask("nvmlDeviceSetGpuLockedClocks", lowest, highest)

    def unlock_clocks(self) -> None:
        """Raises:
        CallError: If they were not, as far as the driver knows.
        """
        self._ask("nvmlDeviceResetGpuLockedClocks")

    def _clocks(self) -> tuple[int, int]:
        highest = int(self._ask("nvmlDeviceGetMaxClockInfo", _GRAPHICS))
        try:
            memory = max(self._ask("nvmlDeviceGetSupportedMemoryClocks"))
            supported = self._ask("nvmlDeviceGetSupportedGraphicsClocks", memory)
            return int(min(supported)), highest
        except (CallError, ValueError) as error:
            if isinstance(error, CallError) and error.kind in (Kind.LOST, Kind.RESET, Kind.DRIVER):
                raise
            return 1, highest  # the driver takes the next clock that there is

    def _ask(self, name: str, *arguments: Any) -> Any:
        def call() -> Any:
            handle = self._look_up()
            return self._nvml.library.ask(name, self.gpu, self._epoch, handle, *arguments)

        return self._again(call)

    def _look_up(self) -> Any:
        """The handle; one of an earlier start of NVML is worth nothing."""
        epoch = self._nvml.library.epoch
        if self._handle is None or self._epoch != epoch:
            self._handle = self._nvml.library.ask("nvmlDeviceGetHandleByUUID", self.gpu, epoch, self.gpu)
            self._epoch = epoch
        return self._handle

    def _again(self, call: Callable[[], T]) -> T:
        """Make a call; once more after a new start of NVML, if that is what it may need."""
        self._nvml.start()
        for last in (False, False, True):
            epoch = self._nvml.library.epoch
            try:
                return call()
            except Renewed:
                if last:
                    raise CallError("nvmlInit", UNINITIALIZED, "NVML is started again all the time") from None
            except CallError as error:
                self._handle = None
                stale = error.kind in (Kind.LOST, Kind.RESET) or error.code == UNINITIALIZED or error.call == INIT
                if last or not stale or not self._nvml.renew(epoch):
                    raise
        raise AssertionError("the last try returns or raises")
