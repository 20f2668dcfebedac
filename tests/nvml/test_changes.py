"""What becomes a finding: each signal, once when it begins and once when it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pynvml
import pytest

from lightning_ntp.health.rules import _SIGNALS, SeverityTable
from lightning_ntp.nvml.changes import Changes
from lightning_ntp.nvml.fabric import fabric_ills
from tests.nvml.eye import Eye, is_healthy
from tests.nvml.mock import MockNvml

UNCORRECTED = {"corrected": False, "aggregate": False}


@pytest.fixture
def eye(nvml: MockNvml) -> Eye:
    eye = Eye(nvml)
    eye.look()
    return eye


@pytest.mark.parametrize(
    ("signal", "sick", "sound"),
    [
        ("sram_threshold", {"sram_threshold_exceeded": 1}, {"sram_threshold_exceeded": 0}),
        ("row_remap_pending", {"remapped_pending": 1}, {"remapped_pending": 0}),
        ("row_remap_failure", {"remapped_failure": 1}, {"remapped_failure": 0}),
        ("nvlink_down", {"nvlink_state": {3: 0}}, {"nvlink_state": {3: 1}}),
        ("fabric", {"fabric_state": 2}, {"fabric_state": 3}),
        ("fabric", {"fabric_health_mask": 0x1AA & ~0x30 | 0x10}, {"fabric_health_mask": 0x1AA}),
        ("fabric", {"fabric_health_summary": 2}, {"fabric_health_summary": 1}),
        ("temperature_margin", {"margin_temperature": 0}, {"margin_temperature": 1}),
        ("temperature_margin", {"margin_temperature": -3}, {"margin_temperature": 5}),
        ("thermal_slowdown", {"clock_reasons": 0x40 | 0x8}, {"clock_reasons": 0x4}),
        ("thermal_slowdown", {"clock_reasons": 0x8}, {"clock_reasons": 0}),
        ("power_brake", {"clock_reasons": 0x80 | 0x8}, {"clock_reasons": 0x1}),
    ],
)
def test_a_condition_is_told_when_it_begins_and_when_it_ends(
    nvml: MockNvml, eye: Eye, signal: str, sick: Mapping[str, Any], sound: Mapping[str, Any]
) -> None:
    nvml.set(gpu=0, **sick)
    assert eye.new() == [(signal, None, False)]
    assert eye.new() == []
    nvml.set(gpu=0, **sound)
    assert eye.new() == [(signal, None, True)]
    assert eye.new() == []


def test_every_condition_is_one_that_the_severity_table_knows() -> None:
    told = {"ecc_uncorrected", "nvlink_errors", "pcie_replays", "gpu_lost", "reset_required", "gpu_unavailable"}
    told |= {"sram_threshold", "row_remap_pending", "row_remap_failure", "nvlink_down", "fabric", "nvml_error"}
    told |= {"temperature_margin", "thermal_slowdown", "power_brake", "stalled"}
    assert told <= {key for key in _SIGNALS if "." not in key}


def test_the_recovery_action_is_told_when_it_changes(nvml: MockNvml, eye: Eye) -> None:
    nvml.set(gpu=0, recovery_action=1)
    findings = eye.look()
    assert [(f.signal, f.code, f.clears) for f in findings] == [("recovery_action", 1, False)]
    assert findings[0].text == "the driver asks for a reset of the device"
    assert eye.look() == [], "and a device that needs recovery is not healthy"
    nvml.set(gpu=0, recovery_action=4)
    assert eye.new() == [("recovery_action", 1, True), ("recovery_action", 4, False)]
    nvml.set(gpu=0, recovery_action=0)
    findings = eye.look()
    assert [(f.signal, f.code, f.clears) for f in findings[:-1]] == [("recovery_action", 4, True)]
    assert is_healthy(findings) == 1


@pytest.mark.parametrize("action", range(1, 9))
def test_every_recovery_action_keeps_the_check_from_passing(nvml: MockNvml, eye: Eye, action: int) -> None:
    nvml.set(gpu=0, recovery_action=action)
    findings = eye.look()
    assert is_healthy(findings) is None
    assert SeverityTable().rule(findings[0]).action > 1


@pytest.mark.parametrize("name", ["sram_threshold_exceeded", "remapped_failure"])
def test_what_takes_a_reset_keeps_the_check_from_passing(nvml: MockNvml, eye: Eye, name: str) -> None:
    nvml.set(gpu=0, **{name: 1})
    assert is_healthy(eye.look()) is None


@pytest.mark.parametrize("location", [pynvml.NVML_MEMORY_LOCATION_DRAM, pynvml.NVML_MEMORY_LOCATION_SRAM])
def test_uncorrected_errors_are_told_when_they_grow(nvml: MockNvml, location: int) -> None:
    nvml.set_ecc(0, 3, location=location, **UNCORRECTED)
    eye = Eye(nvml)
    assert eye.new() == [], "they are from before"
    nvml.set_ecc(0, 5, location=location, **UNCORRECTED)
    findings = eye.look()
    assert [f.signal for f in findings] == ["ecc_uncorrected", "healthy"]
    assert findings[0].text.startswith("2 more uncorrected memory errors")
    assert eye.new() == []
    nvml.set_ecc(0, 0, location=location, **UNCORRECTED)
    assert eye.new() == [], "the device was reset"
    nvml.set_ecc(0, 1, location=location, **UNCORRECTED)
    assert eye.new() == [("ecc_uncorrected", None, False)]


def test_corrected_errors_are_no_finding(nvml: MockNvml, eye: Eye) -> None:
    nvml.set_ecc(0, 99, corrected=True, aggregate=False, location=pynvml.NVML_MEMORY_LOCATION_DRAM)
    assert eye.new() == []


@pytest.mark.parametrize("generation", [4, 5])
def test_errors_on_links_are_told_once_a_minute(nvml: MockNvml, eye: Eye, generation: int) -> None:
    def errors(count: int) -> None:
        if generation == 4:
            nvml.set_link_errors(0, 7, pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, count)
        else:
            nvml.set_link_counter(0, 7, "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS", count)

    errors(4)
    (finding, _) = eye.look()
    assert (finding.signal, finding.text) == ("nvlink_errors", "4 more errors on link 7")
    for count in range(5, 34):
        errors(count)
        assert eye.new(2.0) == []
    (finding, _) = eye.look(2.0)
    assert finding.text == "29 more errors on link 7", "those of the whole minute"


def test_a_link_that_never_was_up_is_not_down(nvml: MockNvml) -> None:
    nvml.set(gpu=0, nvlink_state={5: 0})
    eye = Eye(nvml)
    assert eye.new() == []
    nvml.set(gpu=0, nvlink_state={2: 0})
    findings = eye.look()
    assert findings[0].text == "link 2 of 18 is down"


def test_a_link_that_sleeps_is_not_down(nvml: MockNvml, eye: Eye) -> None:
    nvml.set(gpu=0, nvlink_state={5: pynvml.NVML_NVLINK_STATE_SLEEP})
    assert eye.new() == []


def test_replays_are_told_when_there_are_many_within_a_minute(nvml: MockNvml, eye: Eye) -> None:
    for count in range(1, 40):  # one every ten seconds: six a minute
        nvml.set(gpu=0, pcie_replay=count)
        assert eye.new(10.0) == []
    nvml.set(gpu=0, pcie_replay=80)
    assert eye.new() == [("pcie_replays", None, False)]
    nvml.set(gpu=0, pcie_replay=160)
    assert eye.new() == []


def test_a_call_that_fails_three_times_in_a_row_makes_the_driver_suspect(nvml: MockNvml, eye: Eye) -> None:
    rule = nvml.fail("nvmlDeviceGetClockInfo", pynvml.NVML_ERROR_TIMEOUT, gpu=0)
    assert eye.look() == [], "not complete, so not healthy"
    assert eye.look() == []
    (finding,) = eye.look()
    assert (finding.signal, finding.code) == ("nvml_error", pynvml.NVML_ERROR_TIMEOUT)
    assert finding.text == "nvmlDeviceGetClockInfo: Timeout (NVML error 10), 3 times in a row"
    assert eye.look() == []
    rule.remove()
    assert eye.new() == [("nvml_error", pynvml.NVML_ERROR_TIMEOUT, True)]


@pytest.mark.parametrize("code", [1, 5, 7, 8, 10, 11, 14, 19, 20, 23, 27, 29, 999, 4711])
def test_errors_that_may_go_by_are_tried_again(nvml: MockNvml, eye: Eye, code: int) -> None:
    nvml.fail("nvmlDeviceGetTemperatureV", code, gpu=0, times=2)
    assert eye.look() == []
    assert eye.look() == []
    assert [f.signal for f in eye.look()] == ["healthy"]


def test_a_lost_device_is_told_once_and_again_when_it_is_back(nvml: MockNvml, eye: Eye) -> None:
    nvml.set(gpu=0, lost=1)
    (finding,) = eye.look()
    assert (finding.signal, finding.clears) == ("gpu_lost", False)
    assert "GPU is lost" in finding.text
    assert eye.look() == []
    nvml.set(gpu=0, lost=0)
    eye.library.renew(eye.library.epoch)
    findings = eye.look()
    assert [(f.signal, f.clears) for f in findings] == [("gpu_lost", True), ("healthy", False)]


def test_a_device_that_is_not_found_any_more_is_lost(nvml: MockNvml, eye: Eye) -> None:
    nvml.set(gpu=0, absent=1)
    eye.library.renew(eye.library.epoch)
    assert eye.new() == [("gpu_lost", None, False)]


def test_a_device_that_needs_a_reset_says_so_and_how(nvml: MockNvml, eye: Eye) -> None:
    nvml.set(gpu=0, reset_required=1, recovery_action=1)
    assert eye.new() == [("reset_required", None, False), ("recovery_action", 1, False)]
    nvml.set(gpu=0, lost=1)
    assert eye.new() == [("gpu_lost", None, False), ("reset_required", None, True)]
    nvml.set(gpu=0, lost=0, reset_required=0, recovery_action=0)
    eye.library.renew(eye.library.epoch)
    assert eye.new() == [("gpu_lost", None, True), ("recovery_action", 1, True)]


def test_a_lost_device_is_as_it_was_and_as_old(nvml: MockNvml, eye: Eye) -> None:
    before = eye.changes.memory()["reading"]
    nvml.set(gpu=0, lost=1)
    eye.look()
    assert eye.changes.memory()["reading"] == before


def test_another_process_goes_on_where_the_former_one_was(nvml: MockNvml, eye: Eye) -> None:
    nvml.set(gpu=0, recovery_action=2, nvlink_state={3: 0}, pcie_replay=2)
    eye.look()
    eye.changes = Changes(eye.uuid, json.loads(json.dumps(eye.changes.memory())))
    nvml.set_ecc(0, 1, location=pynvml.NVML_MEMORY_LOCATION_DRAM, **UNCORRECTED)
    assert eye.new() == [("ecc_uncorrected", None, False)], "and nothing is told twice"
    nvml.set(gpu=0, recovery_action=0, nvlink_state={3: 1})
    assert eye.new() == [("recovery_action", 2, True), ("nvlink_down", None, True)]


@pytest.mark.parametrize(
    ("mask", "ill"),
    [
        (0x1AA, ""),
        (0, ""),
        (0x1A9, "degraded bandwidth"),
        (0x1A6, "its route is being recovered"),
        (0x19A, "its route is unhealthy"),
        (0x16A, "a recovery from an access time-out"),
        (0x5AA, "configured with too few NVLinks"),
        (0xFAA, "configured with mistake 15"),
        (0x81AA, "the fabric manager is disconnected"),
        (0x41AA, ""),
        (0x21AA, ""),  # no partition assigned is no mistake by itself
    ],
)
def test_what_the_bits_of_the_fabric_mean(mask: int, ill: str) -> None:
    values = {"fabric_state": 3.0, "fabric_status": 0.0, "fabric_health_mask": float(mask)}
    assert ", ".join(fabric_ills(values)) == ill


def test_a_registration_with_the_fabric_that_has_failed_is_told() -> None:
    values = {"fabric_state": 3.0, "fabric_status": 999.0, "fabric_health_mask": 0.0}
    assert fabric_ills(values) == ["its registration has failed with NVML error 999"]
