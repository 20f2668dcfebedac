"""What a real driver does to its users: errors, hangs, lost GPUs, events, and processes that die in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml
import pytest

from tests.nvml.mock import STATE_VARIABLE, MockNvml
from tests.nvml.test_mock import code_of, device, field_of

XID = pynvml.nvmlEventTypeXidCriticalError


@pytest.fixture
def ready(nvml: MockNvml) -> MockNvml:
    pynvml.nvmlInit()
    return nvml


@contextmanager
def child(nvml: MockNvml, script: str, root: bool | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process with pynvml initialised that runs a script, says "ready" before and waits for a line after that."""
    script = f"import pynvml, sys\npynvml.nvmlInit()\nprint('ready', flush=True)\n{script}\n"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=nvml.environment(root),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def in_thread(call: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Start a call in a thread; the function that is returned waits for what it returns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call(*arguments)), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(10)
        assert results, "the call has not returned"
        return results[0]

    return result


def test_no_state_is_no_driver(nvml: MockNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATE_VARIABLE)
    assert code_of(pynvml.nvmlInit) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    monkeypatch.setenv(STATE_VARIABLE, "/nowhere")
    assert code_of(pynvml.nvmlInit) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED


def test_no_library(nvml: MockNvml) -> None:
    environment = nvml.environment()
    del environment["LD_LIBRARY_PATH"]
    script = "import pynvml\ntry: pynvml.nvmlInit()\nexcept pynvml.NVMLError as e: print(e.value)"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    if done.stdout == "":
        pytest.skip("this machine has NVIDIA's own library")
    assert int(done.stdout) in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH])
def test_init_fails_with_a_code_and_leaves_nothing_initialised(nvml: MockNvml, code: int) -> None:
    nvml.set(init_error=code)
    assert code_of(pynvml.nvmlInit) == code
    assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    nvml.set(init_error=0)
    with nvml.fail("nvmlInit", code, times=1):
        assert [code_of(pynvml.nvmlInit) for _ in range(2)] == [code, 0]


def test_a_call_fails_on_one_gpu_after_so_many_calls_for_so_many_calls(ready: MockNvml) -> None:
    handles = [device(index) for index in range(3)]
    rule = ready.fail("nvmlDeviceGetFieldValues", pynvml.NVML_ERROR_UNKNOWN, gpu=2, skip=1, times=2)
    codes = [code_of(pynvml.nvmlDeviceGetFieldValues, handles[2], [230]) for _ in range(5)]
    assert codes == [0, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_UNKNOWN, 0, 0]
    assert rule.hits == 2
    assert code_of(pynvml.nvmlDeviceGetFieldValues, handles[1], [230]) == 0
    assert ready.calls("nvmlDeviceGetFieldValues", gpu=2) == 5
    assert ready.calls("nvmlDeviceGetFieldValues") == 6


def test_all_calls_fail_on_one_gpu_or_on_all(ready: MockNvml) -> None:
    handles = [device(index) for index in range(3)]
    with ready.fail_all(pynvml.NVML_ERROR_UNKNOWN, gpu=2):
        assert code_of(pynvml.nvmlDeviceGetUUID, handles[2]) == pynvml.NVML_ERROR_UNKNOWN
        assert code_of(pynvml.nvmlDeviceGetHandleByIndex, 2) == pynvml.NVML_ERROR_UNKNOWN
        assert code_of(pynvml.nvmlDeviceGetUUID, handles[1]) == 0
    with ready.fail_all(pynvml.NVML_ERROR_IRQ_ISSUE):
        assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_IRQ_ISSUE
        assert code_of(pynvml.nvmlInit) == 0
    assert code_of(pynvml.nvmlDeviceGetCount) == 0


def test_functions_that_an_old_driver_lacks(ready: MockNvml) -> None:
    assert code_of(pynvml.nvmlDeviceGetFanSpeed, device()) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND  # not in the mock
    ready.missing("nvmlDeviceGetTemperatureV", "nvmlDeviceGetMarginTemperature")
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlDeviceGetTemperatureV(device(), 0)
    assert code_of(pynvml.nvmlDeviceGetMarginTemperature, device()) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert pynvml.nvmlDeviceGetTemperature(device(), 0) == 40


def test_unsupported_calls_and_fields(ready: MockNvml) -> None:
    ready.unsupported(2, "nvmlDeviceGetTotalEnergyConsumption", "NVML_FI_DEV_ENERGY")
    assert code_of(pynvml.nvmlDeviceGetTotalEnergyConsumption, device(2)) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert field_of(device(2), "NVML_FI_DEV_ENERGY").nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert code_of(pynvml.nvmlDeviceGetTotalEnergyConsumption, device(3)) == 0


def test_a_lost_gpu_says_so_in_every_call(ready: MockNvml) -> None:
    handle = device(2)
    ready.set(gpu=2, lost=1)
    for call in (
        pynvml.nvmlDeviceGetUUID,
        pynvml.nvmlDeviceGetPowerUsage,
        pynvml.nvmlDeviceGetSupportedEventTypes,
        pynvml.nvmlDeviceGetRemappedRows,
        pynvml.nvmlDeviceResetGpuLockedClocks,
    ):
        assert code_of(call, handle) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert code_of(pynvml.nvmlDeviceGetFieldValues, handle, [230]) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert code_of(device, 2) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert code_of(pynvml.nvmlDeviceGetP2PStatus, device(1), handle, 0) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert pynvml.nvmlDeviceGetCount() == 8


def test_a_gpu_that_must_be_reset_tells_who_it_is_and_what_it_needs(ready: MockNvml) -> None:
    ready.set(gpu=2, reset_required=1, recovery_action=pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
    handle = device(2)
    assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert pynvml.nvmlDeviceGetUUID(handle) == ready.get("uuid", gpu=2)
    action, power = pynvml.nvmlDeviceGetFieldValues(handle, [230, 186])
    assert (action.nvmlReturn, action.value.uiVal) == (0, 1)
    assert power.nvmlReturn == pynvml.NVML_ERROR_RESET_REQUIRED


def test_setters_need_root(ready: MockNvml) -> None:
    handle = device()
    ready.permission(root=False)
    request = pynvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
    update = pynvml.c_nvmlWorkloadPowerProfileUpdateProfiles_v1_t()
    for call, *arguments in (
        (pynvml.nvmlDeviceSetPowerManagementLimit, 400000),
        (pynvml.nvmlDeviceSetGpuLockedClocks, 210, 900),
        (pynvml.nvmlDeviceResetGpuLockedClocks,),
        (pynvml.nvmlDeviceSetMemoryLockedClocks, 1593, 1593),
        (pynvml.nvmlDeviceResetMemoryLockedClocks,),
        (pynvml.nvmlDeviceSetPersistenceMode, 0),
        (pynvml.nvmlDeviceWorkloadPowerProfileSetRequestedProfiles, pynvml.byref(request)),
        (pynvml.nvmlDeviceWorkloadPowerProfileClearRequestedProfiles, pynvml.byref(request)),
        (pynvml.nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1, pynvml.byref(update)),
    ):
        assert code_of(call, handle, *arguments) == pynvml.NVML_ERROR_NO_PERMISSION
    # pynvml 13.615.71 throws away what this call returns.
    pynvml.nvmlDeviceSetPowerManagementLimit_v2(handle, pynvml.NVML_POWER_SCOPE_GPU, 400000)
    assert ready.get("power_limit", gpu=2) == 700000
    assert ready.history() == []
    setter = "pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(2), 400000); input()"
    with child(ready, f"{setter}", root=True) as helper:
        deadline = time.monotonic() + 10
        while not ready.history() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert [(s.gpu, s.pid, s.arguments[0]) for s in ready.history()] == [(2, helper.pid, 400000)]


def test_a_blocked_call_waits_until_it_is_released(ready: MockNvml) -> None:
    handle = device(2)
    rule = ready.block("nvmlDeviceGetTemperatureV", gpu=2)
    result = in_thread(pynvml.nvmlDeviceGetTemperatureV, handle, 0)
    rule.wait()
    assert pynvml.nvmlDeviceGetTemperatureV(device(3), 0) == 40  # nobody else waits
    ready.set(gpu=2, temperature=60)
    rule.release()
    assert result() == 60
    assert rule.hits == -1


def test_a_blocked_call_goes_on_after_its_time(ready: MockNvml) -> None:
    rule = ready.block("nvmlDeviceGetPowerUsage", seconds=0.05, times=1)
    began = time.monotonic()
    assert pynvml.nvmlDeviceGetPowerUsage(device()) == 120000
    assert time.monotonic() - began >= 0.05
    pynvml.nvmlDeviceGetPowerUsage(device())
    assert rule.hits == 1


def test_a_blocked_call_of_another_process_and_a_gpu_that_is_lost_meanwhile(ready: MockNvml) -> None:
    script = "h = pynvml.nvmlDeviceGetHandleByIndex(2)\ntry: pynvml.nvmlDeviceGetPowerUsage(h)\n"
    script += "except pynvml.NVMLError as e: print(e.value, flush=True)"
    rule = ready.block("nvmlDeviceGetPowerUsage")
    with child(ready, script) as process:
        rule.wait()
        ready.set(gpu=2, lost=1)
        rule.release()
        assert process.stdout is not None and int(process.stdout.readline()) == pynvml.NVML_ERROR_GPU_IS_LOST


def test_a_blocked_call_ends_when_the_library_is_shut_down(ready: MockNvml) -> None:
    handle = device(2)
    rule = ready.block("nvmlDeviceGetPowerUsage")
    result = in_thread(code_of, pynvml.nvmlDeviceGetPowerUsage, handle)
    rule.wait()
    pynvml.nvmlShutdown()
    assert result() == pynvml.NVML_ERROR_UNINITIALIZED


def events_for(mask: int, *indices: int) -> Any:
    events = pynvml.nvmlEventSetCreate()
    for index in indices:
        pynvml.nvmlDeviceRegisterEvents(device(index), mask, events)
    return events


def test_events_name_gpu_type_and_data(ready: MockNvml) -> None:
    ready.push_xid(2, 48)  # before the registration: nobody hears of it
    events = events_for(pynvml.nvmlDeviceGetSupportedEventTypes(device()), 1, 2)
    ready.push_xid(5, 79)  # of a GPU that is not registered
    ready.push_xid(2, 79)
    ready.push_event(1, pynvml.nvmlEventTypeDoubleBitEccError, 3, gpu_instance=4, compute_instance=5)
    first, second = (pynvml.nvmlEventSetWait_v2(events, 1000) for _ in range(2))
    assert (pynvml.nvmlDeviceGetIndex(first.device), first.eventType, first.eventData) == (2, XID, 79)
    assert (first.gpuInstanceId, first.computeInstanceId) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert (pynvml.nvmlDeviceGetIndex(second.device), second.eventType, second.eventData) == (1, 2, 3)
    assert (second.gpuInstanceId, second.computeInstanceId) == (4, 5)
    assert code_of(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT


@pytest.mark.parametrize("bit", [bit for bit in range(16) if pynvml.nvmlEventTypeAll >> bit & 1])
def test_every_type_of_event_is_either_supported_or_refused(ready: MockNvml, bit: int) -> None:
    handle, events = device(), pynvml.nvmlEventSetCreate()
    if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) >> bit & 1:
        assert 1 << bit == pynvml.nvmlEventTypePowerSourceChange
        assert code_of(pynvml.nvmlDeviceRegisterEvents, handle, 1 << bit, events) == pynvml.NVML_ERROR_NOT_SUPPORTED
        ready.set(gpu=2, supported_events=pynvml.nvmlEventTypeAll)
    pynvml.nvmlDeviceRegisterEvents(handle, 1 << bit, events)
    ready.push_event(2, 1 << bit, bit)
    assert pynvml.nvmlEventSetWait_v2(events, 1000).eventData == bit


def test_waiting_for_an_event_takes_its_time_and_no_longer_than_the_event(ready: MockNvml) -> None:
    events = events_for(XID, 2)
    began = time.monotonic()
    assert code_of(pynvml.nvmlEventSetWait_v2, events, 50) == pynvml.NVML_ERROR_TIMEOUT
    assert time.monotonic() - began >= 0.05
    result = in_thread(pynvml.nvmlEventSetWait_v2, events, 60_000)
    time.sleep(0.02)
    ready.push_xid(2, 31)
    assert result().eventData == 31


def test_every_set_gets_a_copy_and_a_freed_one_gets_nothing(ready: MockNvml) -> None:
    sets = [events_for(XID, 2) for _ in range(3)]
    pynvml.nvmlEventSetFree(sets[2])
    ready.push_xid(2, 63)
    assert [pynvml.nvmlEventSetWait_v2(events, 0).eventData for events in sets[:2]] == [63, 63]
    assert code_of(pynvml.nvmlEventSetWait_v2, sets[2], 0) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(pynvml.nvmlEventSetFree, sets[2]) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_types_that_are_registered_later_are_heard_from_then_on(ready: MockNvml) -> None:
    events = events_for(XID, 2)
    ready.push_event(2, pynvml.nvmlEventTypeClock, 1)
    pynvml.nvmlDeviceRegisterEvents(device(2), pynvml.nvmlEventTypeClock, events)
    ready.push_event(2, pynvml.nvmlEventTypeClock, 2)
    ready.push_xid(2, 3)
    assert [pynvml.nvmlEventSetWait_v2(events, 0).eventData for _ in range(2)] == [2, 3]


def test_many_events_keep_the_newest(ready: MockNvml) -> None:
    events = events_for(XID, 2)
    for number in range(1500):
        ready.push_xid(2, number)
    heard = []
    while code_of(lambda: heard.append(pynvml.nvmlEventSetWait_v2(events, 0).eventData)) == 0:
        pass
    assert heard == list(range(1500 - 1024, 1500))


def test_waiting_ends_when_a_gpu_is_lost_but_first_come_its_events(ready: MockNvml) -> None:
    events = events_for(XID, 2)
    result = in_thread(code_of, pynvml.nvmlEventSetWait_v2, events, 60_000)
    ready.set(gpu=2, lost=1)
    assert result() == pynvml.NVML_ERROR_GPU_IS_LOST
    ready.push_xid(2, 79)
    assert pynvml.nvmlEventSetWait_v2(events, 0).eventData == 79
    assert code_of(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_GPU_IS_LOST
    ready.set(lost_ends_wait=0)
    assert code_of(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT


def test_events_and_values_reach_another_process(ready: MockNvml) -> None:
    script = """
h = pynvml.nvmlDeviceGetHandleByIndex(2)
events = pynvml.nvmlEventSetCreate()
pynvml.nvmlDeviceRegisterEvents(h, pynvml.nvmlEventTypeXidCriticalError, events)
print("registered", flush=True)
for _ in range(2):
    event = pynvml.nvmlEventSetWait_v2(events, 20000)
    print(pynvml.nvmlDeviceGetUUID(event.device), event.eventData, pynvml.nvmlDeviceGetTemperature(h, 0), flush=True)
"""
    with child(ready, script) as process:
        assert process.stdout is not None and process.stdout.readline() == "registered\n"
        for xid, temperature in ((79, 91), (94, 92)):
            ready.set(gpu=2, temperature=temperature)
            ready.push_xid(2, xid)
            assert process.stdout.readline() == f"{ready.get('uuid', gpu=2)} {xid} {temperature}\n"


def test_processes_killed_in_the_middle_of_calls_leave_the_mock_usable(ready: MockNvml) -> None:
    script = "h = pynvml.nvmlDeviceGetHandleByIndex(2)\n"
    script += "while True: pynvml.nvmlDeviceGetFieldValues(h, list(range(1, 308)) * 20)"
    for attempt in range(3):
        with child(ready, script) as process:
            before = ready.calls("nvmlDeviceGetFieldValues")
            while ready.calls("nvmlDeviceGetFieldValues") < before + 20:
                time.sleep(0.001)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        ready.set(gpu=2, temperature=50 + attempt)
        assert pynvml.nvmlDeviceGetTemperature(device(), 0) == 50 + attempt


def test_a_process_killed_while_it_holds_the_lock_does_not_keep_it(ready: MockNvml) -> None:
    script = "import os, signal, threading\nh = pynvml.nvmlDeviceGetHandleByIndex(2)\n"
    script += "input()\npynvml.nvmlLib.nvmlMockDieInside()"
    with child(ready, script) as process:
        process.communicate("\n", timeout=10)
        assert process.returncode == -signal.SIGKILL
    assert pynvml.nvmlDeviceGetTemperature(device(), 0) == 40


def test_a_forked_child_goes_on_with_what_its_parent_has_initialised(ready: MockNvml) -> None:
    script = """
import os
h = pynvml.nvmlDeviceGetHandleByIndex(2)
pid = os.fork()
if pid == 0:
    os._exit(pynvml.nvmlDeviceGetTemperature(h, 0))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), pynvml.nvmlDeviceGetTemperature(h, 0), flush=True)
"""
    with child(ready, script) as process:
        assert process.stdout is not None and process.stdout.readline() == "40 40\n"
