"""The calls that a look at a device makes besides the one for its fields.

Where NVML has a successor of a call, it is the successor that is made: what is deprecated will be gone with CUDA 14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]

Ask = Callable[..., Any]
"""``ask(name, handle, ...)``: a function of pynvml, called with the device's handle."""
Values = dict[str, float]


@dataclass(frozen=True)
class Query:
    """One call.

    Args:
        name: Unique; what the device supports is remembered under it.
        read: Given what calls, the handle and what is known already; gives values by name.
        unless: Not made if this value is known already.
        unless_failed: Not made if this query has failed, but is supported: what it gives is not quite the same.
    """

    name: str
    read: Callable[[Ask, Any, Mapping[str, float]], Values]
    unless: str = ""
    unless_failed: str = ""


def _ecc_dram(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"ecc_uncorrected_dram": _uncorrected(ask, handle, nvml.NVML_MEMORY_LOCATION_DRAM)}


def _ecc_sram(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"ecc_uncorrected_sram": _uncorrected(ask, handle, nvml.NVML_MEMORY_LOCATION_SRAM)}


def _ecc_corrected(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    kind, places = (
        nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        (nvml.NVML_MEMORY_LOCATION_DRAM, nvml.NVML_MEMORY_LOCATION_SRAM),
    )
    return {"ecc_corrected_total": sum(_memory_errors(ask, handle, kind, place) for place in places)}


def _uncorrected(ask: Ask, handle: Any, location: int) -> float:
    return _memory_errors(ask, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, location)


def _memory_errors(ask: Ask, handle: Any, kind: int, location: int) -> float:
    return float(ask("nvmlDeviceGetMemoryErrorCounter", handle, kind, nvml.NVML_VOLATILE_ECC, location))


def _sram(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    ask("nvmlDeviceGetSramEccErrorStatus", handle, byref(status))
    return {
        "sram_threshold_exceeded": float(status.bThresholdExceeded != 0),
        "sram_uncorrected": float(status.volatileUncParity + status.volatileUncSecDed),
    }


def _rows(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    correctable, uncorrectable, pending, failure = ask("nvmlDeviceGetRemappedRows", handle)
    return {
        "row_remap_correctable": float(correctable),
        "row_remap_uncorrectable": float(uncorrectable),
        "row_remap_pending": float(pending != 0),
        "row_remap_failure": float(failure != 0),
    }


def _fabric(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    info = nvml.c_nvmlGpuFabricInfo_v3_t()
    ask("nvmlDeviceGetGpuFabricInfoV", handle, byref(info))
    return {**_fabric_values(info), **({"fabric_summary": float(info.healthSummary)} if info.state else {})}


def _fabric_v2(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    ask("nvmlDeviceGetGpuFabricInfoV", handle, byref(info))
    return _fabric_values(info)


def _fabric_values(info: Any) -> Values:
    if info.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return {}
    return {
        "fabric_state": float(info.state),
        "fabric_status": float(info.status),
        "fabric_health_mask": float(info.healthMask),
    }


def _temperature(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"temperature_c": float(ask("nvmlDeviceGetTemperatureV", handle, nvml.NVML_TEMPERATURE_GPU))}


def _margin(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"temperature_margin_c": float(ask("nvmlDeviceGetMarginTemperature", handle))}


def _margin_to_threshold(ask: Ask, handle: Any, known: Mapping[str, float]) -> Values:
    """For devices before Ada, which do not say their margin."""
    if "temperature_c" not in known:
        return {}
    threshold = ask("nvmlDeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    return {"temperature_margin_c": float(threshold) - known["temperature_c"]} if threshold else {}


def _clocks_event_reasons(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"clocks_event_reasons": float(ask("nvmlDeviceGetCurrentClocksEventReasons", handle))}


def _sm_clock(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"sm_clock_mhz": float(ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM))}


def _memory(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    memory = ask("nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
    return {
        "memory_used_bytes": float(memory.used),
        "memory_free_bytes": float(memory.free),
        "memory_total_bytes": float(memory.total),
    }


def _power(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"power_w": ask("nvmlDeviceGetPowerUsage", handle) * 1e-3}


def _power_limit(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"power_limit_w": ask("nvmlDeviceGetEnforcedPowerLimit", handle) * 1e-3}


def _power_limit_set(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"power_limit_set_w": ask("nvmlDeviceGetPowerManagementLimit", handle) * 1e-3}


def _energy(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"energy_j": ask("nvmlDeviceGetTotalEnergyConsumption", handle) * 1e-3}


def _pcie_replays(ask: Ask, handle: Any, _: Mapping[str, float]) -> Values:
    return {"pcie_replays": float(ask("nvmlDeviceGetPcieReplayCounter", handle))}


QUERIES = (
    Query("ecc_dram", _ecc_dram),
    Query("ecc_sram", _ecc_sram),
    Query("sram", _sram),
    Query("rows", _rows),
    Query("fabric", _fabric),
    Query("fabric_v2", _fabric_v2, unless="fabric_state"),
    Query("temperature", _temperature),
    Query("margin", _margin),
    Query("margin_to_threshold", _margin_to_threshold, unless="temperature_margin_c", unless_failed="margin"),
    Query("clocks_event_reasons", _clocks_event_reasons),
    Query("sm_clock", _sm_clock),
    Query("memory", _memory),
    # what older devices do not have as a field
    Query("power", _power, unless="power_w"),
    Query("power_limit", _power_limit, unless="power_limit_w"),
    Query("power_limit_set", _power_limit_set, unless="power_limit_set_w"),
    Query("energy", _energy, unless="energy_j"),
    Query("pcie_replays", _pcie_replays, unless="pcie_replays"),
    Query("ecc_corrected", _ecc_corrected, unless="ecc_corrected_total"),
)
"""In this order: later ones use what earlier ones have given."""
