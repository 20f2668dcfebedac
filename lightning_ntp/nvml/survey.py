"""The process's side of questions that are asked once: which devices there are, which are not, and how much power."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from lightning_ntp.nvml.errors import NOT_FOUND, CallError, Kind
from lightning_ntp.nvml.library import Library, Renewed
from lightning_ntp.nvml.profiles import read_profiles
from lightning_ntp.nvml.protocol import Outlet
from lightning_ntp.nvml.reader import DeviceReader

_GRAPHICS = 0
"""NVML_CLOCK_GRAPHICS."""
_MOST_LOOK_AHEAD = 64
"""MIG instances of a device are numbered with gaps."""


def find(outlet: Outlet, uuids: Iterable[str]) -> None:
    """Say which devices the driver does not have."""
    library = _started(outlet)
    if library is None:
        return
    missing = []
    for uuid in uuids:
        try:
            library.ask("nvmlDeviceGetHandleByUUID", uuid, library.epoch, uuid)
        except CallError as error:
            # a malformed UUID is refused as an argument; of a device that is lost it is known that there is one
            if error.code == NOT_FOUND or error.kind is Kind.UNSUPPORTED:
                missing.append(uuid)
    outlet.send(missing=missing)


def bounds(outlet: Outlet, uuids: Iterable[str]) -> None:
    """Say the power bounds of devices, each as soon as it has answered."""
    library = _started(outlet)
    if library is not None:
        _side_by_side(_say_bounds, [(outlet, library, uuid) for uuid in uuids])


def survey(outlet: Outlet) -> None:
    """Say which devices there are, each as soon as it has answered."""
    library = _started(outlet)
    if library is None:
        return
    try:
        count = library.ask("nvmlDeviceGetCount", "", library.epoch)
        driver = library.ask("nvmlSystemGetDriverVersion", "", library.epoch)
        outlet.send(driver=driver, count=count)
    except CallError as error:
        outlet.send(off=str(error))
        return
    _side_by_side(_describe, [(outlet, library, index) for index in range(count)])


def _side_by_side(run: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
    """One that hangs does not hold up what others have to say."""
    threads = [threading.Thread(target=run, args=each, daemon=True) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _started(outlet: Outlet) -> Library | None:
    library = Library()
    try:
        library.start()
    except CallError as error:
        outlet.send(off=error.text)
    except ImportError as error:
        outlet.send(off=f"nvidia-ml-py cannot be imported ({error}): pip install nvidia-ml-py")
    else:
        return library
    return None


def _describe(outlet: Outlet, library: Library, index: int) -> None:
    gpu: dict[str, Any] = {"index": index, "problem": ""}

    def ask(name: str, *arguments: Any) -> Any:
        return library.ask(name, gpu.get("uuid", ""), library.epoch, *arguments)

    try:
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        gpu["uuid"] = ask("nvmlDeviceGetUUID", handle)
        gpu["name"] = ask("nvmlDeviceGetName", handle)
        gpu["mig"] = _mig_instances(ask, handle)
        poll = DeviceReader(gpu["uuid"], library).poll()
        gpu["reading"] = poll.reading.to_message()
        problems = [poll.lost] if poll.lost else list(poll.errors.values())
        gpu["problem"] = "; ".join(map(str, problems))
        gpu["notes"] = poll.notes
        gpu["profiles"] = _profiles(ask, handle, gpu)
        gpu["power_limits_w"] = [limit * 1e-3 for limit in _power_limits(ask, handle)]
    except CallError as error:
        gpu["problem"] = gpu["problem"] or str(error)
    except Renewed:  # nobody does that here
        gpu["problem"] = "NVML was started again"
    outlet.send(gpu=gpu)


def _say_bounds(outlet: Outlet, library: Library, uuid: str) -> None:
    def ask(name: str, *arguments: Any) -> Any:
        return library.ask(name, uuid, library.epoch, *arguments)

    try:
        handle = ask("nvmlDeviceGetHandleByUUID", uuid)
        lowest, highest = ask("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        limits = [ask("nvmlDeviceGetPowerManagementLimit", handle), lowest, highest]
        clock = _max_clock(ask, handle)
    except CallError as error:
        outlet.send(bounds=uuid, why=str(error))
    except Renewed:  # nobody does that here
        outlet.send(bounds=uuid, why="NVML was started again")
    else:
        outlet.send(bounds=uuid, limits_mw=limits, max_clock_mhz=clock)


def _max_clock(ask: Any, handle: Any) -> int | None:
    try:
        return int(ask("nvmlDeviceGetMaxClockInfo", handle, _GRAPHICS))
    except CallError as error:
        if error.kind in (Kind.UNSUPPORTED, Kind.PERMISSION):
            return None
        raise


def _mig_instances(ask: Any, handle: Any) -> list[str]:
    found = []
    try:
        if not ask("nvmlDeviceGetMigMode", handle)[0]:
            return []
        for number in range(min(ask("nvmlDeviceGetMaxMigDeviceCount", handle), _MOST_LOOK_AHEAD)):
            try:
                found.append(ask("nvmlDeviceGetUUID", ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)))
            except CallError as error:
                if error.code != NOT_FOUND:
                    raise
    except CallError as error:
        if error.kind is not Kind.UNSUPPORTED:
            raise
    return found


def _power_limits(ask: Any, handle: Any) -> list[int]:
    try:
        return list(ask("nvmlDeviceGetPowerManagementLimitConstraints", handle))
    except CallError as error:
        if error.kind in (Kind.UNSUPPORTED, Kind.PERMISSION):
            return []
        raise


def _profiles(ask: Any, handle: Any, gpu: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = read_profiles(lambda name, *arguments: ask(name, handle, *arguments))
    except CallError as error:
        if error.kind in (Kind.LOST, Kind.RESET, Kind.DRIVER):
            raise
        if error.kind is not Kind.UNSUPPORTED:  # nothing that training needs: no problem of the device
            gpu["notes"].append(f"{gpu['uuid']}: {error}: its workload power profiles are not known")
        return None
    return found.to_message() if found.supported else None
