"""Every function of the mock, called through the real pynvml: what is set comes out, in the place where it belongs."""

from __future__ import annotations

import re
import subprocess
from ctypes import byref
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.nvml.mock import SOURCES, MockNvml

pytestmark = pytest.mark.usefixtures("initialised")


@pytest.fixture
def initialised(nvml: MockNvml) -> None:
    pynvml.nvmlInit()


def device(index: int = 2) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def code_of(call: Any, *arguments: Any) -> int:
    """What a call returns, by number."""
    try:
        call(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def test_pynvml_finds_the_mock_by_the_name_of_the_library(nvml: MockNvml) -> None:
    assert pynvml.nvmlLib._name == "libnvidia-ml.so.1"
    assert hasattr(pynvml.nvmlLib, "nvmlMockOpen")


def test_every_function_of_the_table_is_exported_and_the_other_way_round(nvml_library: Path) -> None:
    table = set(re.findall(r"CALL\((nvml\w+)\)", (SOURCES / "mock.h").read_text()))
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(nvml_library)], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert {name for name in exported if not name.startswith("nvmlMock")} == table | {"nvmlErrorString"}


def test_system() -> None:
    assert pynvml.nvmlSystemGetDriverVersion() == "580.82.07"
    assert pynvml.nvmlSystemGetNVMLVersion() == "13.580.82.07"
    assert pynvml.nvmlSystemGetCudaDriverVersion() == pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
    assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_GPU_IS_LOST) == "GPU is lost"
    assert str(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_READY)) == "Not ready"


def test_initialising_is_counted(nvml: MockNvml) -> None:
    pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 8
    pynvml.nvmlShutdown()
    assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    assert code_of(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED
    assert nvml.calls("nvmlInit") == 2


def test_handles_by_index_uuid_and_bus_lead_to_the_same_gpu(nvml: MockNvml) -> None:
    uuid, bus = "GPU-00000000-0000-0000-0000-000000000002", "00000000:12:00.0"
    for handle in (
        device(2),
        pynvml.nvmlDeviceGetHandleByUUID(uuid),
        pynvml.nvmlDeviceGetHandleByPciBusId(bus),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:12:00.0"),
        pynvml.nvmlDeviceGetHandleByPciBusId("12:00"),
    ):
        assert pynvml.nvmlDeviceGetUUID(handle) == uuid
        assert pynvml.nvmlDeviceGetIndex(handle) == pynvml.nvmlDeviceGetMinorNumber(handle) == 2
    assert code_of(pynvml.nvmlDeviceGetHandleByIndex, 8) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(pynvml.nvmlDeviceGetHandleByUUID, "GPU-9") == pynvml.NVML_ERROR_NOT_FOUND
    assert code_of(pynvml.nvmlDeviceGetHandleByPciBusId, "0000:99:00.0") == pynvml.NVML_ERROR_NOT_FOUND
    assert code_of(pynvml.nvmlDeviceGetHandleByPciBusId, "?") == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(pynvml.nvmlDeviceGetUUID, None) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_identity(nvml: MockNvml) -> None:
    nvml.set(gpu=2, name="NVIDIA B200", serial="1650522003820", minor_number=5, architecture=10, compute_major=10)
    handle = device()
    assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA B200"
    assert pynvml.nvmlDeviceGetSerial(handle) == "1650522003820"
    assert pynvml.nvmlDeviceGetMinorNumber(handle) == 5
    assert pynvml.nvmlDeviceGetArchitecture(handle) == pynvml.NVML_DEVICE_ARCH_BLACKWELL
    assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == (10, 0)
    pci = pynvml.nvmlDeviceGetPciInfo(handle)
    assert (pci.busId, pci.busIdLegacy, pci.domain, pci.bus, pci.device) == (
        "00000000:12:00.0",
        "0000:12:00.0",
        0,
        0x12,
        0,
    )
    assert (pci.pciDeviceId, pci.pciSubSystemId) == (0x233010DE, 0x16C110DE)


def test_an_absent_gpu_takes_no_index(nvml: MockNvml) -> None:
    before = device(2)
    nvml.set(gpu=1, absent=1)
    assert pynvml.nvmlDeviceGetCount() == 7
    assert pynvml.nvmlDeviceGetUUID(device(1)).endswith("2")
    assert pynvml.nvmlDeviceGetIndex(before) == 1
    assert code_of(pynvml.nvmlDeviceGetHandleByUUID, nvml.get("uuid", gpu=1)) == pynvml.NVML_ERROR_NOT_FOUND


def test_memory(nvml: MockNvml) -> None:
    nvml.set(gpu=2, memory_total=1000, memory_used=300, memory_reserved=20)
    old = pynvml.nvmlDeviceGetMemoryInfo(device())
    assert (old.total, old.used, old.free) == (1000, 320, 680)
    new = pynvml.nvmlDeviceGetMemoryInfo(device(), pynvml.nvmlMemory_v2)
    assert (new.total, new.used, new.reserved, new.free) == (1000, 300, 20, 680)
    assert code_of(pynvml.nvmlDeviceGetMemoryInfo, device(), 0x01000028) == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def test_mig_devices_have_handles_that_refuse_what_belongs_to_the_whole_gpu(nvml: MockNvml) -> None:
    assert code_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device(), 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(device()) == 0
    nvml.enable_mig(gpu=2, count=2)
    gpu = device()
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 7
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)
    assert code_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 2) == pynvml.NVML_ERROR_NOT_FOUND
    assert code_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 7) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert [pynvml.nvmlDeviceIsMigDeviceHandle(handle).value for handle in (gpu, mig)] == [0, 1]
    uuid = pynvml.nvmlDeviceGetUUID(mig)
    assert uuid == nvml.get("mig_uuid", gpu=2)[1] and uuid.startswith("MIG-")
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
    assert pynvml.nvmlDeviceGetUUID(parent) == pynvml.nvmlDeviceGetUUID(gpu)
    assert code_of(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, gpu) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert pynvml.nvmlDeviceGetIndex(mig) == 1
    assert (pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig)) == (2, 0)
    assert pynvml.nvmlDeviceGetName(mig).endswith("MIG 1g.10gb")
    assert pynvml.nvmlDeviceGetMemoryInfo(mig).total == 10 << 30
    events = pynvml.nvmlEventSetCreate()
    assert code_of(pynvml.nvmlDeviceRegisterEvents, mig, 8, events) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(pynvml.nvmlDeviceGetTemperatureV, mig, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert code_of(pynvml.nvmlDeviceSetPowerManagementLimit, mig, 400000) == pynvml.NVML_ERROR_NOT_SUPPORTED
    nvml.set(mig_refusal=pynvml.NVML_ERROR_INVALID_ARGUMENT)
    assert code_of(pynvml.nvmlDeviceGetPowerUsage, mig) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    nvml.enable_mig(gpu=2, count=0)
    assert code_of(pynvml.nvmlDeviceGetUUID, mig) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_processes_topology_and_peers(nvml: MockNvml) -> None:
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(device()) == []
    nvml.set_processes(2, {77: 1 << 30, 78: 2 << 30})
    for call in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetComputeRunningProcesses_v2):
        assert [(p.pid, p.usedGpuMemory) for p in call(device())] == [(77, 1 << 30), (78, 2 << 30)]
    nvml.set_pair(2, 5, topology=pynvml.NVML_TOPOLOGY_SYSTEM, p2p_status=pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED)
    for first, second in ((2, 5), (5, 2)):
        pair = device(first), device(second)
        assert pynvml.nvmlDeviceGetTopologyCommonAncestor(*pair) == pynvml.NVML_TOPOLOGY_SYSTEM
        assert pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == 1
    assert pynvml.nvmlDeviceGetTopologyCommonAncestor(device(2), device(3)) == pynvml.NVML_TOPOLOGY_SINGLE
    near = pynvml.nvmlDeviceGetTopologyNearestGpus(device(2), pynvml.NVML_TOPOLOGY_SYSTEM)
    assert [pynvml.nvmlDeviceGetIndex(handle) for handle in near] == [5]


def test_temperatures(nvml: MockNvml) -> None:
    nvml.set(gpu=2, temperature=81, temperature_threshold={pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX: 87})
    handle = device()
    assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 81
    assert pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU) == 81
    assert pynvml.nvmlDeviceGetMarginTemperature(handle) == 6
    assert pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX) == 87
    nvml.set(gpu=2, margin_temperature=-3, temperature=-10)
    assert pynvml.nvmlDeviceGetMarginTemperature(handle) == -3
    assert pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU) == -10
    assert code_of(pynvml.nvmlDeviceGetTemperature, handle, 9) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    acoustic = pynvml.NVML_TEMPERATURE_THRESHOLD_ACOUSTIC_MIN
    assert code_of(pynvml.nvmlDeviceGetTemperatureThreshold, handle, acoustic) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_power(nvml: MockNvml) -> None:
    nvml.set(gpu=2, power_usage=345678, total_energy=10**15, external_power_limit=450000)
    handle = device()
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 345678
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) == 10**15
    assert pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle) == [200000, 700000]
    assert pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) == 700000
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) == 450000
    pynvml.nvmlDeviceSetPowerManagementLimit(handle, 400000)
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle) == nvml.get("power_limit", gpu=2) == 400000
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) == 400000
    pynvml.nvmlDeviceSetPowerManagementLimit_v2(handle, pynvml.NVML_POWER_SCOPE_GPU, 410000)
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle) == 410000
    for outside in (199999, 700001):
        assert code_of(pynvml.nvmlDeviceSetPowerManagementLimit, handle, outside) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert nvml.get("power_limit", gpu=3) == 700000
    assert [(s.call, s.gpu, s.arguments[0]) for s in nvml.history()] == [
        ("nvmlDeviceSetPowerManagementLimit", 2, 400000),
        ("nvmlDeviceSetPowerManagementLimit_v2", 2, 410000),
    ]


def test_clocks(nvml: MockNvml) -> None:
    nvml.set(gpu=2, clock_graphics=1, clock_sm=2, clock_memory=3, clock_video=4)
    handle = device()
    assert [pynvml.nvmlDeviceGetClockInfo(handle, kind) for kind in range(4)] == [1, 2, 3, 4]
    assert [pynvml.nvmlDeviceGetMaxClockInfo(handle, kind) for kind in range(4)] == [1980, 1980, 2619, 1545]
    assert pynvml.nvmlDeviceGetSupportedMemoryClocks(handle) == [2619, 1593]
    clocks = pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle, 2619)
    assert clocks[:2] == [1980, 1965] and clocks[-1] == 210
    assert code_of(pynvml.nvmlDeviceGetSupportedGraphicsClocks, handle, 5) == pynvml.NVML_ERROR_NOT_FOUND
    pynvml.nvmlDeviceSetGpuLockedClocks(handle, 210, 1200)
    pynvml.nvmlDeviceSetMemoryLockedClocks(handle, 1593, 1593)
    names = ("locked_clock_min", "locked_clock_max", "locked_memory_min", "locked_memory_max")
    assert [nvml.get(name, gpu=2) for name in names] == [210, 1200, 1593, 1593]
    assert code_of(pynvml.nvmlDeviceSetGpuLockedClocks, handle, 1200, 900) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(pynvml.nvmlDeviceSetGpuLockedClocks, handle, 210, 3000) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    pynvml.nvmlDeviceSetGpuLockedClocks(handle, 210, pynvml.NVML_CLOCK_LIMIT_ID_TDP)
    assert nvml.get("locked_clock_max", gpu=2) == 1980
    pynvml.nvmlDeviceResetGpuLockedClocks(handle)
    pynvml.nvmlDeviceResetMemoryLockedClocks(handle)
    assert [nvml.get(name, gpu=2) for name in names] == [0, 0, 0, 0]


def test_reasons_violations_and_load(nvml: MockNvml) -> None:
    reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    nvml.set(gpu=2, clock_reasons=reasons, violation_time={pynvml.NVML_PERF_POLICY_THERMAL: 5_000_000_000})
    nvml.set(gpu=2, performance_state=2, utilization_gpu=97, utilization_memory=31)
    handle = device()
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == reasons
    assert pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) == reasons
    assert pynvml.nvmlDeviceGetSupportedClocksEventReasons(handle) == pynvml.nvmlClocksEventReasonAll
    assert pynvml.nvmlDeviceGetSupportedClocksThrottleReasons(handle) == pynvml.nvmlClocksEventReasonAll
    status = pynvml.nvmlDeviceGetViolationStatus(handle, pynvml.NVML_PERF_POLICY_THERMAL)
    assert status.violationTime == 5_000_000_000 and status.referenceTime > 0
    assert pynvml.nvmlDeviceGetPerformanceState(handle) == 2
    load = pynvml.nvmlDeviceGetUtilizationRates(handle)
    assert (load.gpu, load.memory) == (97, 31)


def test_persistence_mode(nvml: MockNvml) -> None:
    assert pynvml.nvmlDeviceGetPersistenceMode(device()) == 1
    pynvml.nvmlDeviceSetPersistenceMode(device(), pynvml.NVML_FEATURE_DISABLED)
    assert pynvml.nvmlDeviceGetPersistenceMode(device()) == nvml.get("persistence_mode", gpu=2) == 0


def test_workload_power_profiles_of_which_the_first_of_two_in_conflict_is_enforced(nvml: MockNvml) -> None:
    max_q, training = pynvml.NVML_POWER_PROFILE_MAX_Q, pynvml.NVML_POWER_PROFILE_LLM_TRAINING
    nvml.set(gpu=2, profile_conflicts={max_q * 8: 1 << training, training * 8: 1 << max_q})
    nvml.set(gpu=2, profile_priority={training: 0, max_q: 9})
    info = pynvml.c_nvmlWorkloadPowerProfileProfilesInfo_v1_t()
    pynvml.nvmlDeviceWorkloadPowerProfileGetProfilesInfo(device(), byref(info))
    assert info.perfProfilesMask.mask[0] == (1 << 25) - 1
    assert (info.perfProfile[max_q].profileId, info.perfProfile[max_q].priority) == (max_q, 9)
    assert info.perfProfile[max_q].conflictingmask.mask[0] == 1 << training
    request = pynvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
    request.requestedProfilesMask.mask[0] = 1 << max_q | 1 << training
    pynvml.nvmlDeviceWorkloadPowerProfileSetRequestedProfiles(device(), byref(request))
    current = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
    pynvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(device(), byref(current))
    assert current.requestedProfilesMask.mask[0] == 1 << max_q | 1 << training
    assert current.enforcedProfilesMask.mask[0] == 1 << training
    request.requestedProfilesMask.mask[0] = 1 << training
    pynvml.nvmlDeviceWorkloadPowerProfileClearRequestedProfiles(device(), byref(request))
    pynvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(device(), byref(current))
    assert current.enforcedProfilesMask.mask[0] == 1 << max_q
    request.requestedProfilesMask.mask[1] = 1
    refused = code_of(pynvml.nvmlDeviceWorkloadPowerProfileSetRequestedProfiles, device(), byref(request))
    assert refused == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_requested_profiles_are_added_removed_or_replaced_by_one_call(nvml: MockNvml) -> None:
    update = pynvml.c_nvmlWorkloadPowerProfileUpdateProfiles_v1_t()
    seen = []
    for operation, mask in ((1, 0b110), (1, 0b001), (0, 0b010), (2, 0b1000), (3, 0)):
        update.operation, update.updateProfilesMask.mask[0] = operation, mask
        code = code_of(pynvml.nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1, device(), byref(update))
        seen.append((code, nvml.get("profiles_requested", gpu=2)[0]))
    assert seen == [(0, 0b110), (0, 0b111), (0, 0b101), (0, 0b1000), (pynvml.NVML_ERROR_INVALID_ARGUMENT, 0b1000)]


def test_ecc(nvml: MockNvml) -> None:
    sram, dram = pynvml.NVML_MEMORY_LOCATION_SRAM, pynvml.NVML_MEMORY_LOCATION_DRAM
    nvml.set_ecc(2, 3, corrected=False, aggregate=False, location=sram)
    nvml.set_ecc(2, 4, corrected=False, aggregate=False, location=dram)
    nvml.set_ecc(2, 5, corrected=True, aggregate=True, location=dram)
    handle = device()
    uncorrected, volatile = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    assert pynvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile) == 7
    assert pynvml.nvmlDeviceGetMemoryErrorCounter(handle, uncorrected, volatile, sram) == 3
    assert pynvml.nvmlDeviceGetTotalEccErrors(handle, 0, pynvml.NVML_AGGREGATE_ECC) == 5
    fields = ("ECC_DBE_VOL_TOTAL", "ECC_SBE_AGG_TOTAL", "ECC_DBE_VOL_DEV", "ECC_SBE_AGG_DEV", "ECC_SBE_VOL_TOTAL")
    assert [field_of(handle, f"NVML_FI_DEV_{name}").value.ullVal for name in fields] == [7, 5, 4, 5, 0]
    nvml.set(gpu=2, ecc_mode=0)
    assert pynvml.nvmlDeviceGetEccMode(handle) == [0, 1]
    refused = code_of(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, volatile)
    assert refused == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_sram_status(nvml: MockNvml) -> None:
    names = ("aggregate_parity", "aggregate_secded", "aggregate_corrected", "volatile_parity", "volatile_secded")
    names += ("volatile_corrected", "bucket_l2", "bucket_sm", "bucket_pcie", "bucket_mcu", "bucket_other")
    nvml.set(gpu=2, **{f"sram_{name}": number for number, name in enumerate(names, start=1)}, sram_threshold_exceeded=1)
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    pynvml.nvmlDeviceGetSramEccErrorStatus(device(), byref(status))
    assert [getattr(status, name) for name, _ in status._fields_[1:]] == [*range(1, 12), 1]
    status.version = 1
    refused = code_of(pynvml.nvmlDeviceGetSramEccErrorStatus, device(), byref(status))
    assert refused == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def test_rows_banks_pages_and_repair(nvml: MockNvml) -> None:
    nvml.set(gpu=2, remapped_correctable=1, remapped_uncorrectable=2, remapped_pending=1, remapped_failure=1)
    nvml.set(gpu=2, remapped_correctable_inactive=3, remapped_uncorrectable_inactive=4, row_histogram=[5, 6, 7, 8, 9])
    nvml.set(gpu=2, banks_active=1, banks_inactive=2, banks_pending=1, banks_full=3, banks_none=4)
    nvml.set(gpu=2, tpc_repair_pending=1, unrepairable_memory=1, retired_pending=1)
    handle = device()
    assert pynvml.nvmlDeviceGetRemappedRows(handle) == (1, 2, 1, 1)
    rows = pynvml.c_nvmlRemappedRowsInfo_v2_t()
    pynvml.nvmlDeviceGetRemappedRows_v2(handle, byref(rows))
    assert [getattr(rows, name) for name, _ in rows._fields_] == [1, 3, 2, 4, 1, 1]
    histogram = pynvml.nvmlDeviceGetRowRemapperHistogram(handle)
    assert [getattr(histogram, name) for name, _ in histogram._fields_] == [5, 6, 7, 8, 9]
    banks = pynvml.c_nvmlEccBankRemapperStatus_v1_t()
    pynvml.nvmlDeviceGetBankRemapperStatus_v1(handle, byref(banks))
    assert (banks.activeRemappings, banks.inactiveRemappings, banks.bPending) == (1, 2, 1)
    assert (banks.histogram.maxSpareGroupCount, banks.histogram.noSpareGroupCount) == (3, 4)
    assert pynvml.nvmlDeviceGetRepairStatus(handle) == [0, 1]
    assert pynvml.nvmlDeviceGetUnrepairableMemoryFlag_v1(handle) == 1
    double_bit = pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
    nvml.set_retired_pages(2, double_bit, [0x1000, 0x2000])
    assert pynvml.nvmlDeviceGetRetiredPages(handle, double_bit) == [0x1000, 0x2000]
    assert [page["address"] for page in pynvml.nvmlDeviceGetRetiredPages_v2(handle, double_bit)] == [0x1000, 0x2000]
    assert pynvml.nvmlDeviceGetRetiredPages(handle, 0) == []
    assert pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle) == 1


def test_links_and_pcie(nvml: MockNvml) -> None:
    nvml.set(gpu=2, nvlink_count=4, nvlink_state={3: 0}, nvlink_remote_type={1: 0}, pcie_replay=17)
    nvml.set_link_errors(2, 3, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY, 6)
    handle = device()
    assert [pynvml.nvmlDeviceGetNvLinkState(handle, link) for link in range(4)] == [1, 1, 1, 0]
    assert code_of(pynvml.nvmlDeviceGetNvLinkState, handle, 4) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, 0) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    assert pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, 1) == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
    assert pynvml.nvmlDeviceGetNvLinkVersion(handle, 0) == pynvml.NVML_NVLINK_VERSION_4_0
    assert pynvml.nvmlDeviceGetNvLinkCapability(handle, 0, pynvml.NVML_NVLINK_CAP_P2P_SUPPORTED) == 1
    counters = [pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, 3, counter) for counter in range(5)]
    assert counters == [0, 6, 0, 0, 0]
    assert pynvml.nvmlDeviceGetPcieReplayCounter(handle) == 17


def test_fabric(nvml: MockNvml) -> None:
    nvml.set(gpu=2, fabric_clique=3, fabric_health_mask=0x155, fabric_health_summary=2, fabric_cluster=list(range(16)))
    nvml.set(gpu=2, fabric_state=pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, fabric_status=pynvml.NVML_ERROR_NOT_READY)
    for kind in (pynvml.c_nvmlGpuFabricInfo_t, pynvml.c_nvmlGpuFabricInfo_v2_t, pynvml.c_nvmlGpuFabricInfo_v3_t):
        info = kind()
        old = kind is pynvml.c_nvmlGpuFabricInfo_t
        call = pynvml.nvmlDeviceGetGpuFabricInfo if old else pynvml.nvmlDeviceGetGpuFabricInfoV
        call(device(), byref(info))
        assert (list(info.clusterUuid), info.cliqueId, info.state) == (list(range(16)), 3, 2)
        assert info.status == pynvml.NVML_ERROR_NOT_READY
        assert getattr(info, "healthMask", 0x155) == 0x155
        assert getattr(info, "healthSummary", 2) == 2
    info.version = 1
    refused = code_of(pynvml.nvmlDeviceGetGpuFabricInfoV, device(), byref(info))
    assert refused == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def field_of(handle: Any, name: str, scope: int = 0) -> Any:
    return pynvml.nvmlDeviceGetFieldValues(handle, [(getattr(pynvml, name), scope)])[0]


FIELDS = [
    ("GET_GPU_RECOVERY_ACTION", "uiVal", {"recovery_action": 4}, 4),
    ("DRAIN_AND_RESET_STATUS", "uiVal", {"recovery_action": 4}, 1),
    ("RESET_STATUS", "uiVal", {"recovery_action": 4}, 0),
    ("TEMPERATURE_SHUTDOWN_TLIMIT", "siVal", {"shutdown_tlimit": -9}, -9),
    ("TEMPERATURE_SLOWDOWN_TLIMIT", "siVal", {"slowdown_tlimit": -2}, -2),
    ("TEMPERATURE_MEM_MAX_TLIMIT", "siVal", {"memory_max_tlimit": 1}, 1),
    ("TEMPERATURE_GPU_MAX_TLIMIT", "siVal", {"gpu_max_tlimit": 3}, 3),
    ("MEMORY_TEMP", "uiVal", {"memory_temperature": 71}, 71),
    ("REMAPPED_COR", "uiVal", {"remapped_correctable": 2}, 2),
    ("REMAPPED_UNC", "uiVal", {"remapped_uncorrectable": 3}, 3),
    ("REMAPPED_PENDING", "uiVal", {"remapped_pending": 1}, 1),
    ("REMAPPED_FAILURE", "uiVal", {"remapped_failure": 1}, 1),
    ("REMAPPED_ROWS_UNC_INACTIVE", "uiVal", {"remapped_uncorrectable_inactive": 8}, 8),
    ("PENDING_BANK_REMAPPING", "uiVal", {"banks_pending": 1}, 1),
    ("RETIRED_DBE", "ullVal", {"retired_count": {1: 6}}, 6),
    ("PCIE_REPLAY_COUNTER", "uiVal", {"pcie_replay": 12}, 12),
    ("PCIE_COUNT_CORRECTABLE_ERRORS", "uiVal", {}, 0),
    ("PERF_POLICY_THERMAL", "ullVal", {"violation_time": {1: 10**12}}, 10**12),
    ("CLOCKS_EVENT_REASON_SW_POWER_CAP", "ullVal", {"violation_time": {0: 10**12}}, 10**12),
    ("CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN", "ullVal", {"sw_thermal_time": 4}, 4),
    ("CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN", "ullVal", {"hw_thermal_time": 5}, 5),
    ("CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN", "ullVal", {"power_brake_time": 6}, 6),
    ("TOTAL_ENERGY_CONSUMPTION", "ullVal", {"total_energy": 10**14}, 10**14),
    ("POWER_AVERAGE", "uiVal", {"power_average": 300000}, 300000),
    ("POWER_INSTANT", "uiVal", {"power_usage": 310000}, 310000),
    ("POWER_CURRENT_LIMIT", "uiVal", {"external_power_limit": 300000}, 300000),
    ("POWER_REQUESTED_LIMIT", "uiVal", {"power_limit": 500000}, 500000),
    ("NVLINK_LINK_COUNT", "uiVal", {}, 18),
    ("NVLINK_GET_STATE", "uiVal", {"nvlink_state": {7: 0}}, 0),
    ("NVLINK_ERROR_DL_REPLAY", "ullVal", {"nvlink_errors": {7 * 5: 9}}, 9),
    ("NVLINK_REPLAY_ERROR_COUNT_L7", "ullVal", {"nvlink_errors": {7 * 5: 9}}, 9),
    ("NVLINK_REPLAY_ERROR_COUNT_TOTAL", "ullVal", {"nvlink_errors": {0: 1, 7 * 5: 9}}, 10),
    ("NVLINK_CRC_FLIT_ERROR_COUNT_L5", "ullVal", {"nvlink_errors": {5 * 5 + 2: 4}}, 4),
    ("NVLINK_ECC_DATA_ERROR_COUNT_L11", "ullVal", {"nvlink_errors": {11 * 5 + 4: 3}}, 3),
    ("NVLINK_COUNT_SYMBOL_ERRORS", "ullVal", {"nvlink_counters": {7 * 22 + 20: 5}}, 5),
]


@pytest.mark.parametrize(("name", "member", "values", "expected"), FIELDS, ids=[field[0] for field in FIELDS])
def test_fields_follow_from_values(
    nvml: MockNvml, name: str, member: str, values: dict[str, Any], expected: int
) -> None:
    nvml.set(gpu=2, **values)
    kinds = {"uiVal": pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "siVal": pynvml.NVML_VALUE_TYPE_SIGNED_INT}
    found = field_of(device(), f"NVML_FI_DEV_{name}", scope=7)
    assert found.nvmlReturn == 0
    assert found.valueType == kinds.get(member, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
    assert getattr(found.value, member) == expected
    assert found.timestamp > 1_600_000_000_000_000  # microseconds since 1970


def test_each_field_has_a_return_code_and_a_type_of_its_own(nvml: MockNvml) -> None:
    nvml.set_field(2, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 2)
    nvml.set_field(2, "NVML_FI_DEV_POWER_INSTANT", error=pynvml.NVML_ERROR_NO_DATA)
    nvml.set_field(2, 299, -2.5, kind="double")
    nvml.set_field(2, 297, -7, kind="longlong")
    nvml.set_field(2, 298, 65535, kind="ushort")
    nvml.unsupported(2, "NVML_FI_DEV_MEMORY_TEMP")
    found = pynvml.nvmlDeviceGetFieldValues(device(), [230, 186, 299, 297, 298, 82, 307, 308, 0, 252, 83])
    assert [value.nvmlReturn for value in found] == [0, 21, 0, 0, 0, 3, 0, 2, 2, 3, 0]
    assert (found[0].value.uiVal, found[2].value.dVal, found[3].value.sllVal, found[4].value.usVal) == (
        2,
        -2.5,
        -7,
        65535,
    )
    assert [found[place].valueType for place in (0, 2, 3, 4)] == [1, 0, 4, 6]
    assert field_of(device(3), "NVML_FI_DEV_POWER_INSTANT").nvmlReturn == 0
    nvml.clear_field(2, "NVML_FI_DEV_POWER_INSTANT")
    assert field_of(device(), "NVML_FI_DEV_POWER_INSTANT").value.uiVal == 120000


def test_a_field_of_links_takes_one_link_or_all(nvml: MockNvml) -> None:
    name = "NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS"
    nvml.set_link_counter(2, 4, name, 10)
    nvml.set_link_counter(2, 5, name, 1)
    assert [field_of(device(), name, scope).value.ullVal for scope in (3, 4, 5, 0xFFFFFFFF)] == [0, 10, 1, 11]
    assert field_of(device(), name, 18).nvmlReturn == pynvml.NVML_ERROR_INVALID_ARGUMENT
    nvml.set_field(2, name, 99, scope=4)
    assert [field_of(device(), name, scope).value.ullVal for scope in (4, 5)] == [99, 1]


def test_a_mock_has_as_many_gpus_and_mig_devices_as_one_asks_for(nvml_library: Path, tmp_path: Path) -> None:
    mock = MockNvml(nvml_library, tmp_path / "state", gpus=3, mig=2)
    assert (mock.gpus, mock.get("mig_mode", gpu=1), mock.get("mig_count", gpu=2)) == (3, 1, 2)
    other = MockNvml.attach(nvml_library, tmp_path / "state")
    other.set(gpu=1, temperature=77)
    assert (other.gpus, mock.get("temperature", gpu=1)) == (3, 77)
    with pytest.raises(OSError, match="0 to 16 GPUs"):
        MockNvml(nvml_library, tmp_path / "other", gpus=17)
    other.close()
    assert mock.path.exists()
    mock.close()
    assert not mock.path.exists()


@pytest.mark.parametrize("nvml", [2], indirect=True)
def test_the_fixture_takes_a_number_of_gpus(nvml: MockNvml) -> None:
    assert pynvml.nvmlDeviceGetCount() == 2


def test_values_by_name_are_checked(nvml: MockNvml) -> None:
    with pytest.raises(ValueError, match="no value 'temprature'"):
        nvml.set(gpu=2, temprature=85)
    with pytest.raises(ValueError, match="value of a GPU"):
        nvml.get("temperature")
    with pytest.raises(ValueError, match="no function"):
        nvml.fail("nvmlDeviceGetEverything", 3)
    with pytest.raises(ValueError, match=r"nvlink_state\[99\]"):
        nvml.set(gpu=2, nvlink_state={99: 0})
    for call in (lambda: nvml.set(gpu=8, lost=1), lambda: nvml.push_xid(9, 79), lambda: nvml.speed(-1)):
        with pytest.raises(ValueError, match="there is no GPU"):
            call()
    nvml.set(temperature=55)
    assert [nvml.get("temperature", gpu) for gpu in range(8)] == [55] * 8
    nvml.reset()
    assert nvml.get("temperature", gpu=2) == 40
