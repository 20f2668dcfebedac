"""Workload power profiles of a device: settings that NVIDIA has tuned for kinds of work, from Blackwell on.

Several may be requested at a time, by whoever may write; of those that conflict the driver enforces the one that goes
first. What the numbers mean: ``nvmlPowerProfileType_t`` in
https://docs.nvidia.com/deploy/nvml-api/group__nvmlPowerProfiles.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from ctypes import byref
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from lightning_ntp.nvml.errors import FUNCTION_NOT_FOUND, NOT_SUPPORTED, CallError

MOST_PROFILES = 255
"""NVML_WORKLOAD_POWER_MAX_PROFILES: numbers are below it."""
_WORD_BITS = 32
_CLEAR, _OVERWRITE = 0, 2
"""NVML_POWER_PROFILE_OPERATION_*."""
_CALLS = "nvmlDeviceWorkloadPowerProfile"
Ask = Callable[..., Any]
"""``ask(name, ...)``: a function of pynvml, called with the device's handle before the arguments."""


class Profile(IntEnum):
    """The profiles that NVML names, by number (``NVML_POWER_PROFILE_*``). A device says which it has."""

    MAX_P = 0
    MAX_Q = 1
    COMPUTE = 2
    MEMORY_BOUND = 3
    NETWORK = 4
    BALANCED = 5
    LLM_INFERENCE = 6
    LLM_TRAINING = 7
    RBM = 8
    DCPCIE = 9
    HMMA_SPARSE = 10
    HMMA_DENSE = 11
    SYNC_BALANCED = 12
    HPC = 13
    MIG = 14
    MAX_Q_1 = 15
    NETWORK_BOUND = 16
    HIGH_THROUGHPUT_INFERENCE = 17
    MEDIUM_THROUGHPUT_INFERENCE = 18
    LOW_LATENCY_INFERENCE = 19
    TRAINING = 20
    INFERENCE = 21
    MAX_Q_2 = 22
    MAX_Q_3 = 23
    LOW_PRIORITY_BACKGROUND = 24


_ABBREVIATIONS = ("LLM", "RBM", "DCPCIE", "HMMA", "HPC", "MIG")


@dataclass(frozen=True)
class Profiles:
    """What a device says of its profiles.

    Args:
        supported: Numbers of those that it has.
        requested: Those that somebody has requested.
        enforced: Those in force: of two requested ones that conflict, one.
        conflicts: By profile, those that cannot be in force with it; as the driver says it, which may be one way only.
    """

    supported: frozenset[int] = frozenset()
    requested: frozenset[int] = frozenset()
    enforced: frozenset[int] = frozenset()
    conflicts: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def refusal(self, wanted: frozenset[int]) -> str:
        """Why these may not be requested together; empty if they may."""
        missing = wanted - self.supported
        if missing:
            return f"{show_profiles(missing)} is not among its profiles: {show_profiles(self.supported)}"
        for one in sorted(wanted):
            others = self.conflicts.get(one, frozenset()) & wanted - {one}
            if others:
                return f"{show_profiles([one])} conflicts with {show_profiles(others)}: choose one of them"
        return ""

    def to_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {name: sorted(getattr(self, name)) for name in ("supported", "requested", "enforced")}
        return message | {"conflicts": [[one, sorted(others)] for one, others in sorted(self.conflicts.items())]}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Profiles:
        return cls(
            frozenset(message["supported"]),
            frozenset(message["requested"]),
            frozenset(message["enforced"]),
            {one: frozenset(others) for one, others in message["conflicts"]},
        )


def show_profiles(numbers: Iterable[int]) -> str:
    """Profiles for people: ``LLM training, Max-Q``."""
    return ", ".join(_name(number) for number in sorted(numbers)) or "none"


def read_profiles(ask: Ask) -> Profiles:
    """What a device says of its profiles.

    Raises:
        CallError: If it does not; from older devices and drivers one of kind ``UNSUPPORTED``.
    """
    import pynvml as nvml  # type: ignore[import-untyped]

    info = nvml.c_nvmlWorkloadPowerProfileProfilesInfo_v1_t()
    ask(f"{_CALLS}GetProfilesInfo", byref(info))
    conflicts: dict[int, frozenset[int]] = {}
    for each in info.perfProfile:  # by the number in it, since nobody says that a profile's place is its number
        others = _numbers(each.conflictingmask)
        if others:
            conflicts[each.profileId] = conflicts.get(each.profileId, frozenset()) | others
    current = _current(ask)
    enforced = _numbers(current.enforcedProfilesMask)
    return Profiles(_numbers(info.perfProfilesMask), _numbers(current.requestedProfilesMask), enforced, conflicts)


def read_requested(ask: Ask) -> frozenset[int]:
    """The profiles that are requested of a device.

    Raises:
        CallError: If it does not say it.
    """
    return _numbers(_current(ask).requestedProfilesMask)


def request_profiles(ask: Ask, wanted: frozenset[int]) -> None:
    """Request these profiles and no others.

    Newer drivers do that at once. Older ones clear and set, so that who dies in between leaves those that were
    requested before and are wanted too.

    Raises:
        CallError: If they were not, or not all, as far as the driver knows.
    """
    import pynvml as nvml

    before = read_requested(ask)
    if wanted == before:
        return
    update = nvml.c_nvmlWorkloadPowerProfileUpdateProfiles_v1_t()
    # an empty list of profiles to request is nothing that the documentation speaks of
    update.operation = _OVERWRITE if wanted else _CLEAR
    _fill(update.updateProfilesMask, wanted or before)
    try:
        ask(f"{_CALLS}UpdateProfiles_v1", byref(update))
        return
    except CallError as error:
        if error.code not in (FUNCTION_NOT_FOUND, NOT_SUPPORTED):
            raise
    for call, numbers in (("ClearRequestedProfiles", before - wanted), ("SetRequestedProfiles", wanted - before)):
        if numbers:
            request = nvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
            _fill(request.requestedProfilesMask, numbers)
            ask(_CALLS + call, byref(request))


def _current(ask: Ask) -> Any:
    import pynvml as nvml

    current = nvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
    ask(f"{_CALLS}GetCurrentProfiles", byref(current))
    return current


def _numbers(mask: Any) -> frozenset[int]:
    words = [(place * _WORD_BITS, word) for place, word in enumerate(mask.mask) if word]
    return frozenset(first + bit for first, word in words for bit in range(_WORD_BITS) if word >> bit & 1)


def _fill(mask: Any, numbers: Iterable[int]) -> None:
    for number in numbers:
        mask.mask[number // _WORD_BITS] |= 1 << number % _WORD_BITS


def _name(number: int) -> str:
    try:
        name = Profile(number).name
    except ValueError:
        return f"profile {number}"
    if name.startswith("MAX_"):
        return name.capitalize()[:3] + "-" + name[4:].replace("_", "-")
    words = [word if word in _ABBREVIATIONS else word.lower() for word in name.split("_")]
    return " ".join(words)
