"""The source, with a real process that asks a mock of the driver: what it tells, and devices that are lost."""

from __future__ import annotations

from collections.abc import Callable

import pynvml
import pytest

from lightning_ntp.nvml import NvmlSource
from tests.nvml.listening import listening, wait_until
from tests.nvml.mock import MockNvml

# ---- what it is for -------------------------------------------------------------------------------------------


def test_sound_devices_are_healthy_and_have_readings(nvml: MockNvml, source: NvmlSource, uuids: list[str]) -> None:
    nvml.set(gpu=1, temperature=66)
    with listening(source, {0: uuids[0], 1: uuids[1]}) as ears:
        assert ears.wait_for("healthy", uuids[0]).code == 1
        ears.wait_for("healthy", uuids[1])
        wait_until(lambda: set(source.readings) == {uuids[0], uuids[1]})
        reading = source.readings[uuids[1]]
        assert reading.values["temperature_c"] == 66
        assert 0 <= reading.age < 60
        assert ears.told() == []


def test_the_order_of_visible_devices_does_not_matter(
    nvml: MockNvml, source: NvmlSource, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with listening(source, {0: uuids[2], 1: uuids[0]}) as ears:
        ears.wait_for_events(nvml, uuids[0], uuids[2])
        nvml.set(gpu=2, recovery_action=2)
        nvml.set(gpu=1, recovery_action=1)
        assert ears.wait_for("recovery_action").gpu == uuids[2]
        assert ears.told() == [("recovery_action", "2", 2, False)], "of a device that is not the job's nothing is said"


def test_an_xid_is_told_at_once(nvml: MockNvml, uuids: list[str]) -> None:
    slow = NvmlSource(interval=600.0)
    with listening(slow, {0: uuids[0], 1: uuids[1]}) as ears:
        ears.wait_for_events(nvml, *uuids[:2])
        nvml.push_xid(1, 79)
        assert ears.wait_for("xid").gpu == uuids[1]
        nvml.push_xid(0, 31)
        ears.wait_for("xid", code=31)
        assert ears.told() == [("xid", "1", 79, False), ("xid", "0", 31, False)]


@pytest.mark.parametrize("event", ["xid", "recovery_action"])
def test_what_changes_the_recovery_action_has_it_read_at_once(nvml: MockNvml, uuids: list[str], event: str) -> None:
    slow = NvmlSource(interval=600.0)
    with listening(slow, {0: uuids[0]}) as ears:
        ears.wait_for_events(nvml, uuids[0])
        nvml.set(gpu=0, recovery_action=1)
        if event == "xid":
            nvml.push_xid(0, 154)
        else:
            nvml.push_event(0, pynvml.nvmlEventTypeGpuRecoveryAction, 1)
        ears.wait_for("recovery_action", uuids[0], code=1)


def test_memory_errors_come_as_events_too(nvml: MockNvml, source: NvmlSource, uuids: list[str]) -> None:
    with listening(source, {0: uuids[0]}) as ears:
        ears.wait_for_events(nvml, uuids[0])
        nvml.push_event(0, pynvml.nvmlEventTypeDoubleBitEccError)
        assert ears.wait_for("ecc_uncorrected", uuids[0]).text == "an uncorrected memory error, says the driver"


def test_a_device_that_is_not_available_is_fit_after_a_new_start(
    nvml: MockNvml, source: NvmlSource, uuids: list[str]
) -> None:
    with listening(source, {0: uuids[0]}) as ears:
        ears.wait_for_events(nvml, uuids[0])
        nvml.push_event(0, pynvml.nvmlEventTypeGpuUnavailableError)
        ears.wait_for("gpu_unavailable", uuids[0])
        ears.wait_for("gpu_unavailable", uuids[0], clears=True)
        assert nvml.calls("nvmlShutdown") == 1


def test_only_events_that_the_device_has_are_registered(nvml: MockNvml, source: NvmlSource, uuids: list[str]) -> None:
    nvml.set(gpu=0, supported_events=pynvml.nvmlEventTypeXidCriticalError)
    nvml.set(gpu=1, supported_events=0)
    with listening(source, dict(enumerate(uuids))) as ears:
        ears.wait_for_events(nvml, *uuids)
        nvml.push_xid(0, 13)
        ears.wait_for("xid", uuids[0], code=13)
        assert ears.signals() == {"xid"}


def test_without_events_looking_goes_on(
    nvml: MockNvml, source: NvmlSource, uuids: list[str], warnings: Callable[[], list[str]]
) -> None:
    nvml.fail("nvmlEventSetCreate", pynvml.NVML_ERROR_NOT_SUPPORTED)
    with listening(source, {0: uuids[0]}) as ears:
        ears.wait_for("healthy", uuids[0])
        nvml.set(gpu=0, margin_temperature=-1)
        ears.wait_for("temperature_margin", uuids[0])
        wait_until(lambda: len(warnings()) == 1)
        assert "events are not watched" in warnings()[0]


def test_instances_of_one_device_have_their_own_events(nvml: MockNvml, source: NvmlSource) -> None:
    nvml.enable_mig(1, 3)
    first, second, _, *_ = nvml.get("mig_uuid", 1)
    with listening(source, {0: first, 1: second}) as ears:
        ears.wait_for_events(nvml, first, second)
        nvml.push_event(1, pynvml.nvmlEventTypeXidCriticalError, 94, gpu_instance=2)
        assert ears.wait_for("xid", code=94).gpu == second
        nvml.push_xid(1, 79)
        ears.wait_for("xid", first, code=79)
        ears.wait_for("xid", second, code=79)
        assert [told[0] for told in ears.told()].count("xid") == 3


def test_devices_may_come_late_and_change(nvml: MockNvml, source: NvmlSource, uuids: list[str]) -> None:
    with listening(source, {}) as ears:
        ears.devices = {0: uuids[0]}
        ears.wait_for_events(nvml, uuids[0])
        pid = ears.pid()
        ears.devices = {0: uuids[0], 1: uuids[1]}
        ears.wait_for("healthy", uuids[1])
        wait_until(lambda: nvml.calls("nvmlDeviceRegisterEvents", 1) == 1)
        nvml.push_xid(1, 13)
        ears.wait_for("xid", uuids[1])
        ears.devices = {1: uuids[1]}
        wait_until(lambda: uuids[0] not in [f.gpu for f in ears.findings[-4:]])
        nvml.push_xid(0, 31)
        nvml.push_xid(1, 43)
        ears.wait_for("xid", uuids[1], code=43)
        assert ("xid", "0", 31, False) not in ears.told()
        assert ears.pid() == pid, "the same process"


def test_no_device_no_process(nvml: MockNvml, source: NvmlSource) -> None:
    with listening(source, {0: ""}) as ears:
        assert ears.children() == set()
    assert nvml.calls("nvmlInit") == 0


def test_a_device_that_the_driver_does_not_know_is_told_once_and_not_lost(
    nvml: MockNvml, source: NvmlSource, uuids: list[str], warnings: Callable[[], list[str]]
) -> None:
    with listening(source, {0: "GPU-elsewhere", 1: uuids[1]}) as ears:
        ears.wait_for("healthy", uuids[1])
        wait_until(lambda: warnings() != [])
        ears.wait_for_look(uuids[1])
        assert ears.told() == []
    assert warnings() == ["health of GPUs: the driver does not know GPU-elsewhere: it is looked for now and then"]


# ---- losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_wait", [0, 1])
def test_a_lost_device_comes_back(nvml: MockNvml, source: NvmlSource, uuids: list[str], ends_wait: int) -> None:
    nvml.set(lost_ends_wait=ends_wait)
    with listening(source, {0: uuids[0], 1: uuids[1]}) as ears:
        ears.wait_for_events(nvml, *uuids[:2])
        nvml.set(gpu=1, lost=1)
        ears.wait_for("gpu_lost", uuids[1])
        wait_until(lambda: nvml.calls("nvmlShutdown") > 2)
        ears.wait_for_look(uuids[0])
        nvml.set(gpu=1, lost=0)
        ears.wait_for("gpu_lost", uuids[1], clears=True)
        ears.wait_for_look(uuids[1])
        assert ears.told() == [("gpu_lost", "1", None, False), ("gpu_lost", "1", None, True)]
        wait_until(lambda: nvml.calls("nvmlEventSetWait") > nvml.calls("nvmlShutdown"))
        number = nvml.calls("nvmlDeviceRegisterEvents", 1)
        assert number > 1
        nvml.push_xid(1, 13)
        ears.wait_for("xid", uuids[1])


def test_every_call_of_all_devices_fails_and_then_none(nvml: MockNvml, source: NvmlSource, uuids: list[str]) -> None:
    with listening(source, dict(enumerate(uuids))) as ears:
        ears.wait_for_events(nvml, *uuids)
        rule = nvml.fail_all(pynvml.NVML_ERROR_GPU_IS_LOST)
        for uuid in uuids:
            ears.wait_for("gpu_lost", uuid)
        rule.remove()
        for uuid in uuids:
            ears.wait_for("gpu_lost", uuid, clears=True)
            ears.wait_for("healthy", uuid, since=len(ears.findings))
        assert ears.signals() == {"gpu_lost"}


def test_a_device_that_needs_a_reset_is_fit_after_it(nvml: MockNvml, source: NvmlSource, uuids: list[str]) -> None:
    with listening(source, {0: uuids[0]}) as ears:
        ears.wait_for_events(nvml, uuids[0])
        nvml.set(gpu=0, reset_required=1)
        ears.wait_for("reset_required", uuids[0])
        nvml.set(gpu=0, reset_required=0)
        ears.wait_for("reset_required", uuids[0], clears=True)
        ears.wait_for_look(uuids[0])


def test_a_driver_that_goes_and_comes_is_suspect_meanwhile(
    nvml: MockNvml, source: NvmlSource, uuids: list[str]
) -> None:
    with listening(source, {0: uuids[0], 1: uuids[1]}) as ears:
        ears.wait_for_events(nvml, *uuids[:2])
        nvml.set(init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        nvml.set(gpu=1, lost=1)  # so that NVML is started anew
        ears.wait_for("nvml_error", uuids[0], code=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        nvml.set(init_error=0)
        nvml.set(gpu=1, lost=0)
        ears.wait_for("nvml_error", uuids[0], clears=True)
        ears.wait_for("gpu_lost", uuids[1], clears=True)
