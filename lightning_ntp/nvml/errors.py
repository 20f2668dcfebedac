"""What an error of NVML means for a device that is watched: every code is in exactly one class."""

from __future__ import annotations

from enum import Enum, auto

SUCCESS, UNINITIALIZED, NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND = 0, 1, 3, 6, 13


class Kind(Enum):
    """Classes of errors, by what is done about them."""

    UNSUPPORTED = auto()
    """This device, driver or MIG instance does not say it: unknown, which is not healthy; asked again rarely."""
    PERMISSION = auto()
    """This process may not know it: told once, then as unsupported."""
    LOST = auto()
    """The device is gone."""
    RESET = auto()
    """The device is there and does nothing."""
    RETRY = auto()
    """It may go by: suspect if it does not."""
    DRIVER = auto()
    """There is no driver to ask."""


_KINDS: dict[Kind, dict[int, str]] = {
    Kind.UNSUPPORTED: {
        2: "INVALID_ARGUMENT",  # what a driver says of fields, links and MIG instances that it does not know
        3: "NOT_SUPPORTED",
        13: "FUNCTION_NOT_FOUND",
        21: "NO_DATA",
        22: "VGPU_ECC_NOT_SUPPORTED",
        24: "FREQ_NOT_SUPPORTED",
        25: "ARGUMENT_VERSION_MISMATCH",
        26: "DEPRECATED",
        30: "RESET_TYPE_NOT_SUPPORTED",
    },
    Kind.PERMISSION: {
        4: "NO_PERMISSION",
        17: "OPERATING_SYSTEM",  # "the operating system has blocked the request": cgroups
    },
    Kind.LOST: {
        6: "NOT_FOUND",  # of a UUID that was there before; elsewhere the device is looked up again
        15: "GPU_IS_LOST",
        28: "GPU_NOT_FOUND",
    },
    Kind.RESET: {16: "RESET_REQUIRED"},
    Kind.RETRY: {
        1: "UNINITIALIZED",
        5: "ALREADY_INITIALIZED",
        7: "INSUFFICIENT_SIZE",
        8: "INSUFFICIENT_POWER",
        10: "TIMEOUT",
        11: "IRQ_ISSUE",
        14: "CORRUPTED_INFOROM",
        19: "IN_USE",
        20: "MEMORY",
        23: "INSUFFICIENT_RESOURCES",
        27: "NOT_READY",
        29: "INVALID_STATE",
        999: "UNKNOWN",
    },
    Kind.DRIVER: {9: "DRIVER_NOT_LOADED", 12: "LIBRARY_NOT_FOUND", 18: "LIB_RM_VERSION_MISMATCH"},
}
"""Codes of ``nvmlReturn_t`` (nvidia-ml-py 13.615.71), which never change their meaning."""
_KIND_OF = {code: kind for kind, codes in _KINDS.items() for code in codes}
_NAMES = {code: name for codes in _KINDS.values() for code, name in codes.items()}


def kind_of(code: int) -> Kind:
    """The class of an error; ``RETRY`` for one that a newer driver has invented."""
    return _KIND_OF.get(code, Kind.RETRY)


def name_of(code: int) -> str:
    """NVML's name of an error, without ``NVML_ERROR_``."""
    return _NAMES.get(code, f"error {code}")


class CallError(Exception):
    """A call of NVML has failed.

    Args:
        call: Which one.
        code: The ``nvmlReturn_t``.
        text: The driver's words.
    """

    def __init__(self, call: str, code: int, text: str = "") -> None:
        super().__init__(f"{call}: {text or name_of(code)} (NVML error {code})")
        self.call, self.code, self.text = call, code, text or name_of(code)

    @property
    def kind(self) -> Kind:
        return kind_of(self.code)
