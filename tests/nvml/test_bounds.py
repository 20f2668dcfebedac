"""How much power devices may be given, asked once."""

from __future__ import annotations

import os
import time

import pynvml
import pytest

from lightning_ntp.launch.lifeline import children_of
from lightning_ntp.nvml import PowerBounds, power_bounds
from tests.nvml.mock import MockNvml


def test_bounds_or_why_there_are_none(nvml: MockNvml) -> None:
    uuids = [nvml.get("uuid", gpu) for gpu in range(4)]
    nvml.set(1, power_limit=550_500, external_power_limit=300_000, max_clock_graphics=2100)
    nvml.set(2, lost=1)
    nvml.unsupported(3, "nvmlDeviceGetMaxClockInfo")
    found = power_bounds([*uuids, "GPU-none"])
    assert list(found) == [*uuids, "GPU-none"]
    assert found[uuids[0]] == PowerBounds(700, 200, 700, 1980)
    assert found[uuids[1]] == PowerBounds(550.5, 200, 700, 2100), "the limit that was set, whatever is in force"
    assert found[uuids[3]] == PowerBounds(700, 200, 700, None)
    assert "GPU is lost" in str(found[uuids[2]]) and "Not Found" in str(found["GPU-none"])
    assert nvml.history() == [] and power_bounds([]) == {}


@pytest.mark.parametrize(
    "call",
    ["nvmlDeviceGetPowerManagementLimitConstraints", "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetMaxClockInfo"],
)
def test_an_error_is_a_reason(nvml: MockNvml, call: str) -> None:
    nvml.fail(call, pynvml.NVML_ERROR_UNKNOWN, gpu=0)
    uuids = [nvml.get("uuid", gpu) for gpu in range(2)]
    found = power_bounds(uuids)
    assert found[uuids[0]] == f"{call}: Unknown Error (NVML error 999)"
    assert isinstance(found[uuids[1]], PowerBounds)


def test_a_device_that_hangs_holds_up_no_other(nvml: MockNvml) -> None:
    uuids = [nvml.get("uuid", gpu) for gpu in range(2)]
    before = children_of(os.getpid())
    with nvml.block("nvmlDeviceGetPowerManagementLimit", gpu=0):
        begun = time.monotonic()
        found = power_bounds(uuids, 1.5)
        assert time.monotonic() - begun < 6, "1.5 s, and what it takes to end a process on a busy machine"
    assert found[uuids[0]] == "the driver has not answered everything within 1.5 s"
    assert isinstance(found[uuids[1]], PowerBounds)
    assert children_of(os.getpid()) == before


def test_without_a_driver_there_is_a_reason_for_each(nvml: MockNvml) -> None:
    nvml.set(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert power_bounds(["GPU-a", "GPU-b"]) == dict.fromkeys(["GPU-a", "GPU-b"], "Driver Not Loaded")
