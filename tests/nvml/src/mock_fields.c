/* nvmlDeviceGetFieldValues: fields follow from the values of a GPU unless a test has set them. */
#define _GNU_SOURCE
#include "mock.h"

#include <time.h>

struct field_value {
    uint32_t id, scope;
    int64_t timestamp, latency;
    uint32_t type;
    nvmlReturn_t code;
    nvmlValue_t value;
};
_Static_assert(sizeof(struct field_value) == 40, "nvmlFieldValue_t");

enum {
    FIELD_RESET_STATUS = 226,
    FIELD_DRAIN_STATUS = 227,
    FIELD_RECOVERY_ACTION = 230,
};

/* Fields that are one value of the GPU. */
#define DIRECT(id, type, name) [id] = {type, offsetof(struct gpu, name)}
static const struct {
    uint32_t type; /* 0, as in all places left out: no such field (no direct one is a double) */
    size_t offset;
} direct[FIELD_COUNT] = {
    DIRECT(1, TYPE_UINT, ecc_mode), DIRECT(2, TYPE_UINT, ecc_pending),
    DIRECT(29, TYPE_ULLONG, retired_count[0]), DIRECT(30, TYPE_ULLONG, retired_count[1]),
    DIRECT(31, TYPE_UINT, retired_pending), DIRECT(92, TYPE_UINT, retired_pending),
    DIRECT(93, TYPE_UINT, retired_pending),
    DIRECT(74, TYPE_ULLONG, violation_time[0]), DIRECT(75, TYPE_ULLONG, violation_time[1]),
    DIRECT(76, TYPE_ULLONG, violation_time[2]), DIRECT(77, TYPE_ULLONG, violation_time[3]),
    DIRECT(78, TYPE_ULLONG, violation_time[4]), DIRECT(79, TYPE_ULLONG, violation_time[5]),
    DIRECT(80, TYPE_ULLONG, violation_time[10]), DIRECT(81, TYPE_ULLONG, violation_time[11]),
    DIRECT(82, TYPE_UINT, memory_temperature),
    DIRECT(83, TYPE_ULLONG, total_energy), DIRECT(191, TYPE_ULLONG, total_energy),
    DIRECT(90, TYPE_UINT, nvlink_speed), DIRECT(91, TYPE_UINT, nvlink_count), DIRECT(147, TYPE_UINT, nvlink_count),
    DIRECT(164, TYPE_UINT, nvlink_speed), DIRECT(166, TYPE_UINT, nvlink_version),
    DIRECT(94, TYPE_UINT, pcie_replay),
    DIRECT(142, TYPE_UINT, remapped_correctable), DIRECT(143, TYPE_UINT, remapped_uncorrectable),
    DIRECT(144, TYPE_UINT, remapped_pending), DIRECT(145, TYPE_UINT, remapped_failure),
    DIRECT(186, TYPE_UINT, power_usage), DIRECT(187, TYPE_UINT, power_min_limit),
    DIRECT(188, TYPE_UINT, power_max_limit), DIRECT(189, TYPE_UINT, power_default_limit),
    DIRECT(192, TYPE_UINT, power_limit),
    DIRECT(193, TYPE_SINT, shutdown_tlimit), DIRECT(194, TYPE_SINT, slowdown_tlimit),
    DIRECT(195, TYPE_SINT, memory_max_tlimit), DIRECT(196, TYPE_SINT, gpu_max_tlimit),
    DIRECT(FIELD_RECOVERY_ACTION, TYPE_UINT, recovery_action),
    DIRECT(269, TYPE_ULLONG, sw_thermal_time), DIRECT(270, TYPE_ULLONG, hw_thermal_time),
    DIRECT(271, TYPE_ULLONG, power_brake_time),
    DIRECT(301, TYPE_UINT, remapped_correctable_inactive), DIRECT(302, TYPE_UINT, remapped_uncorrectable_inactive),
    DIRECT(303, TYPE_UINT, banks_active), DIRECT(304, TYPE_UINT, banks_inactive), DIRECT(305, TYPE_UINT, banks_full),
    DIRECT(306, TYPE_UINT, banks_none), DIRECT(307, TYPE_UINT, banks_pending),
};

/* Counters that stay at zero unless a test sets them: bandwidth and throughput, PCIe, C2C, FEC, PLR. */
static const struct {
    uint32_t first, last, type;
} zeros[] = {
    {95, 95, TYPE_UINT}, {138, 141, TYPE_ULLONG}, {169, 169, TYPE_UINT}, {170, 172, TYPE_UINT}, {173, 183, TYPE_UINT},
    {197, 198, TYPE_ULLONG}, {231, 233, TYPE_UINT}, {235, 250, TYPE_ULLONG}, {289, 290, TYPE_ULLONG},
    {294, 295, TYPE_ULLONG},
};

/* NVLink counters of the legacy kind: links 0 to 5 and the total from `low` on, links 6 to 11 from `high` on. */
static const struct {
    uint32_t low, high;
    int counter;
} legacy_links[] = {{32, 96, 2}, {39, 102, 3}, {46, 108, 0}, {53, 114, 1}};

struct field field_make(uint32_t id, int64_t scope, uint32_t type, nvmlReturn_t code, int64_t whole, double real)
{
    struct field field = {.id = id, .scope = scope, .type = type, .code = code};
    switch (type) {
    case TYPE_DOUBLE: field.value.dVal = real; break;
    case TYPE_UINT: field.value.uiVal = (unsigned)whole; break;
    case TYPE_ULONG: field.value.ulVal = (unsigned long)whole; break;
    case TYPE_ULLONG: field.value.ullVal = (unsigned long long)whole; break;
    case TYPE_SLLONG: field.value.sllVal = whole; break;
    case TYPE_SINT: field.value.siVal = (int)whole; break;
    case TYPE_USHORT: field.value.usVal = (unsigned short)whole; break;
    }
    return field;
}

static struct field give(uint32_t type, int64_t value) { return field_make(0, ANY, type, NVML_SUCCESS, value, 0); }

static struct field refuse(nvmlReturn_t code) { return (struct field){.type = TYPE_COUNT, .code = code}; }

/* The sum over links, or that of one link; columns of an array with `width` of them. */
static struct field of_link(
    const struct gpu *gpu, const int64_t *counts, int width, int column, uint32_t link, uint32_t type)
{
    if (link < gpu->nvlink_count)
        return give(type, counts[link * (uint32_t)width + (uint32_t)column]);
    if (link != ALL_LINKS)
        return refuse(NVML_ERROR_INVALID_ARGUMENT);
    int64_t total = 0;
    for (int64_t i = 0; i < gpu->nvlink_count; i++)
        total += counts[i * width + column];
    return give(type, total);
}

static struct field ecc_field(const struct gpu *gpu, uint32_t id)
{
    if (!gpu->ecc_mode)
        return refuse(NVML_ERROR_NOT_SUPPORTED);
    if (id <= 6) /* totals: corrected and uncorrected, volatile and then aggregate */
        return give(TYPE_ULLONG, ecc_total(gpu, (id - 3) % 2, (int)(id - 3) / 2));
    const uint32_t aggregate = id >= 18, place = id - (aggregate ? 18 : 7); /* 10: the CBU, uncorrected only */
    static const int locations[] = {0, 1, 2, 3, 4, 6};
    const uint32_t type = place == 10 ? 1 : place % 2;
    return give(TYPE_ULLONG,
                gpu->ecc_errors[(type * ECC_COUNTERS + aggregate) * ECC_LOCATIONS + (uint32_t)locations[place / 2]]);
}

struct field field_default(const struct gpu *gpu, uint32_t id, uint32_t scope)
{
    if (!id || id >= FIELD_COUNT)
        return refuse(NVML_ERROR_INVALID_ARGUMENT);
    if (direct[id].type)
        return give(direct[id].type, *(const int64_t *)((const char *)gpu + direct[id].offset));
    if (id >= 3 && id <= 28)
        return ecc_field(gpu, id);
    for (size_t i = 0; i < sizeof zeros / sizeof *zeros; i++)
        if (id >= zeros[i].first && id <= zeros[i].last)
            return give(zeros[i].type, 0);
    for (size_t i = 0; i < sizeof legacy_links / sizeof *legacy_links; i++) {
        const uint32_t low = legacy_links[i].low, high = legacy_links[i].high;
        const int counter = legacy_links[i].counter;
        if (id == low + 6)
            return give(TYPE_ULLONG, link_total(gpu, counter));
        if (id >= low && id < low + 6)
            return of_link(gpu, gpu->nvlink_errors, LINK_ERRORS, counter, id - low, TYPE_ULLONG);
        if (id >= high && id < high + 6)
            return of_link(gpu, gpu->nvlink_errors, LINK_ERRORS, counter, id - high + 6, TYPE_ULLONG);
    }
    if (id >= 148 && id <= 159)
        return of_link(gpu, gpu->nvlink_errors, LINK_ERRORS, 4, id - 148, TYPE_ULLONG);
    if (id == 160)
        return give(TYPE_ULLONG, link_total(gpu, 4));
    if (id >= 161 && id <= 163) /* replay, recovery, CRC (of flits), of the link in the scope */
        return of_link(gpu, gpu->nvlink_errors, LINK_ERRORS, (int)id - 161, scope, TYPE_ULLONG);
    if (id == 165)
        return of_link(gpu, gpu->nvlink_state, 1, 0, scope, TYPE_UINT);
    if (id >= 201 && id < 201 + LINK_COUNTERS) /* NVLink 5 */
        return of_link(gpu, gpu->nvlink_counters, LINK_COUNTERS, (int)id - 201, scope, TYPE_ULLONG);
    if ((id >= 84 && id <= 89) || (id >= 132 && id <= 137))
        return give(TYPE_UINT, gpu->nvlink_speed);
    if (id == 185)
        return give(TYPE_UINT, gpu->power_average != COMPUTED ? gpu->power_average : gpu->power_usage);
    if (id == 190)
        return give(TYPE_UINT, enforced_power_limit(gpu));
    if (id == FIELD_RESET_STATUS)
        return give(TYPE_UINT, gpu->recovery_action == 1);
    if (id == FIELD_DRAIN_STATUS)
        return give(TYPE_UINT, gpu->recovery_action == 4);
    return refuse(NVML_ERROR_NOT_SUPPORTED);
}

/* What a test has set for this scope goes before what it has set for all. */
static struct field find(const struct gpu *gpu, uint32_t id, uint32_t scope)
{
    const struct field *set = NULL;
    for (uint32_t i = 0; i < gpu->field_count; i++) {
        const struct field *field = &gpu->fields[i];
        if (field->id == id && field->type != TYPE_COUNT && (field->scope == scope || (field->scope == ANY && !set)))
            set = field;
    }
    return set ? *set : field_default(gpu, id, scope);
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, struct field_value *values)
{
    DEVICE_CALL(nvmlDeviceGetFieldValues, device, SURVIVES_RESET_REQUIRED);
    REQUIRE(values && count >= 0, NVML_ERROR_INVALID_ARGUMENT);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        struct field_value *value = &values[i];
        struct field field = find(gpu, value->id, value->scope);
        const bool tells_of_reset = value->id == FIELD_RECOVERY_ACTION || value->id == FIELD_RESET_STATUS ||
                                    value->id == FIELD_DRAIN_STATUS;
        if (gpu->reset_required && !tells_of_reset)
            field = refuse(NVML_ERROR_RESET_REQUIRED);
        value->timestamp = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        value->latency = 0;
        value->code = field.code;
        value->type = field.type == TYPE_COUNT ? 0 : field.type;
        value->value = field.value;
    }
    return mock_leave(NVML_SUCCESS);
}
