/* ECC, remapped rows and retired pages, PCIe, NVLink, fabric. */
#include "mock.h"

struct sram_status {
    unsigned int version;
    unsigned long long aggregate_parity, aggregate_secded, aggregate_corrected;
    unsigned long long volatile_parity, volatile_secded, volatile_corrected;
    unsigned long long bucket_l2, bucket_sm, bucket_pcie, bucket_mcu, bucket_other;
    unsigned int threshold_exceeded;
};
struct row_histogram {
    unsigned int max, high, partial, low, none;
};
struct remapped_rows_v2 {
    unsigned int correctable, correctable_inactive, uncorrectable, uncorrectable_inactive, pending, failure;
};
struct bank_status {
    unsigned int active, inactive, pending, full, none;
};
struct repair_status {
    unsigned int version, channel_pending, tpc_pending;
};
struct memory_flag {
    unsigned int version, unrepairable;
};
struct fabric_v1 {
    unsigned char cluster[16];
    nvmlReturn_t status;
    uint32_t clique;
    unsigned int state;
};
struct fabric_v3 { /* version 2 ends before the summary */
    unsigned int version;
    unsigned char cluster[16];
    nvmlReturn_t status;
    uint32_t clique;
    unsigned int state;
    uint32_t health_mask;
    uint8_t health_summary;
};
_Static_assert(sizeof(struct sram_status) == 0x68, "nvmlEccSramErrorStatus_v1_t");
_Static_assert(offsetof(struct fabric_v3, health_summary) == 0x24, "nvmlGpuFabricInfo_v2_t");
_Static_assert(sizeof(struct fabric_v3) == 0x28, "nvmlGpuFabricInfo_v3_t");

#define SRAM_STATUS_V1 0x1000068u
#define REPAIR_STATUS_V1 0x100000Cu
#define MEMORY_FLAG_V1 0x1000008u
#define FABRIC_V2 0x02000024u
#define FABRIC_V3 0x3000028u

static nvmlReturn_t give(unsigned int *place, int64_t value)
{
    REQUIRE(place, NVML_ERROR_INVALID_ARGUMENT);
    *place = (unsigned int)value;
    return mock_leave(NVML_SUCCESS);
}

/* ECC */

static const int64_t *ecc_place(const struct gpu *gpu, int type, int counter)
{
    return &gpu->ecc_errors[(type * ECC_COUNTERS + counter) * ECC_LOCATIONS];
}

int64_t ecc_total(const struct gpu *gpu, int type, int counter)
{
    int64_t total = 0;
    for (int location = 0; location < ECC_LOCATIONS; location++)
        total += ecc_place(gpu, type, counter)[location];
    return total;
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    DEVICE_CALL(nvmlDeviceGetEccMode, device, 0);
    REQUIRE(current && pending, NVML_ERROR_INVALID_ARGUMENT);
    *current = (unsigned)gpu->ecc_mode;
    *pending = (unsigned)gpu->ecc_pending;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(
    nvmlDevice_t device, unsigned int type, unsigned int counter, unsigned long long *count)
{
    DEVICE_CALL(nvmlDeviceGetTotalEccErrors, device, 0);
    REQUIRE(type < ECC_TYPES && counter < ECC_COUNTERS && count, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(gpu->ecc_mode, NVML_ERROR_NOT_SUPPORTED);
    *count = (unsigned long long)ecc_total(gpu, (int)type, (int)counter);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(
    nvmlDevice_t device, unsigned int type, unsigned int counter, unsigned int location, unsigned long long *count)
{
    DEVICE_CALL(nvmlDeviceGetMemoryErrorCounter, device, 0);
    REQUIRE(type < ECC_TYPES && counter < ECC_COUNTERS && location < ECC_LOCATIONS && count,
            NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(gpu->ecc_mode, NVML_ERROR_NOT_SUPPORTED);
    *count = (unsigned long long)ecc_place(gpu, (int)type, (int)counter)[location];
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, struct sram_status *status)
{
    DEVICE_CALL(nvmlDeviceGetSramEccErrorStatus, device, 0);
    REQUIRE(status, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(status->version == SRAM_STATUS_V1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    REQUIRE(gpu->ecc_mode, NVML_ERROR_NOT_SUPPORTED);
#define COUNT(name) .name = (unsigned long long)gpu->sram_##name
    *status = (struct sram_status){
        .version = SRAM_STATUS_V1, COUNT(aggregate_parity), COUNT(aggregate_secded), COUNT(aggregate_corrected),
        COUNT(volatile_parity), COUNT(volatile_secded), COUNT(volatile_corrected), COUNT(bucket_l2), COUNT(bucket_sm),
        COUNT(bucket_pcie), COUNT(bucket_mcu), COUNT(bucket_other),
        .threshold_exceeded = (unsigned)gpu->sram_threshold_exceeded};
#undef COUNT
    return mock_leave(NVML_SUCCESS);
}

/* Rows, banks, pages */

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(
    nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable, unsigned int *pending,
    unsigned int *failure)
{
    DEVICE_CALL(nvmlDeviceGetRemappedRows, device, 0);
    REQUIRE(correctable && uncorrectable && pending && failure, NVML_ERROR_INVALID_ARGUMENT);
    *correctable = (unsigned)gpu->remapped_correctable;
    *uncorrectable = (unsigned)gpu->remapped_uncorrectable;
    *pending = (unsigned)gpu->remapped_pending;
    *failure = (unsigned)gpu->remapped_failure;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows_v2(nvmlDevice_t device, struct remapped_rows_v2 *rows)
{
    DEVICE_CALL(nvmlDeviceGetRemappedRows_v2, device, 0);
    REQUIRE(rows, NVML_ERROR_INVALID_ARGUMENT);
    *rows = (struct remapped_rows_v2){
        (unsigned)gpu->remapped_correctable, (unsigned)gpu->remapped_correctable_inactive,
        (unsigned)gpu->remapped_uncorrectable, (unsigned)gpu->remapped_uncorrectable_inactive,
        (unsigned)gpu->remapped_pending, (unsigned)gpu->remapped_failure};
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, struct row_histogram *histogram)
{
    DEVICE_CALL(nvmlDeviceGetRowRemapperHistogram, device, 0);
    REQUIRE(histogram, NVML_ERROR_INVALID_ARGUMENT);
    const int64_t *counts = gpu->row_histogram;
    *histogram = (struct row_histogram){
        (unsigned)counts[0], (unsigned)counts[1], (unsigned)counts[2], (unsigned)counts[3], (unsigned)counts[4]};
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetBankRemapperStatus_v1(nvmlDevice_t device, struct bank_status *status)
{
    DEVICE_CALL(nvmlDeviceGetBankRemapperStatus_v1, device, 0);
    REQUIRE(status, NVML_ERROR_INVALID_ARGUMENT);
    *status = (struct bank_status){(unsigned)gpu->banks_active, (unsigned)gpu->banks_inactive,
                                   (unsigned)gpu->banks_pending, (unsigned)gpu->banks_full, (unsigned)gpu->banks_none};
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, struct repair_status *status)
{
    DEVICE_CALL(nvmlDeviceGetRepairStatus, device, 0);
    REQUIRE(status, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(status->version == REPAIR_STATUS_V1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    status->channel_pending = (unsigned)gpu->channel_repair_pending;
    status->tpc_pending = (unsigned)gpu->tpc_repair_pending;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t device, struct memory_flag *flag)
{
    DEVICE_CALL(nvmlDeviceGetUnrepairableMemoryFlag_v1, device, 0);
    REQUIRE(flag, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(flag->version == MEMORY_FLAG_V1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    flag->unrepairable = (unsigned)gpu->unrepairable_memory;
    return mock_leave(NVML_SUCCESS);
}

static nvmlReturn_t give_pages(
    const struct gpu *gpu, unsigned int cause, unsigned int *count, unsigned long long *addresses,
    unsigned long long *times)
{
    REQUIRE(count && cause < 2, NVML_ERROR_INVALID_ARGUMENT);
    const unsigned int room = *count;
    *count = (unsigned)gpu->retired_count[cause];
    REQUIRE(*count <= room, NVML_ERROR_INSUFFICIENT_SIZE);
    REQUIRE(addresses || !*count, NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned int i = 0; i < *count; i++) {
        addresses[i] = (unsigned long long)gpu->retired_address[cause * MAX_PAGES + i];
        if (times)
            times[i] = 0;
    }
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(
    nvmlDevice_t device, unsigned int cause, unsigned int *count, unsigned long long *addresses)
{
    DEVICE_CALL(nvmlDeviceGetRetiredPages, device, 0);
    return give_pages(gpu, cause, count, addresses, NULL);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages_v2(
    nvmlDevice_t device, unsigned int cause, unsigned int *count, unsigned long long *addresses,
    unsigned long long *times)
{
    DEVICE_CALL(nvmlDeviceGetRetiredPages_v2, device, 0);
    return give_pages(gpu, cause, count, addresses, times);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, unsigned int *pending)
{
    DEVICE_CALL(nvmlDeviceGetRetiredPagesPendingStatus, device, 0);
    return give(pending, gpu->retired_pending);
}

EXPORT nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned int *count)
{
    DEVICE_CALL(nvmlDeviceGetPcieReplayCounter, device, 0);
    return give(count, gpu->pcie_replay);
}

/* NVLink */

int64_t link_total(const struct gpu *gpu, int counter)
{
    int64_t total = 0;
    for (int64_t link = 0; link < gpu->nvlink_count; link++)
        total += gpu->nvlink_errors[link * LINK_ERRORS + counter];
    return total;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active)
{
    DEVICE_CALL(nvmlDeviceGetNvLinkState, device, 0);
    REQUIRE(link < gpu->nvlink_count, NVML_ERROR_INVALID_ARGUMENT);
    return give(active, gpu->nvlink_state[link]);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version)
{
    DEVICE_CALL(nvmlDeviceGetNvLinkVersion, device, 0);
    REQUIRE(link < gpu->nvlink_count, NVML_ERROR_INVALID_ARGUMENT);
    return give(version, gpu->nvlink_version);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(
    nvmlDevice_t device, unsigned int link, unsigned int capability, unsigned int *result)
{
    DEVICE_CALL(nvmlDeviceGetNvLinkCapability, device, 0);
    REQUIRE(link < gpu->nvlink_count && capability < 6, NVML_ERROR_INVALID_ARGUMENT);
    return give(result, capability != 4); /* all but the SLI bridge */
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, unsigned int *type)
{
    DEVICE_CALL(nvmlDeviceGetNvLinkRemoteDeviceType, device, 0);
    REQUIRE(link < gpu->nvlink_count, NVML_ERROR_INVALID_ARGUMENT);
    return give(type, gpu->nvlink_remote_type[link]);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(
    nvmlDevice_t device, unsigned int link, unsigned int counter, unsigned long long *count)
{
    DEVICE_CALL(nvmlDeviceGetNvLinkErrorCounter, device, 0);
    REQUIRE(link < gpu->nvlink_count && counter < LINK_ERRORS && count, NVML_ERROR_INVALID_ARGUMENT);
    *count = (unsigned long long)gpu->nvlink_errors[link * LINK_ERRORS + counter];
    return mock_leave(NVML_SUCCESS);
}

/* Fabric */

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, struct fabric_v1 *info)
{
    DEVICE_CALL(nvmlDeviceGetGpuFabricInfo, device, 0);
    REQUIRE(info, NVML_ERROR_INVALID_ARGUMENT);
    for (int i = 0; i < 16; i++)
        info->cluster[i] = (unsigned char)gpu->fabric_cluster[i];
    info->status = (nvmlReturn_t)gpu->fabric_status;
    info->clique = (uint32_t)gpu->fabric_clique;
    info->state = (unsigned)gpu->fabric_state;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, struct fabric_v3 *info)
{
    DEVICE_CALL(nvmlDeviceGetGpuFabricInfoV, device, 0);
    REQUIRE(info, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(info->version == FABRIC_V2 || info->version == FABRIC_V3, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    for (int i = 0; i < 16; i++)
        info->cluster[i] = (unsigned char)gpu->fabric_cluster[i];
    info->status = (nvmlReturn_t)gpu->fabric_status;
    info->clique = (uint32_t)gpu->fabric_clique;
    info->state = (unsigned)gpu->fabric_state;
    info->health_mask = (uint32_t)gpu->fabric_health_mask;
    if (info->version == FABRIC_V3)
        info->health_summary = (uint8_t)gpu->fabric_health_summary;
    return mock_leave(NVML_SUCCESS);
}
