/* Event sets. A set belongs to its process; what happens lies in the shared state and is read by each set for itself. */
#include "mock.h"

enum { MAX_SETS = 64, EVENT_TYPES = 16 };

struct nvmlEventSet_st {
    bool used;
    uint64_t serial; /* tells a set from a later one in the same place */
    uint64_t next;   /* the first event that was not looked at */
    uint64_t types[MAX_GPUS];
    uint64_t since[MAX_GPUS][EVENT_TYPES]; /* events before this one have happened before the registration */
};
typedef struct nvmlEventSet_st *nvmlEventSet_t;

struct event_data {
    nvmlDevice_t device;
    unsigned long long type;
    unsigned long long data;
    unsigned int gpu_instance, compute_instance;
};
_Static_assert(sizeof(struct event_data) == 32, "nvmlEventData_t");

static struct nvmlEventSet_st sets[MAX_SETS]; /* guarded by the lock of the state */
static uint64_t last_serial;

void events_forget_all(void)
{
    for (int i = 0; i < MAX_SETS; i++)
        sets[i].used = false;
}

static bool is_set(const struct nvmlEventSet_st *set)
{
    const uintptr_t address = (uintptr_t)set, first = (uintptr_t)sets;
    return address >= first && address < first + sizeof sets && (address - first) % sizeof *set == 0 && set->used;
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    SYSTEM_CALL(nvmlEventSetCreate);
    REQUIRE(set, NVML_ERROR_INVALID_ARGUMENT);
    for (int i = 0; i < MAX_SETS; i++)
        if (!sets[i].used) {
            sets[i] = (struct nvmlEventSet_st){.used = true, .serial = ++last_serial, .next = mock->event_count};
            *set = &sets[i];
            return mock_leave(NVML_SUCCESS);
        }
    return mock_leave(NVML_ERROR_INSUFFICIENT_RESOURCES);
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    SYSTEM_CALL(nvmlEventSetFree);
    REQUIRE(is_set(set), NVML_ERROR_INVALID_ARGUMENT);
    set->used = false;
    mock_wake(mock);
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    DEVICE_CALL(nvmlDeviceGetSupportedEventTypes, device, SURVIVES_RESET_REQUIRED | REFUSES_WITH_INVALID_ARGUMENT);
    REQUIRE(types, NVML_ERROR_INVALID_ARGUMENT);
    *types = (unsigned long long)gpu->supported_events;
    return mock_leave(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    DEVICE_CALL(nvmlDeviceRegisterEvents, device, SURVIVES_RESET_REQUIRED | REFUSES_WITH_INVALID_ARGUMENT);
    REQUIRE(is_set(set), NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(!(types & ~(unsigned long long)gpu->supported_events) && !(types >> EVENT_TYPES), NVML_ERROR_NOT_SUPPORTED);
    for (int bit = 0; bit < EVENT_TYPES; bit++)
        if ((types & ~set->types[device->gpu]) >> bit & 1)
            set->since[device->gpu][bit] = mock->event_count;
    set->types[device->gpu] |= types;
    return mock_leave(NVML_SUCCESS);
}

/* The next event that the set is to hear of, or NULL. */
static const struct event *next_event(struct nvmlEventSet_st *set)
{
    if (mock->event_count > MAX_EVENTS && set->next < mock->event_count - MAX_EVENTS)
        set->next = mock->event_count - MAX_EVENTS; /* overwritten since */
    while (set->next < mock->event_count) {
        const uint64_t number = set->next++;
        const struct event *event = &mock->events[number % MAX_EVENTS];
        const uint64_t wanted = set->types[event->gpu] & event->type;
        if (wanted && number >= set->since[event->gpu][__builtin_ctzll(wanted)])
            return event;
    }
    return NULL;
}

static bool has_lost_gpu(const struct nvmlEventSet_st *set)
{
    for (int i = 0; i < MAX_GPUS; i++)
        if (set->types[i] && mock->gpus[i].lost)
            return true;
    return false;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, struct event_data *data, unsigned int milliseconds)
{
    SYSTEM_CALL(nvmlEventSetWait_v2);
    REQUIRE(is_set(set) && data, NVML_ERROR_INVALID_ARGUMENT);
    const uint64_t serial = set->serial;
    const double end = mock_monotonic() + 1e-3 * milliseconds;
    for (;;) {
        const struct event *event = next_event(set);
        if (event) {
            *data = (struct event_data){mock_handle(event->gpu, -1), event->type, event->data, event->gpu_instance,
                                        event->compute_instance};
            return mock_leave(NVML_SUCCESS);
        }
        REQUIRE(!(mock->lost_ends_wait && has_lost_gpu(set)), NVML_ERROR_GPU_IS_LOST);
        const double left = end - mock_monotonic();
        REQUIRE(left > 0, NVML_ERROR_TIMEOUT);
        REQUIRE(mock_wait(left), NVML_ERROR_UNINITIALIZED);
        REQUIRE(set->used && set->serial == serial, NVML_ERROR_INVALID_ARGUMENT);
    }
}
