"""Questions that are asked once, each in a short-lived process: a driver that hangs costs the time limit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ntp.nvml.child import ask_once
from lightning_ntp.nvml.fabric import fabric_ills
from lightning_ntp.nvml.profiles import Profiles
from lightning_ntp.nvml.readings import SIGNALS, Reading

_CAP_SYS_ADMIN = 21


@dataclass(frozen=True)
class Gpu:
    """A device.

    Args:
        index: NVML's number: by bus, whatever ``CUDA_VISIBLE_DEVICES`` says.
        uuid: Its UUID; empty if it does not say even that.
        name: Of the product.
        mig: UUIDs of its MIG instances.
        power_limits_w: The lowest and the highest limit that can be set, in W; empty if none can.
        reading: What it says; None if nothing.
        problem: Why it does not say everything, if so.
        profiles: Its workload power profiles; None if it has none, or does not say them.
    """

    index: int
    uuid: str = ""
    name: str = ""
    mig: tuple[str, ...] = ()
    power_limits_w: tuple[float, ...] = ()
    reading: Reading | None = None
    problem: str = ""
    profiles: Profiles | None = None

    @property
    def supported(self) -> frozenset[str]:
        """The signals that it says something about."""
        return frozenset(SIGNALS) - self.reading.unsupported if self.reading else frozenset()

    @property
    def nvlinks(self) -> int:
        """How many NVLinks it has, active or not."""
        return len(self.reading.links) if self.reading else 0

    @property
    def memory_total(self) -> int | None:
        """In bytes."""
        return self._bytes("memory_total_bytes")

    @property
    def memory_free(self) -> int | None:
        """In bytes."""
        return self._bytes("memory_free_bytes")

    @property
    def fabric(self) -> str:
        """``healthy``, what is wrong with it, or ``unsupported``."""
        if self.reading is None or "fabric_state" not in self.reading.values:
            return "unsupported"
        return ", ".join(fabric_ills(self.reading.values)) or "healthy"

    def _bytes(self, name: str) -> int | None:
        value = self.reading.values.get(name) if self.reading else None
        return None if value is None else int(value)


@dataclass(frozen=True)
class Inventory:
    """What the driver of this machine has.

    Args:
        driver: Its version; empty if it does not say it.
        problem: Why there is nothing, or not everything, if so.
        may_set_limits: Whether this process may set power limits and clocks: that takes root (CAP_SYS_ADMIN).
        gpus: The devices, by index.
        notes: What this process may not know.
    """

    driver: str = ""
    problem: str = ""
    may_set_limits: bool = False
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = field(default=())


def inventory(seconds: float = 10.0) -> Inventory:
    """Everything that the driver has. Raises nothing: what is wrong is in the result.

    Args:
        seconds: The longest that it may take; devices that have not answered by then say so.
    """
    driver, problem, count, notes, found = "", "", 0, [], {}
    for message in ask_once(["inventory"], seconds):
        if "off" in message:
            problem = message["off"]
        elif "driver" in message:
            driver, count = message["driver"], message["count"]
        elif "gpu" in message:
            gpu = _gpu(message["gpu"])
            found[gpu.index] = gpu
            notes += message["gpu"].get("notes", [])
        elif "silent" in message:
            problem = message["silent"]
    for index in range(count):
        found.setdefault(index, Gpu(index, problem=f"it has not answered within {seconds:g} s"))
    gpus = tuple(found[index] for index in sorted(found))
    return Inventory(driver, problem, _may_set_limits(), gpus, tuple(notes))


def find(uuids: Sequence[str], seconds: float = 10.0) -> list[str]:
    """Those that the driver does not have.

    Args:
        uuids: Of devices or MIG instances.
        seconds: The longest that it may take.

    Returns:
        In the order of ``uuids``; nothing if there is no driver, or none that answers in time.
    """
    for message in ask_once(["find", *uuids], seconds) if uuids else ():
        if "missing" in message:
            return list(message["missing"])
    return []


def _gpu(message: dict[str, Any]) -> Gpu:
    reading = message.get("reading")
    return Gpu(
        message["index"],
        message.get("uuid", ""),
        message.get("name", ""),
        tuple(message.get("mig", ())),
        tuple(message.get("power_limits_w", ())),
        Reading.from_message(reading) if reading else None,
        message["problem"],
        Profiles.from_message(message["profiles"]) if message.get("profiles") else None,
    )


def _may_set_limits() -> bool:
    """What the driver asks for is no user but a capability, which root in a container need not have."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    except (OSError, ValueError, IndexError):
        pass
    return os.geteuid() == 0
