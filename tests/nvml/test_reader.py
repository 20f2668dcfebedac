"""What is read of a device, whatever it supports, refuses or answers with errors."""

from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest

from lightning_ntp.nvml.errors import CallError, Kind
from lightning_ntp.nvml.library import Renewed
from lightning_ntp.nvml.readings import SIGNALS, Reading
from tests.nvml.eye import Eye, is_healthy
from tests.nvml.mock import MockNvml

FIELDS = "nvmlDeviceGetFieldValues"
DEPRECATED = (
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetViolationStatus",
    "nvmlDeviceGetGpuFabricInfo",
)


@pytest.fixture
def eye(nvml: MockNvml) -> Eye:
    return Eye(nvml)


def test_a_sound_device_says_everything_and_is_healthy(nvml: MockNvml, eye: Eye) -> None:
    nvml.set(gpu=0, temperature=61, power_usage=432100, clock_sm=1755, total_energy=5000, pcie_replay=7)
    nvml.set(gpu=0, memory_used=3 << 30, slowdown_tlimit=-2, margin_temperature=24)
    nvml.set(gpu=0, power_limit=650_000, external_power_limit=600_000)
    nvml.set_ecc(0, 5, corrected=True, aggregate=False, location=pynvml.NVML_MEMORY_LOCATION_DRAM)
    findings = eye.look()
    assert [f.signal for f in findings] == ["healthy"] and is_healthy(findings) == 1
    assert eye.unsupported == frozenset()
    expected = {
        "temperature_c": 61,
        "temperature_margin_c": 24,
        "temperature_slowdown_tlimit_c": -2,
        "power_w": 432.1,
        "power_limit_w": 600,
        "power_limit_set_w": 650,
        "ecc_corrected_total": 5,
        "sm_clock_mhz": 1755,
        "energy_j": 5,
        "pcie_replays": 7,
        "memory_used_bytes": 3 << 30,
        "recovery_action": 0,
        "nvlink_active": 18,
        "fabric_state": 3,
    }
    assert {name: eye.values[name] for name in expected} == pytest.approx(expected)


def test_all_fields_are_read_in_one_call(nvml: MockNvml, eye: Eye) -> None:
    eye.look()
    before = nvml.calls(FIELDS, 0)
    eye.look()
    assert nvml.calls(FIELDS, 0) == before + 1


def test_nothing_deprecated_is_asked(nvml: MockNvml, eye: Eye) -> None:
    eye.look()
    assert {name: nvml.calls(name) for name in DEPRECATED if name in nvml._calls} == dict.fromkeys(
        [name for name in DEPRECATED if name in nvml._calls], 0
    )


def test_a_device_that_supports_nothing_is_unknown_and_never_healthy(nvml: MockNvml, eye: Eye) -> None:
    names = [name for name in nvml._calls if name.startswith("nvmlDeviceGet") and "Handle" not in name]
    nvml.fail(names, pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert eye.look() == []
    assert eye.unsupported == frozenset(SIGNALS)
    before = {name: nvml.calls(name) for name in names}
    assert eye.look() == []
    assert {name: nvml.calls(name) for name in names} == before, "what is not supported is not asked again"


def test_what_is_not_supported_is_asked_again_after_a_new_start(nvml: MockNvml, eye: Eye) -> None:
    rule = nvml.fail("nvmlDeviceGetMarginTemperature", pynvml.NVML_ERROR_NOT_SUPPORTED)
    threshold = nvml.fail("nvmlDeviceGetTemperatureThreshold", pynvml.NVML_ERROR_NOT_SUPPORTED)
    eye.look()
    assert eye.unsupported == {"temperature_margin"}
    rule.remove()
    threshold.remove()
    eye.look()
    assert eye.unsupported == {"temperature_margin"}
    assert eye.library.renew(eye.library.epoch)
    assert is_healthy(eye.look()) == 1
    assert eye.unsupported == frozenset()


def test_every_field_has_an_answer_of_its_own(nvml: MockNvml, eye: Eye) -> None:
    nvml.set_field(0, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", error=pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml.set_field(0, "NVML_FI_DEV_MEMORY_TEMP", error=pynvml.NVML_ERROR_INVALID_ARGUMENT)
    findings = eye.look()
    assert is_healthy(findings) == 0, "nobody says that it needs no recovery"
    assert eye.unsupported == {"recovery_action"}
    assert "memory_temperature_c" not in eye.values
    assert "power_w" in eye.values


def test_a_field_that_fails_is_an_error_of_that_field(nvml: MockNvml, eye: Eye) -> None:
    eye.look()
    nvml.set_field(0, "NVML_FI_DEV_MEMORY_TEMP", error=pynvml.NVML_ERROR_UNKNOWN)
    assert eye.new() == []
    assert eye.last is not None and list(eye.last.errors) == [f"{FIELDS}(memory_temperature_c)"]
    assert eye.values["power_w"] == 120


def test_without_a_function_its_values_come_from_an_older_one(nvml: MockNvml, eye: Eye) -> None:
    nvml.set(gpu=0, temperature=70, temperature_threshold={pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 95})
    nvml.missing("nvmlDeviceGetMarginTemperature")
    nvml.unsupported(0, "NVML_FI_DEV_POWER_INSTANT", "NVML_FI_DEV_POWER_CURRENT_LIMIT")
    nvml.unsupported(0, "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "NVML_FI_DEV_PCIE_REPLAY_COUNTER")
    nvml.unsupported(0, "NVML_FI_DEV_NVLINK_GET_STATE")
    nvml.unsupported(0, "NVML_FI_DEV_ECC_SBE_VOL_TOTAL", "NVML_FI_DEV_POWER_REQUESTED_LIMIT")
    nvml.set(gpu=0, external_power_limit=600_000)
    for location, count in ((pynvml.NVML_MEMORY_LOCATION_DRAM, 4), (pynvml.NVML_MEMORY_LOCATION_SRAM, 3)):
        nvml.set_ecc(0, count, corrected=True, aggregate=False, location=location)
    assert is_healthy(eye.look()) == 1
    assert eye.unsupported == frozenset()
    assert eye.values["temperature_margin_c"] == 25
    assert (eye.values["power_w"], eye.values["power_limit_w"], eye.values["power_limit_set_w"]) == (120, 600, 700)
    assert eye.values["ecc_corrected_total"] == 7
    assert eye.values["nvlink_active"] == 18


def test_an_older_driver_has_a_smaller_structure_for_the_fabric(nvml: MockNvml, eye: Eye) -> None:
    nvml.fail("nvmlDeviceGetGpuFabricInfoV", pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, times=1)
    eye.look()
    assert eye.values["fabric_state"] == 3
    assert "fabric_summary" not in eye.values


def test_a_device_without_fabric_and_links_says_so(nvml: MockNvml, eye: Eye) -> None:
    nvml.set(gpu=0, fabric_state=0, nvlink_count=0)
    assert is_healthy(eye.look()) == 1
    assert eye.unsupported == {"fabric", "nvlink_down", "nvlink_errors"}


def test_links_below_hopper_say_their_errors_as_sums(nvml: MockNvml, eye: Eye) -> None:
    for name in ("REPLAY", "RECOVERY", "CRC"):
        nvml.unsupported(0, f"NVML_FI_DEV_NVLINK_ERROR_DL_{name}")
    for field in range(206, 222):
        nvml.unsupported(0, field)
    nvml.set_link_errors(0, 3, pynvml.NVML_NVLINK_ERROR_DL_REPLAY, 5)
    nvml.set_link_errors(0, 4, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA, 2)
    eye.look()
    assert eye.values["nvlink_errors"] == 7


def test_permission_is_missed_once(nvml: MockNvml, eye: Eye) -> None:
    nvml.fail("nvmlDeviceGetRemappedRows", pynvml.NVML_ERROR_NO_PERMISSION)
    findings = eye.look()
    assert is_healthy(findings) == 1
    assert eye.last is not None and len(eye.last.notes) == 1
    assert "nvmlDeviceGetRemappedRows: Insufficient Permissions" in eye.last.notes[0]
    eye.look()
    assert eye.last.notes == []
    assert eye.unsupported == {"row_remap_pending", "row_remap_failure"}
    eye.library.renew(eye.library.epoch)
    eye.look()
    assert eye.last.notes == []


def test_a_device_that_may_not_be_asked_is_unknown(nvml: MockNvml, eye: Eye) -> None:
    nvml.fail("nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_OPERATING_SYSTEM)
    assert eye.look() == []
    assert eye.last is not None and len(eye.last.notes) == 1
    assert eye.look() == []


def test_a_handle_of_a_former_start_is_not_used(nvml: MockNvml, eye: Eye) -> None:
    handle = eye.library.ask("nvmlDeviceGetHandleByUUID", eye.uuid, 1, eye.uuid)
    assert eye.library.renew(1)
    with pytest.raises(Renewed):
        eye.library.ask("nvmlDeviceGetName", eye.uuid, 1, handle)
    assert eye.library.renew(1), "somebody else has done it meanwhile"
    assert eye.library.epoch == 2


def test_a_new_start_that_fails_is_tried_again(nvml: MockNvml, eye: Eye) -> None:
    eye.look()
    nvml.set(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert eye.library.renew(1)
    assert eye.new() == []
    assert eye.last is not None and not eye.last.complete
    with pytest.raises(CallError) as caught:
        eye.library.ask("nvmlDeviceGetCount", "", 2)
    assert caught.value.kind is Kind.DRIVER
    nvml.set(init_error=0)
    assert eye.library.renew(2)
    assert is_healthy(eye.look()) == 1


class TestMig:
    @pytest.fixture
    def mig(self, nvml: MockNvml) -> Eye:
        nvml.enable_mig(0, 2)
        return Eye(nvml, uuid=nvml.get("mig_uuid", 0)[1])

    @pytest.mark.parametrize("refusal", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT])
    def test_what_an_instance_refuses_is_read_of_its_device(self, nvml: MockNvml, mig: Eye, refusal: int) -> None:
        nvml.set(mig_refusal=refusal)
        nvml.set(gpu=0, temperature=77, recovery_action=0)
        assert is_healthy(mig.look()) == 1
        assert mig.values["temperature_c"] == 77
        assert mig.values["memory_total_bytes"] < 80 << 30, "of the instance"
        assert mig.unsupported == frozenset()

    def test_findings_of_its_device_are_its_own(self, nvml: MockNvml, mig: Eye) -> None:
        mig.look()
        nvml.set(gpu=0, recovery_action=2)
        findings = mig.look()
        assert [(f.signal, f.code, f.gpu) for f in findings] == [("recovery_action", 2, mig.uuid)]

    def test_an_instance_that_was_removed_is_lost(self, nvml: MockNvml, mig: Eye) -> None:
        mig.look()
        nvml.enable_mig(0, 1)
        mig.library.renew(mig.library.epoch)
        assert mig.new() == [("gpu_lost", None, False)]


def test_a_reading_survives_the_pipe(eye: Eye) -> None:
    eye.look()
    assert eye.last is not None
    reading = replace(eye.last.reading, kept=frozenset({"power_w"}))
    assert Reading.from_message(reading.to_message()) == reading
