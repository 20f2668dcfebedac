/* Init, the system, identity of GPUs, MIG, topology, processes. */
#include "mock.h"

#include <stdio.h>
#include <string.h>

struct pci_info {
    char bus_id_legacy[16];
    unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};
struct memory_v1 {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};
struct process_info {
    unsigned int pid;
    unsigned long long used_memory;
    unsigned int gpu_instance, compute_instance;
};
_Static_assert(sizeof(struct pci_info) == 68, "nvmlPciInfo_t");
_Static_assert(sizeof(struct memory_v2) == 0x28, "nvmlMemory_v2_t");
_Static_assert(sizeof(struct process_info) == 24, "nvmlProcessInfo_v2_t");

#define MEMORY_V2 0x02000028u
#define NO_INSTANCE 0xFFFFFFFFu

/* Init and system */

static nvmlReturn_t initialise(enum call call)
{
    nvmlReturn_t code = mock_attach();
    if (code != NVML_SUCCESS)
        return code;
    code = mock_begin();
    if (code == NVML_SUCCESS)
        code = mock_admit(call, ANY, 0);
    if (code == NVML_SUCCESS)
        code = mock_leave((nvmlReturn_t)mock->init_error);
    if (code != NVML_SUCCESS)
        mock_detach();
    return code;
}

EXPORT nvmlReturn_t nvmlInit(void) { return initialise(CALL_nvmlInit); }
EXPORT nvmlReturn_t nvmlInit_v2(void) { return initialise(CALL_nvmlInit_v2); }
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return initialise(CALL_nvmlInitWithFlags);
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    SYSTEM_CALL(nvmlShutdown);
    mock_leave(NVML_SUCCESS);
    return mock_detach();
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset", "The operating system has blocked the request.",
        "Driver/library version mismatch", "In use by another client", "Insufficient Memory", "No data",
        "vGPU ECC not supported", "Insufficient Resources", "Frequency not supported", "Argument version mismatch",
        "Deprecated", "Not ready", "GPU not found", "Invalid state", "Reset type not supported"};
    return code < sizeof texts / sizeof *texts ? texts[code] : "Unknown Error";
}

static nvmlReturn_t give_text(char *place, unsigned int size, const char *text)
{
    REQUIRE(place, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(strlen(text) < size, NVML_ERROR_INSUFFICIENT_SIZE);
    strcpy(place, text);
    return mock_leave(NVML_SUCCESS);
}

static nvmlReturn_t give(unsigned int *place, int64_t value)
{
    REQUIRE(place, NVML_ERROR_INVALID_ARGUMENT);
    *place = (unsigned int)value;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    SYSTEM_CALL(nvmlSystemGetDriverVersion);
    return give_text(version, length, mock->driver_version);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    SYSTEM_CALL(nvmlSystemGetNVMLVersion);
    return give_text(version, length, mock->nvml_version);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    SYSTEM_CALL(nvmlSystemGetCudaDriverVersion);
    return give((unsigned int *)version, mock->cuda_version);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    SYSTEM_CALL(nvmlSystemGetCudaDriverVersion_v2);
    return give((unsigned int *)version, mock->cuda_version);
}

/* Which GPUs there are: an absent one takes no index, so that those behind it move up. */

static int count_before(int number)
{
    int count = 0;
    for (int i = 0; i < number; i++)
        count += !mock->gpus[i].absent;
    return count;
}

static nvmlReturn_t give_count(unsigned int *count) { return give(count, count_before(mock->gpu_count)); }

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
    SYSTEM_CALL(nvmlDeviceGetCount);
    return give_count(count);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    SYSTEM_CALL(nvmlDeviceGetCount_v2);
    return give_count(count);
}

/* Give the handle of a GPU that was found, or not (gpu ANY: `code`). */
static nvmlReturn_t give_handle(enum call call, int gpu, int mig, nvmlReturn_t code, nvmlDevice_t *device)
{
    const nvmlReturn_t refusal = mock_admit(call, gpu, IDENTITY);
    if (refusal != NVML_SUCCESS)
        return refusal;
    REQUIRE(gpu != ANY, code);
    REQUIRE(device, NVML_ERROR_INVALID_ARGUMENT);
    *device = mock_handle(gpu, mig);
    return mock_leave(NVML_SUCCESS);
}

static nvmlReturn_t handle_by_index(enum call call, unsigned int index, nvmlDevice_t *device)
{
    const nvmlReturn_t code = mock_begin();
    if (code != NVML_SUCCESS)
        return code;
    int found = ANY;
    for (int i = 0; i < mock->gpu_count; i++)
        if (!mock->gpus[i].absent && count_before(i) == (int)index)
            found = i;
    return give_handle(call, found, -1, NVML_ERROR_INVALID_ARGUMENT, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return handle_by_index(CALL_nvmlDeviceGetHandleByIndex, index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    return handle_by_index(CALL_nvmlDeviceGetHandleByIndex_v2, index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    const nvmlReturn_t code = mock_begin();
    if (code != NVML_SUCCESS)
        return code;
    int found = ANY, found_mig = -1;
    for (int i = 0; i < mock->gpu_count && uuid; i++) {
        const struct gpu *gpu = &mock->gpus[i];
        if (gpu->absent)
            continue;
        if (!strcmp(uuid, gpu->uuid))
            found = i;
        for (int mig = 0; gpu->mig_mode && mig < gpu->mig_count; mig++)
            if (!strcmp(uuid, gpu->mig_uuid[mig])) {
                found = i;
                found_mig = mig;
            }
    }
    return give_handle(CALL_nvmlDeviceGetHandleByUUID, found, found_mig,
                       uuid ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    const nvmlReturn_t code = mock_begin();
    if (code != NVML_SUCCESS)
        return code;
    unsigned int domain = 0, bus = 0, number = 0;
    const bool readable = bus_id && (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &number) == 3 ||
                                     (domain = 0, sscanf(bus_id, "%x:%x", &bus, &number) == 2));
    int found = ANY;
    for (int i = 0; i < mock->gpu_count && readable; i++) {
        const struct gpu *gpu = &mock->gpus[i];
        if (!gpu->absent && gpu->pci_domain == domain && gpu->pci_bus == bus && gpu->pci_device == number)
            found = i;
    }
    return give_handle(CALL_nvmlDeviceGetHandleByPciBusId_v2, found, -1,
                       readable ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT, device);
}

/* Identity */

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    DEVICE_CALL(nvmlDeviceGetUUID, device, IDENTITY);
    return give_text(uuid, length, device->mig < 0 ? gpu->uuid : gpu->mig_uuid[device->mig]);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    DEVICE_CALL(nvmlDeviceGetName, device, IDENTITY);
    char text[TEXT_SIZE + 16];
    snprintf(text, sizeof text, device->mig < 0 ? "%s" : "%s MIG 1g.10gb", gpu->name);
    return give_text(name, length, text);
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    DEVICE_CALL(nvmlDeviceGetSerial, device, SURVIVES_RESET_REQUIRED);
    return give_text(serial, length, gpu->serial);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    DEVICE_CALL(nvmlDeviceGetIndex, device, IDENTITY);
    return give(index, device->mig < 0 ? count_before(mock_gpu_number(gpu)) : device->mig);
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    DEVICE_CALL(nvmlDeviceGetMinorNumber, device, SURVIVES_RESET_REQUIRED);
    return give(minor, gpu->minor_number);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info *pci)
{
    DEVICE_CALL(nvmlDeviceGetPciInfo_v3, device, SURVIVES_RESET_REQUIRED);
    REQUIRE(pci, NVML_ERROR_INVALID_ARGUMENT);
    *pci = (struct pci_info){
        .domain = (unsigned)gpu->pci_domain, .bus = (unsigned)gpu->pci_bus & 0xFF,
        .device = (unsigned)gpu->pci_device & 0xFF, .pci_device_id = (unsigned)gpu->pci_device_id,
        .pci_subsystem_id = (unsigned)gpu->pci_subsystem_id};
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF, pci->bus,
             pci->device);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *architecture)
{
    DEVICE_CALL(nvmlDeviceGetArchitecture, device, IDENTITY);
    return give(architecture, gpu->architecture);
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    DEVICE_CALL(nvmlDeviceGetCudaComputeCapability, device, IDENTITY);
    REQUIRE(major && minor, NVML_ERROR_INVALID_ARGUMENT);
    *major = (int)gpu->compute_major;
    *minor = (int)gpu->compute_minor;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory_v1 *memory)
{
    DEVICE_CALL(nvmlDeviceGetMemoryInfo, device, TAKES_MIG);
    REQUIRE(memory, NVML_ERROR_INVALID_ARGUMENT);
    const unsigned long long share = device->mig < 0 ? 1 : MAX_MIG + 1;
    memory->total = (unsigned long long)gpu->memory_total / share;
    memory->used = (unsigned long long)(gpu->memory_used + gpu->memory_reserved) / share;
    memory->free = memory->total - memory->used;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_v2 *memory)
{
    DEVICE_CALL(nvmlDeviceGetMemoryInfo_v2, device, TAKES_MIG);
    REQUIRE(memory, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(memory->version == MEMORY_V2, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    const unsigned long long share = device->mig < 0 ? 1 : MAX_MIG + 1;
    memory->total = (unsigned long long)gpu->memory_total / share;
    memory->used = (unsigned long long)gpu->memory_used / share;
    memory->reserved = (unsigned long long)gpu->memory_reserved / share;
    memory->free = memory->total - memory->used - memory->reserved;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned int *mode)
{
    DEVICE_CALL(nvmlDeviceGetPersistenceMode, device, 0);
    return give(mode, gpu->persistence_mode);
}

EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned int mode)
{
    DEVICE_CALL(nvmlDeviceSetPersistenceMode, device, NEEDS_ROOT);
    REQUIRE(mode <= 1, NVML_ERROR_INVALID_ARGUMENT);
    gpu->persistence_mode = mode;
    mock_record(CALL_nvmlDeviceSetPersistenceMode, gpu, mode, 0);
    return mock_leave(NVML_SUCCESS);
}

/* MIG */

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    DEVICE_CALL(nvmlDeviceGetMigMode, device, SURVIVES_RESET_REQUIRED | REFUSES_WITH_INVALID_ARGUMENT);
    REQUIRE(current && pending, NVML_ERROR_INVALID_ARGUMENT);
    *current = (unsigned)gpu->mig_mode;
    *pending = (unsigned)gpu->mig_pending;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    DEVICE_CALL(nvmlDeviceGetMaxMigDeviceCount, device, SURVIVES_RESET_REQUIRED | REFUSES_WITH_INVALID_ARGUMENT);
    return give(count, gpu->mig_mode ? MAX_MIG : 0);
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    DEVICE_CALL(nvmlDeviceGetMigDeviceHandleByIndex, device, SURVIVES_RESET_REQUIRED | REFUSES_WITH_INVALID_ARGUMENT);
    REQUIRE(gpu->mig_mode, NVML_ERROR_NOT_SUPPORTED);
    REQUIRE(mig && index < MAX_MIG, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(index < gpu->mig_count, NVML_ERROR_NOT_FOUND);
    *mig = mock_handle(device->gpu, (int)index);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    DEVICE_CALL(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, mig, IDENTITY);
    REQUIRE(device && mig->mig >= 0, NVML_ERROR_INVALID_ARGUMENT);
    *device = mock_handle(mock_gpu_number(gpu), -1);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    DEVICE_CALL(nvmlDeviceIsMigDeviceHandle, device, IDENTITY);
    return give(is_mig, device->mig >= 0);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    DEVICE_CALL(nvmlDeviceGetGpuInstanceId, device, IDENTITY);
    REQUIRE(device->mig >= 0, NVML_ERROR_INVALID_ARGUMENT);
    return give(id, device->mig + 1);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    DEVICE_CALL(nvmlDeviceGetComputeInstanceId, device, IDENTITY);
    REQUIRE(device->mig >= 0, NVML_ERROR_INVALID_ARGUMENT);
    return give(id, 0);
}

/* Processes and topology */

static nvmlReturn_t give_processes(const struct gpu *gpu, unsigned int *count, struct process_info *processes)
{
    REQUIRE(count, NVML_ERROR_INVALID_ARGUMENT);
    const unsigned int room = *count;
    *count = (unsigned)gpu->process_count;
    REQUIRE(*count <= room, NVML_ERROR_INSUFFICIENT_SIZE);
    REQUIRE(processes || !*count, NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned int i = 0; i < *count; i++)
        processes[i] = (struct process_info){(unsigned)gpu->process_pid[i], (unsigned long long)gpu->process_memory[i],
                                             NO_INSTANCE, NO_INSTANCE};
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(
    nvmlDevice_t device, unsigned int *count, struct process_info *processes)
{
    DEVICE_CALL(nvmlDeviceGetComputeRunningProcesses_v2, device, TAKES_MIG);
    return give_processes(gpu, count, processes);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(
    nvmlDevice_t device, unsigned int *count, struct process_info *processes)
{
    DEVICE_CALL(nvmlDeviceGetComputeRunningProcesses_v3, device, TAKES_MIG);
    return give_processes(gpu, count, processes);
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, unsigned int *level)
{
    DEVICE_CALL(nvmlDeviceGetTopologyCommonAncestor, device, 0);
    REQUIRE(mock_is_handle(other), NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(!mock->gpus[other->gpu].lost, NVML_ERROR_GPU_IS_LOST);
    return give(level, gpu->topology[other->gpu]);
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(
    nvmlDevice_t device, nvmlDevice_t other, unsigned int capability, unsigned int *status)
{
    DEVICE_CALL(nvmlDeviceGetP2PStatus, device, 0);
    REQUIRE(mock_is_handle(other) && capability < 5, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(!mock->gpus[other->gpu].lost, NVML_ERROR_GPU_IS_LOST);
    return give(status, gpu->p2p_status[other->gpu]);
}

/* Those that are exactly so near; as in NVML a call without room counts them and succeeds. */
EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(
    nvmlDevice_t device, unsigned int level, unsigned int *count, nvmlDevice_t *devices)
{
    DEVICE_CALL(nvmlDeviceGetTopologyNearestGpus, device, 0);
    REQUIRE(count, NVML_ERROR_INVALID_ARGUMENT);
    unsigned int found = 0;
    for (int i = 0; i < mock->gpu_count; i++) {
        if (i == device->gpu || mock->gpus[i].absent || gpu->topology[i] != level)
            continue;
        if (devices && found < *count)
            devices[found] = mock_handle(i, -1);
        found++;
    }
    *count = found;
    return mock_leave(NVML_SUCCESS);
}
