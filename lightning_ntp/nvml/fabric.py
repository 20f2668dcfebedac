"""What the health of the NVLink fabric says: bits of a mask, each group of them with a meaning of its own."""

from __future__ import annotations

from collections.abc import Mapping

_COMPLETED = 3
_STATES = {1: "not started", 2: "in progress"}
_TRUE, _FALSE = 1, 2
_FLAGS = (
    (0, _TRUE, "degraded bandwidth"),
    (2, _TRUE, "its route is being recovered"),
    (4, _TRUE, "its route is unhealthy"),
    (6, _TRUE, "a recovery from an access time-out"),
    (14, _FALSE, "the fabric manager is disconnected"),
)
"""Shift of two bits, the value that is bad, and what it means (``NVML_GPU_FABRIC_HEALTH_MASK_*``). 0 is unknown."""
_CONFIGURATION_SHIFT, _CONFIGURATION_MASK = 8, 0xF
_CONFIGURATIONS = {
    2: "a wrong system GUID",
    3: "a wrong chassis serial number",
    4: "no partition",
    5: "too few NVLinks",
    6: "firmware that does not fit",
    7: "a wrong location",
    8: "a wrong state of the device",
}
_SUMMARIES = {2: "unhealthy", 3: "limited capacity"}


def fabric_ills(values: Mapping[str, float]) -> list[str]:
    """What is wrong with the fabric, for people; nothing if it is healthy.

    Args:
        values: ``fabric_state``, ``fabric_status``, ``fabric_health_mask`` and, if the driver says it,
            ``fabric_summary``, as ``nvmlDeviceGetGpuFabricInfoV`` gives them.
    """
    state, status, mask = (int(values[f"fabric_{name}"]) for name in ("state", "status", "health_mask"))
    if state != _COMPLETED:
        return [f"its registration is {_STATES.get(state, f'in state {state}')}"]
    ills = [f"its registration has failed with NVML error {status}"] if status else []
    ills += [text for shift, bad, text in _FLAGS if mask >> shift & 0x3 == bad]
    configuration = mask >> _CONFIGURATION_SHIFT & _CONFIGURATION_MASK
    if configuration > 1:
        ills.append(f"configured with {_CONFIGURATIONS.get(configuration, f'mistake {configuration}')}")
    summary = _SUMMARIES.get(int(values.get("fabric_summary", 0)))
    if summary is not None and not ills:
        ills.append(summary)
    return ills
