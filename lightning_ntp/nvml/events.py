"""The thread that waits for the driver's events, of all devices in one set.

Events from before the registration are lost, and so are those between two sets: looking at the devices goes on as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from ctypes import c_void_p, cast
from dataclasses import dataclass
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]

from lightning_ntp.health.findings import Finding
from lightning_ntp.nvml.errors import NOT_FOUND, CallError, Kind
from lightning_ntp.nvml.library import Library, Renewed
from lightning_ntp.nvml.poller import Poller
from lightning_ntp.nvml.protocol import UNAVAILABLE, Outlet

WAIT = "nvmlEventSetWait"
_WAIT_MILLISECONDS = 500
"""A new start of NVML waits for its end."""
_AGAIN_SECONDS = 1.0
_UNSUPPORTED_SECONDS = 600.0
_EVERYWHERE = 0xFFFFFFFF
"""Instance of an event that is about all of a device."""
_RECOVERY_ACTION_CHANGED = 154
_MEMORY = {
    nvml.nvmlEventTypeDoubleBitEccError: "an uncorrected memory error",
    nvml.nvmlEventTypeNonFatalPoisonError: "memory marked as broken was read, which did not spread",
    nvml.nvmlEventTypeFatalPoisonError: "memory marked as broken was used",
}
_LOOK = (
    nvml.nvmlEventTypeGpuRecoveryAction
    | nvml.nvmlEventTypeDramRetirementEvent
    | nvml.nvmlEventTypeDramRetirementFailure
)
"""Events that say no more than that there is something to read."""
WANTED = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeGpuUnavailableError | _LOOK | sum(_MEMORY)
"""What matters to training: not changes of clocks, of performance states and of MIG, and not what was corrected."""


@dataclass
class _Registered:
    """What is watched on one device: itself, or MIG instances of it."""

    watched: dict[str, int]
    """By UUID: the GPU instance, or ``_EVERYWHERE``."""


class Events(threading.Thread):
    """Waits for events, and tells them.

    Args:
        library: NVML.
        outlet: Where findings go.
        pollers: Gives who looks at which device, by UUID.
    """

    def __init__(self, library: Library, outlet: Outlet, pollers: Callable[[], Mapping[str, Poller]]) -> None:
        super().__init__(name="events", daemon=True)
        self._library, self._outlet, self._pollers = library, outlet, pollers
        self._epoch = -1
        self._devices: dict[int, _Registered] = {}
        """By address of the handle."""
        self._tried: dict[str, float] = {}
        """By UUID: when to try to register it again."""
        self._told = ""
        self._wake = threading.Event()

    def devices_changed(self) -> None:
        self._wake.set()

    def run(self) -> None:
        while True:
            pause = 0.0
            try:
                self._epoch, self._devices, self._tried = self._library.epoch, {}, {}
                self._listen(self._ask("nvmlEventSetCreate"))
            except Renewed:
                pass
            except CallError as error:
                pause = self._failed(error)
            if pause:
                self._wake.clear()
                self._wake.wait(pause)

    def _ask(self, name: str, *arguments: Any, gpu: str = "") -> Any:
        return self._library.ask(name, gpu, self._epoch, *arguments)

    def _failed(self, error: CallError) -> float:
        """How long to wait before the next set."""
        if error.kind is Kind.LOST:  # of whom, the looks find out
            for poller in self._pollers().values():
                poller.poke()
            return _AGAIN_SECONDS
        if error.kind in (Kind.UNSUPPORTED, Kind.PERMISSION):
            self._note(f"events are not watched, only what can be read: {error}")
            return _UNSUPPORTED_SECONDS
        return _AGAIN_SECONDS

    def _note(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._outlet.send(note=text)

    # ---- registering ------------------------------------------------------------------------------------------

    def _listen(self, events: Any) -> None:
        try:
            while True:
                self._register_new(events)
                if not self._devices:
                    self._wake.wait(_AGAIN_SECONDS)
                    self._wake.clear()
                    if self._library.epoch != self._epoch:
                        raise Renewed
                    continue
                try:
                    event = self._ask(WAIT, events, _WAIT_MILLISECONDS)
                except CallError as error:
                    if error.code != nvml.NVML_ERROR_TIMEOUT:
                        raise
                else:
                    self._take(event)
        except CallError:
            self._free(events)
            raise

    def _free(self, events: Any) -> None:
        try:
            self._ask("nvmlEventSetFree", events)
        except CallError:
            pass  # it goes with NVML

    def _register_new(self, events: Any) -> None:
        now, pollers = time.monotonic(), self._pollers()
        for gpu in pollers:
            if now < self._tried.get(gpu, 0.0):
                continue
            self._tried[gpu] = float("inf")
            try:
                self._register(gpu, events)
            except CallError as error:
                # a device that is gone is registered after a new start of NVML, with a new set
                if error.kind is Kind.RETRY or error.code == NOT_FOUND:
                    self._tried[gpu] = now + _AGAIN_SECONDS
                elif error.kind is Kind.DRIVER:
                    raise
        for gpu in [gpu for gpu in self._tried if gpu not in pollers]:
            del self._tried[gpu]
            for device in self._devices.values():
                device.watched.pop(gpu, None)

    def _register(self, gpu: str, events: Any) -> None:
        handle, instance = self._ask("nvmlDeviceGetHandleByUUID", gpu, gpu=gpu), _EVERYWHERE
        if gpu.startswith("MIG"):
            instance = self._ask("nvmlDeviceGetGpuInstanceId", handle, gpu=gpu)
            handle = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle, gpu=gpu)
        address = cast(handle, c_void_p).value or 0
        if address not in self._devices:
            wanted = WANTED & self._ask("nvmlDeviceGetSupportedEventTypes", handle, gpu=gpu)
            if not wanted:
                return
            self._ask("nvmlDeviceRegisterEvents", handle, wanted, events, gpu=gpu)
            self._devices[address] = _Registered({})
        self._devices[address].watched[gpu] = instance

    # ---- telling ----------------------------------------------------------------------------------------------

    def _take(self, event: Any) -> None:
        kind, data = int(event.eventType), int(event.eventData)
        device = self._devices.get(cast(event.device, c_void_p).value or 0)
        pollers = self._pollers()
        for gpu, instance in (device.watched if device else {}).items():
            poller = pollers.get(gpu)
            if poller is None or _EVERYWHERE not in (instance, event.gpuInstanceId) and instance != event.gpuInstanceId:
                continue
            with self._outlet.lock:
                poller.event()
                if kind == nvml.nvmlEventTypeXidCriticalError:
                    self._outlet.find(Finding("xid", "the driver has reported it", gpu, code=data))
                elif kind == nvml.nvmlEventTypeGpuUnavailableError:
                    text = "the driver says that the device is not available"
                    self._outlet.find(Finding(UNAVAILABLE, text, gpu))
                    poller.unavailable()
                elif kind in _MEMORY:
                    self._outlet.find(Finding("ecc_uncorrected", f"{_MEMORY[kind]}, says the driver", gpu))
            is_xid = kind == nvml.nvmlEventTypeXidCriticalError
            if data == _RECOVERY_ACTION_CHANGED if is_xid else kind != nvml.nvmlEventTypeGpuUnavailableError:
                poller.poke()
