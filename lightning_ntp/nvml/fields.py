"""The fields of a device that are read in one call, and what becomes of their values (``NVML_FI_*``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]

WHOLE = 0
"""Scope of a field that is about all of the device."""


@dataclass(frozen=True)
class Field:
    """One field.

    Args:
        key: Of its value in a reading; empty for those of links.
        id: NVML's number.
        scope: A link, for fields that each link has.
        factor: From NVML's unit to ours.
    """

    key: str
    id: int
    scope: int = WHOLE
    factor: float = 1.0


DEVICE_FIELDS = (
    Field("recovery_action", nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
    Field("ecc_corrected_total", nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL),
    Field("ecc_uncorrected_total", nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL),
    Field("power_w", nvml.NVML_FI_DEV_POWER_INSTANT, factor=1e-3),
    Field("power_average_w", nvml.NVML_FI_DEV_POWER_AVERAGE, factor=1e-3),
    # in force, which other limits may be too; and as it was set
    Field("power_limit_w", nvml.NVML_FI_DEV_POWER_CURRENT_LIMIT, factor=1e-3),
    Field("power_limit_set_w", nvml.NVML_FI_DEV_POWER_REQUESTED_LIMIT, factor=1e-3),
    Field("power_limit_default_w", nvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT, factor=1e-3),
    Field("energy_j", nvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, factor=1e-3),
    Field("memory_temperature_c", nvml.NVML_FI_DEV_MEMORY_TEMP),
    # distances to what GetMarginTemperature gives: below 0 as a rule, signed
    Field("temperature_shutdown_tlimit_c", nvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT),
    Field("temperature_slowdown_tlimit_c", nvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT),
    Field("temperature_memory_max_tlimit_c", nvml.NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT),
    Field("temperature_gpu_max_tlimit_c", nvml.NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT),
    Field("pcie_replays", nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER),
)
LINK_COUNT = Field("nvlink_count", nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
TOTAL_DATA_ERRORS = (
    Field("", nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL),
    Field("", nvml.NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL),
)
"""Sums over links of kinds that a link by itself does not say."""
TOTAL_LINK_ERRORS = (
    Field("", nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL),
    Field("", nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL),
    Field("", nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL),
)
"""Sums over links of the kinds that links say too, from Hopper on."""
_LINK_ERRORS = (
    nvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    nvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    nvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
    # NVLink 5
    nvml.NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS,
    nvml.NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS,
    nvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,
    nvml.NVML_FI_DEV_NVLINK_COUNT_RCV_REMOTE_ERRORS,
    nvml.NVML_FI_DEV_NVLINK_COUNT_RCV_GENERAL_ERRORS,
    nvml.NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
    nvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_DISCARDS,
    nvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    nvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
    nvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS,
)


@dataclass(frozen=True)
class LinkFields:
    """The fields of a link."""

    link: int
    state: Field
    errors: tuple[Field, ...]
    """Counters of all generations of NVLink."""

    @classmethod
    def of(cls, link: int) -> LinkFields:
        state = Field("", nvml.NVML_FI_DEV_NVLINK_GET_STATE, link)
        return cls(link, state, tuple(Field("", number, link) for number in _LINK_ERRORS))


_MEMBERS = {
    nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    nvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    nvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def number(value: Any) -> float | None:
    """The number in a ``c_nvmlFieldValue_t``; None if it is of a type that pynvml does not know."""
    member = _MEMBERS.get(value.valueType)
    return None if member is None else float(getattr(value.value, member))
