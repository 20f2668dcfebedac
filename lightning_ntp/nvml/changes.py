"""What is new since the former look at a device: findings, each once when it begins and once when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_ntp.health.findings import Finding
from lightning_ntp.health.verdicts import HEALTHY
from lightning_ntp.nvml.errors import CallError, Kind
from lightning_ntp.nvml.fabric import fabric_ills
from lightning_ntp.nvml.protocol import UNAVAILABLE
from lightning_ntp.nvml.reader import Poll
from lightning_ntp.nvml.readings import Reading

TRIES = 3
"""So often in a row may a call fail before the driver is suspected."""
PCIE_REPLAYS_PER_MINUTE = 10
_MINUTE = 60.0
_HW_SLOWDOWN, _HW_THERMAL, _POWER_BRAKE = 0x8, 0x40, 0x80
"""Clock event reasons. The first is set with each of the others too."""
_RECOVERY = {
    1: "a reset of the device",
    2: "a reboot of the node",
    3: "that peer-to-peer traffic ends",
    4: "that it is drained and reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
"""``NVML_GPU_RECOVERY_ACTION_*``."""

Key = tuple[str, int | None]
"""Signal and code of a condition."""


class Changes:
    """Compares looks at one device.

    Args:
        gpu: UUID of the device.
        memory: What :meth:`memory` of a former process has given.
    """

    def __init__(self, gpu: str, memory: Mapping[str, Any] | None = None) -> None:
        self._gpu = gpu
        memory = memory or {}
        self._standing: set[Key] = {(signal, code) for signal, code in memory.get("standing", ())}
        self._up: set[int] = set(memory.get("up", ()))
        """Links that were active."""
        reading = memory.get("reading")
        self._former = Reading.from_message(reading) if reading else Reading(gpu, 0.0)
        self._failures: dict[str, list[int]] = {}
        """By what was asked: how often in a row it has failed, and the last code."""
        self._replays: deque[tuple[float, float]] = deque()
        self._told: dict[str, float] = {}
        self._untold, self._faulty = 0.0, set[int]()
        """Errors on links that were not told yet, and on which links."""

    @property
    def standing(self) -> set[Key]:
        """The conditions that hold, as far as they have an end."""
        return set(self._standing)

    def memory(self) -> dict[str, Any]:
        """What another process needs to go on from here."""
        standing = [list(key) for key in sorted(self._standing, key=str)]
        return {"standing": standing, "up": sorted(self._up), "reading": self._former.to_message()}

    def unavailable(self) -> None:
        """The driver has said that the device is not available, and it was told."""
        self._standing.add((UNAVAILABLE, None))

    def see(self, poll: Poll, now: float | None = None) -> list[Finding]:
        """What a look has shown.

        Args:
            poll: The look.
            now: Seconds on a clock that goes on.
        """
        return list(self._see(poll, time.monotonic() if now is None else now))

    def healthy(self, poll: Poll) -> Finding | None:
        """That the device has passed its check, if it has."""
        values = poll.reading.values
        wrong = ("recovery_action", "sram_threshold_exceeded", "row_remap_failure")
        if not poll.complete or any(values.get(name) for name in wrong):
            return None
        return Finding(HEALTHY, "", self._gpu, code=int("recovery_action" in values))

    def _see(self, poll: Poll, now: float) -> Iterator[Finding]:
        reading = poll.reading
        yield from self._see_loss(poll)
        yield from self._see_errors(poll)
        yield from self._see_recovery_action(reading)
        yield from self._see_memory(reading)
        yield from self._see_links(reading, now)
        yield from self._see_heat(reading)
        yield from self._see_replays(reading, now)
        self._former = reading if poll.complete else self._with_former(reading)

    def _with_former(self, reading: Reading) -> Reading:
        """What could not be read this time is as it was: of a device that says nothing, everything, and as old."""
        former = self._former
        kept = frozenset(former.values) - frozenset(reading.values)
        return Reading(
            self._gpu,
            reading.at if reading.values else former.at,
            {**former.values, **reading.values},
            {**former.links, **reading.links},
            former.unsupported if former.values else reading.unsupported,
            kept if reading.values else former.kept,
        )

    # ---- what begins and ends ---------------------------------------------------------------------------------

    def _level(
        self, signal: str, holds: bool, text: str, code: int | None = None, values: Mapping[str, float] | None = None
    ) -> Iterator[Finding]:
        key = (signal, code)
        if holds and key not in self._standing:
            self._standing.add(key)
            yield Finding(signal, text, self._gpu, code=code, values=values or {})
        elif not holds and key in self._standing:
            self._standing.discard(key)
            yield Finding(signal, "is over", self._gpu, code=code, clears=True)

    def _end(self, signal: str, but: frozenset[int | None] = frozenset()) -> Iterator[Finding]:
        """End all conditions of a signal, except those with certain codes."""
        for _, code in sorted((key for key in self._standing if key[0] == signal and key[1] not in but), key=str):
            yield from self._level(signal, False, "", code)

    def _see_loss(self, poll: Poll) -> Iterator[Finding]:
        kind = poll.lost.kind if poll.lost else None
        if poll.lost is not None:
            yield from self._level("gpu_lost", kind is Kind.LOST, str(poll.lost))
            yield from self._level("reset_required", kind is Kind.RESET, str(poll.lost))
        elif poll.complete:
            for signal in ("gpu_lost", "reset_required", UNAVAILABLE):
                yield from self._end(signal)

    def _see_errors(self, poll: Poll) -> Iterator[Finding]:
        if poll.lost is not None:
            return
        self._failures = {
            what: [self._failures.get(what, [0])[0] + 1, error.code] for what, error in poll.errors.items()
        }
        failing: dict[int, CallError] = {}
        for what, error in poll.errors.items():
            if self._failures[what][0] >= TRIES:
                failing.setdefault(error.code, error)
        for code, error in sorted(failing.items()):
            yield from self._level("nvml_error", True, f"{error}, {TRIES} times in a row", code)
        yield from self._end("nvml_error", frozenset(failing))

    # ---- what is read -----------------------------------------------------------------------------------------

    def _grown(self, reading: Reading, *names: str) -> float:
        """By how much a count has grown: of several that overlap, the one that has most. A new start is no growth."""
        former, now = self._former.values, reading.values
        return max((now[name] - former[name] for name in names if name in now and name in former), default=0.0)

    def _see_recovery_action(self, reading: Reading) -> Iterator[Finding]:
        if "recovery_action" not in reading.values:
            return
        action = int(reading.values["recovery_action"])
        yield from self._end("recovery_action", frozenset({action}))
        if action:
            what = _RECOVERY.get(action, f"action {action}, which is not known here")
            yield from self._level("recovery_action", True, f"the driver asks for {what}", action)

    def _see_memory(self, reading: Reading) -> Iterator[Finding]:
        values = reading.values
        names = ("ecc_uncorrected_total", "ecc_uncorrected_dram", "ecc_uncorrected_sram", "sram_uncorrected")
        grown = self._grown(reading, *names)
        if grown > 0:
            counts = {name: values[name] for name in names if name in values}
            text = f"{grown:.0f} more uncorrected memory errors: {_counts(counts)}"
            yield Finding("ecc_uncorrected", text, self._gpu, values=counts)
        if "sram_threshold_exceeded" in values:
            text = f"{values.get('sram_uncorrected', 0):.0f} uncorrected errors in its SRAM since the driver was loaded"
            yield from self._level("sram_threshold", values["sram_threshold_exceeded"] > 0, text)
        for name, text in (("row_remap_pending", "until it is reset"), ("row_remap_failure", "no spare row is left")):
            if name in values:
                rows = f"{values.get('row_remap_uncorrectable', 0):.0f} rows remapped for uncorrectable errors"
                yield from self._level(name, values[name] > 0, f"{rows}; {text}")

    def _see_links(self, reading: Reading, now: float) -> Iterator[Finding]:
        links = reading.links
        self._up |= {number for number, link in links.items() if link.active}
        down = sorted(number for number, link in links.items() if not link.active and number in self._up)
        if links:
            text = f"{_links(down)} of {len(links)} {'is' if len(down) == 1 else 'are'} down"
            yield from self._level("nvlink_down", bool(down), text)
        former = self._former.links
        self._untold += max(0.0, self._grown(reading, "nvlink_errors"))
        self._faulty |= {n for n, link in links.items() if n in former and link.errors > former[n].errors}
        if self._untold > 0 and self._may_tell("nvlink_errors", now):
            text = f"{self._untold:.0f} more errors on {_links(sorted(self._faulty)) if self._faulty else 'its links'}"
            values = {"nvlink_errors": self._untold}
            self._untold, self._faulty = 0.0, set()
            yield Finding("nvlink_errors", text, self._gpu, values=values)
        if "fabric_state" in reading.values:
            ills = fabric_ills(reading.values)
            yield from self._level("fabric", bool(ills), ", ".join(ills))

    def _see_heat(self, reading: Reading) -> Iterator[Finding]:
        values = reading.values
        heat = {name: values[name] for name in ("temperature_c", "temperature_margin_c") if name in values}
        at = f" at {heat['temperature_c']:.0f} C" if "temperature_c" in heat else ""
        if "temperature_margin_c" in heat:
            margin = heat["temperature_margin_c"]
            text = f"{margin:.0f} C to the temperature at which it slows down{at and ',' + at}"
            yield from self._level("temperature_margin", margin <= 0, text, values=heat)
        if "clocks_event_reasons" in values:
            reasons = int(values["clocks_event_reasons"])
            brake = bool(reasons & _POWER_BRAKE)
            hot = bool(reasons & _HW_THERMAL) or bool(reasons & _HW_SLOWDOWN) and not brake
            clock = f", {values['sm_clock_mhz']:.0f} MHz" if "sm_clock_mhz" in values else ""
            yield from self._level("thermal_slowdown", hot, f"slowed down by its hardware{at}{clock}", values=heat)
            yield from self._level("power_brake", brake, f"slowed down by the power supply's signal{clock}")

    def _see_replays(self, reading: Reading, now: float) -> Iterator[Finding]:
        if "pcie_replays" not in reading.values:
            return
        replays, count = self._replays, reading.values["pcie_replays"]
        if replays and count < replays[-1][1]:
            replays.clear()  # the device was reset
        if not replays and "pcie_replays" in self._former.values:
            replays.append((now, min(count, self._former.values["pcie_replays"])))
        replays.append((now, count))
        while now - replays[0][0] > _MINUTE:
            replays.popleft()
        grown = count - replays[0][1]
        if grown > PCIE_REPLAYS_PER_MINUTE and self._may_tell("pcie_replays", now):
            text = f"{grown:.0f} transfers were repeated within a minute"
            yield Finding("pcie_replays", text, self._gpu, values={"pcie_replays": count})

    def _may_tell(self, signal: str, now: float) -> bool:
        if now - self._told.get(signal, float("-inf")) < _MINUTE:
            return False
        self._told[signal] = now
        return True


def _links(numbers: list[int]) -> str:
    return f"{'link' if len(numbers) == 1 else 'links'} {', '.join(map(str, numbers))}"


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name.removeprefix('ecc_').replace('_', ' ')} {count:.0f}" for name, count in counts.items())
