/* Temperatures, power, clocks, workload power profiles. */
#include "mock.h"

struct temperature {
    unsigned int version, sensor;
    int temperature;
};
struct margin_temperature {
    unsigned int version;
    int margin;
};
struct power_value {
    unsigned int version, scope, milliwatts;
};
struct utilization {
    unsigned int gpu, memory;
};
struct violation_time {
    unsigned long long reference, violation;
};
struct mask {
    unsigned int words[MASK_WORDS];
};
struct profile {
    unsigned int version, id, priority;
    struct mask conflicts;
};
struct profiles {
    unsigned int version;
    struct mask supported;
    struct profile profiles[PROFILE_COUNT];
};
struct current_profiles {
    unsigned int version;
    struct mask supported, requested, enforced;
};
struct requested_profiles {
    unsigned int version;
    struct mask mask;
};
struct update_profiles {
    unsigned int operation;
    struct mask mask;
};
_Static_assert(sizeof(struct profile) == 0x2c, "nvmlWorkloadPowerProfileInfo_v1_t");
_Static_assert(sizeof(struct profiles) == 0x2bf8, "nvmlWorkloadPowerProfileProfilesInfo_v1_t");
_Static_assert(sizeof(struct current_profiles) == 0x64, "nvmlWorkloadPowerProfileCurrentProfiles_v1_t");
_Static_assert(sizeof(struct requested_profiles) == 0x24, "nvmlWorkloadPowerProfileRequestedProfiles_v1_t");

_Static_assert(sizeof(struct update_profiles) == 0x24, "nvmlWorkloadPowerProfileUpdateProfiles_v1_t");

enum { PROFILES_CLEAR, PROFILES_SET, PROFILES_SET_AND_OVERWRITE, PROFILES_OPERATIONS };

#define TEMPERATURE_V1 0x100000Cu
#define MARGIN_TEMPERATURE_V1 0x1000008u
#define POWER_VALUE_V2 0x0200000Cu
#define PROFILE_V1 0x100002Cu
#define PROFILES_V1 0x1002BF8u
#define CURRENT_PROFILES_V1 0x1000064u
#define REQUESTED_PROFILES_V1 0x1000024u

#define CLOCK_STEP 15 /* MHz between supported graphics clocks */
#define CLOCK_LIMIT_TDP 0xFFFFFF01u
#define CLOCK_LIMIT_UNLIMITED 0xFFFFFF02u

static nvmlReturn_t give(unsigned int *place, int64_t value)
{
    REQUIRE(place, NVML_ERROR_INVALID_ARGUMENT);
    *place = (unsigned int)value;
    return mock_leave(NVML_SUCCESS);
}

static nvmlReturn_t give_long(unsigned long long *place, int64_t value)
{
    REQUIRE(place, NVML_ERROR_INVALID_ARGUMENT);
    *place = (unsigned long long)value;
    return mock_leave(NVML_SUCCESS);
}

/* Temperatures */

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *temperature)
{
    DEVICE_CALL(nvmlDeviceGetTemperature, device, 0);
    REQUIRE(sensor == 0, NVML_ERROR_INVALID_ARGUMENT);
    return give(temperature, gpu->temperature);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, struct temperature *temperature)
{
    DEVICE_CALL(nvmlDeviceGetTemperatureV, device, 0);
    REQUIRE(temperature, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(temperature->version == TEMPERATURE_V1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    REQUIRE(temperature->sensor == 0, NVML_ERROR_INVALID_ARGUMENT);
    temperature->temperature = (int)gpu->temperature;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, struct margin_temperature *margin)
{
    DEVICE_CALL(nvmlDeviceGetMarginTemperature, device, 0);
    REQUIRE(margin, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(margin->version == MARGIN_TEMPERATURE_V1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    margin->margin = (int)(gpu->margin_temperature != COMPUTED
                               ? gpu->margin_temperature
                               : gpu->temperature_threshold[THRESHOLD_GPU_MAX] - gpu->temperature);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(
    nvmlDevice_t device, unsigned int threshold, unsigned int *temperature)
{
    DEVICE_CALL(nvmlDeviceGetTemperatureThreshold, device, 0);
    REQUIRE(threshold < THRESHOLD_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(gpu->temperature_threshold[threshold], NVML_ERROR_NOT_SUPPORTED);
    return give(temperature, gpu->temperature_threshold[threshold]);
}

/* Power */

int64_t enforced_power_limit(const struct gpu *gpu)
{
    const int64_t external = gpu->external_power_limit;
    return external && external < gpu->power_limit ? external : gpu->power_limit;
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    DEVICE_CALL(nvmlDeviceGetPowerUsage, device, 0);
    return give(milliwatts, gpu->power_usage);
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules)
{
    DEVICE_CALL(nvmlDeviceGetTotalEnergyConsumption, device, 0);
    return give_long(millijoules, gpu->total_energy);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *limit)
{
    DEVICE_CALL(nvmlDeviceGetPowerManagementLimit, device, 0);
    return give(limit, gpu->power_limit);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned int *limit)
{
    DEVICE_CALL(nvmlDeviceGetPowerManagementDefaultLimit, device, 0);
    return give(limit, gpu->power_default_limit);
}

EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *limit)
{
    DEVICE_CALL(nvmlDeviceGetEnforcedPowerLimit, device, 0);
    return give(limit, enforced_power_limit(gpu));
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(
    nvmlDevice_t device, unsigned int *lowest, unsigned int *highest)
{
    DEVICE_CALL(nvmlDeviceGetPowerManagementLimitConstraints, device, 0);
    REQUIRE(lowest && highest, NVML_ERROR_INVALID_ARGUMENT);
    *lowest = (unsigned)gpu->power_min_limit;
    *highest = (unsigned)gpu->power_max_limit;
    return mock_leave(NVML_SUCCESS);
}

static nvmlReturn_t set_power_limit(enum call call, struct gpu *gpu, unsigned int limit)
{
    REQUIRE(limit >= gpu->power_min_limit && limit <= gpu->power_max_limit, NVML_ERROR_INVALID_ARGUMENT);
    gpu->power_limit = limit;
    mock_record(call, gpu, limit, 0);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned int limit)
{
    DEVICE_CALL(nvmlDeviceSetPowerManagementLimit, device, NEEDS_ROOT);
    return set_power_limit(CALL_nvmlDeviceSetPowerManagementLimit, gpu, limit);
}

EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, const struct power_value *value)
{
    DEVICE_CALL(nvmlDeviceSetPowerManagementLimit_v2, device, NEEDS_ROOT);
    REQUIRE(value, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(value->version == POWER_VALUE_V2, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    REQUIRE(value->scope == 0, NVML_ERROR_NOT_SUPPORTED);
    return set_power_limit(CALL_nvmlDeviceSetPowerManagementLimit_v2, gpu, value->milliwatts);
}

/* Clocks */

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *clock)
{
    DEVICE_CALL(nvmlDeviceGetClockInfo, device, 0);
    const int64_t clocks[] = {gpu->clock_graphics, gpu->clock_sm, gpu->clock_memory, gpu->clock_video};
    REQUIRE(type < 4, NVML_ERROR_INVALID_ARGUMENT);
    return give(clock, clocks[type]);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *clock)
{
    DEVICE_CALL(nvmlDeviceGetMaxClockInfo, device, 0);
    const int64_t clocks[] = {
        gpu->max_clock_graphics, gpu->max_clock_sm, gpu->max_clock_memory, gpu->max_clock_video};
    REQUIRE(type < 4, NVML_ERROR_INVALID_ARGUMENT);
    return give(clock, clocks[type]);
}

static int64_t named_clock(unsigned int clock, int64_t highest)
{
    return clock == CLOCK_LIMIT_TDP || clock == CLOCK_LIMIT_UNLIMITED ? highest : clock;
}

EXPORT nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned int lowest, unsigned int highest)
{
    DEVICE_CALL(nvmlDeviceSetGpuLockedClocks, device, NEEDS_ROOT);
    const int64_t from = named_clock(lowest, gpu->max_clock_graphics), to = named_clock(highest, gpu->max_clock_graphics);
    REQUIRE(from <= to && to >= gpu->min_clock_graphics && to <= gpu->max_clock_graphics, NVML_ERROR_INVALID_ARGUMENT);
    gpu->locked_clock_min = from;
    gpu->locked_clock_max = to;
    mock_record(CALL_nvmlDeviceSetGpuLockedClocks, gpu, lowest, highest);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device)
{
    DEVICE_CALL(nvmlDeviceResetGpuLockedClocks, device, NEEDS_ROOT);
    gpu->locked_clock_min = gpu->locked_clock_max = 0;
    mock_record(CALL_nvmlDeviceResetGpuLockedClocks, gpu, 0, 0);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceSetMemoryLockedClocks(nvmlDevice_t device, unsigned int lowest, unsigned int highest)
{
    DEVICE_CALL(nvmlDeviceSetMemoryLockedClocks, device, NEEDS_ROOT);
    REQUIRE(lowest <= highest && highest <= gpu->max_clock_memory, NVML_ERROR_INVALID_ARGUMENT);
    gpu->locked_memory_min = lowest;
    gpu->locked_memory_max = highest;
    mock_record(CALL_nvmlDeviceSetMemoryLockedClocks, gpu, lowest, highest);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceResetMemoryLockedClocks(nvmlDevice_t device)
{
    DEVICE_CALL(nvmlDeviceResetMemoryLockedClocks, device, NEEDS_ROOT);
    gpu->locked_memory_min = gpu->locked_memory_max = 0;
    mock_record(CALL_nvmlDeviceResetMemoryLockedClocks, gpu, 0, 0);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned int *count, unsigned int *clocks)
{
    DEVICE_CALL(nvmlDeviceGetSupportedMemoryClocks, device, 0);
    REQUIRE(count, NVML_ERROR_INVALID_ARGUMENT);
    const unsigned int room = *count;
    *count = 0;
    while (*count < 4 && gpu->memory_clocks[*count])
        ++*count;
    REQUIRE(*count <= room && clocks, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned int i = 0; i < *count; i++)
        clocks[i] = (unsigned)gpu->memory_clocks[i];
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(
    nvmlDevice_t device, unsigned int memory_clock, unsigned int *count, unsigned int *clocks)
{
    DEVICE_CALL(nvmlDeviceGetSupportedGraphicsClocks, device, 0);
    REQUIRE(count, NVML_ERROR_INVALID_ARGUMENT);
    bool known = false;
    for (int i = 0; i < 4; i++)
        known |= memory_clock && gpu->memory_clocks[i] == memory_clock;
    REQUIRE(known, NVML_ERROR_NOT_FOUND);
    const unsigned int room = *count;
    *count = (unsigned)((gpu->max_clock_graphics - gpu->min_clock_graphics) / CLOCK_STEP + 1);
    REQUIRE(*count <= room && clocks, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned int i = 0; i < *count; i++)
        clocks[i] = (unsigned)gpu->max_clock_graphics - CLOCK_STEP * i;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    DEVICE_CALL(nvmlDeviceGetCurrentClocksEventReasons, device, 0);
    return give_long(reasons, gpu->clock_reasons);
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    DEVICE_CALL(nvmlDeviceGetSupportedClocksEventReasons, device, 0);
    return give_long(reasons, gpu->supported_clock_reasons);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    DEVICE_CALL(nvmlDeviceGetCurrentClocksThrottleReasons, device, 0);
    return give_long(reasons, gpu->clock_reasons);
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    DEVICE_CALL(nvmlDeviceGetSupportedClocksThrottleReasons, device, 0);
    return give_long(reasons, gpu->supported_clock_reasons);
}

EXPORT nvmlReturn_t nvmlDeviceGetViolationStatus(
    nvmlDevice_t device, unsigned int policy, struct violation_time *time)
{
    DEVICE_CALL(nvmlDeviceGetViolationStatus, device, 0);
    REQUIRE(time && policy < POLICY_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    time->reference = (unsigned long long)(1e6 * mock_monotonic());
    time->violation = (unsigned long long)gpu->violation_time[policy];
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, unsigned int *state)
{
    DEVICE_CALL(nvmlDeviceGetPerformanceState, device, 0);
    return give(state, gpu->performance_state);
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *utilization)
{
    DEVICE_CALL(nvmlDeviceGetUtilizationRates, device, 0);
    REQUIRE(utilization, NVML_ERROR_INVALID_ARGUMENT);
    *utilization = (struct utilization){(unsigned)gpu->utilization_gpu, (unsigned)gpu->utilization_memory};
    return mock_leave(NVML_SUCCESS);
}

/* Workload power profiles: bit p % 32 of word p / 32 is profile p; a smaller priority number goes first. */

static bool has(const int64_t *words, int profile) { return words[profile / 32] >> (profile % 32) & 1; }

static struct mask to_mask(const int64_t *words)
{
    struct mask mask;
    for (int i = 0; i < MASK_WORDS; i++)
        mask.words[i] = (unsigned)words[i];
    return mask;
}

/* A requested profile is enforced unless it conflicts with a requested one that goes first. */
static struct mask enforced_profiles(const struct gpu *gpu)
{
    struct mask mask = {{0}};
    for (int profile = 0; profile < PROFILE_COUNT; profile++) {
        bool enforced = has(gpu->profiles_requested, profile);
        for (int other = 0; other < PROFILE_COUNT && enforced; other++)
            enforced = !(has(gpu->profiles_requested, other) &&
                         has(&gpu->profile_conflicts[profile * MASK_WORDS], other) &&
                         gpu->profile_priority[other] < gpu->profile_priority[profile]);
        mask.words[profile / 32] |= (unsigned)enforced << (profile % 32);
    }
    return mask;
}

EXPORT nvmlReturn_t nvmlDeviceWorkloadPowerProfileGetProfilesInfo(nvmlDevice_t device, struct profiles *info)
{
    DEVICE_CALL(nvmlDeviceWorkloadPowerProfileGetProfilesInfo, device, 0);
    REQUIRE(info, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(info->version == PROFILES_V1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    info->supported = to_mask(gpu->profiles_supported);
    for (int profile = 0; profile < PROFILE_COUNT; profile++)
        info->profiles[profile] = (struct profile){
            PROFILE_V1, (unsigned)profile, (unsigned)gpu->profile_priority[profile],
            to_mask(&gpu->profile_conflicts[profile * MASK_WORDS])};
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(
    nvmlDevice_t device, struct current_profiles *current)
{
    DEVICE_CALL(nvmlDeviceWorkloadPowerProfileGetCurrentProfiles, device, 0);
    REQUIRE(current, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(current->version == CURRENT_PROFILES_V1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    current->supported = to_mask(gpu->profiles_supported);
    current->requested = to_mask(gpu->profiles_requested);
    current->enforced = enforced_profiles(gpu);
    return mock_leave(NVML_SUCCESS);
}

static nvmlReturn_t change_profiles(enum call call, struct gpu *gpu, const struct mask *mask, unsigned int operation)
{
    for (int i = 0; i < MASK_WORDS; i++)
        REQUIRE(!(mask->words[i] & ~(unsigned)gpu->profiles_supported[i]), NVML_ERROR_INVALID_ARGUMENT);
    for (int i = 0; i < MASK_WORDS; i++) {
        const int64_t word = mask->words[i], kept = operation == PROFILES_SET_AND_OVERWRITE ? 0 : gpu->profiles_requested[i];
        gpu->profiles_requested[i] = operation == PROFILES_CLEAR ? kept & ~word : kept | word;
    }
    mock_record(call, gpu, mask->words[0], mask->words[1]);
    return mock_leave(NVML_SUCCESS);
}

static nvmlReturn_t change_requested_profiles(
    enum call call, struct gpu *gpu, const struct requested_profiles *requested, unsigned int operation)
{
    REQUIRE(requested, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(requested->version == REQUESTED_PROFILES_V1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    return change_profiles(call, gpu, &requested->mask, operation);
}

EXPORT nvmlReturn_t nvmlDeviceWorkloadPowerProfileSetRequestedProfiles(
    nvmlDevice_t device, const struct requested_profiles *requested)
{
    DEVICE_CALL(nvmlDeviceWorkloadPowerProfileSetRequestedProfiles, device, NEEDS_ROOT);
    return change_requested_profiles(
        CALL_nvmlDeviceWorkloadPowerProfileSetRequestedProfiles, gpu, requested, PROFILES_SET);
}

EXPORT nvmlReturn_t nvmlDeviceWorkloadPowerProfileClearRequestedProfiles(
    nvmlDevice_t device, const struct requested_profiles *requested)
{
    DEVICE_CALL(nvmlDeviceWorkloadPowerProfileClearRequestedProfiles, device, NEEDS_ROOT);
    return change_requested_profiles(
        CALL_nvmlDeviceWorkloadPowerProfileClearRequestedProfiles, gpu, requested, PROFILES_CLEAR);
}

EXPORT nvmlReturn_t nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1(
    nvmlDevice_t device, const struct update_profiles *update)
{
    DEVICE_CALL(nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1, device, NEEDS_ROOT);
    REQUIRE(update && update->operation < PROFILES_OPERATIONS, NVML_ERROR_INVALID_ARGUMENT);
    return change_profiles(
        CALL_nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1, gpu, &update->mask, update->operation);
}
