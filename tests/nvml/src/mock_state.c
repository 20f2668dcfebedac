/* The shared file, its lock, values by name, rules, and the way into and out of every call. */
#define _GNU_SOURCE
#include "mock.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x4C4D564Eu
#define LONGEST_WAIT 3600.0

_Thread_local struct state *mock;

/* What belongs to this process. */
static struct {
    pthread_mutex_t guard;
    unsigned references; /* calls of nvmlInit that were not undone */
    unsigned inside;     /* calls that are in progress: the mapping must stay */
    struct state *_Atomic state;
    bool root_known;
    bool root;
} process = {.guard = PTHREAD_MUTEX_INITIALIZER};

static struct nvmlDevice_st handles[MAX_GPUS][1 + MAX_MIG];

static void before_fork(void) { pthread_mutex_lock(&process.guard); }
static void after_fork(void) { pthread_mutex_unlock(&process.guard); }
static void after_fork_in_child(void)
{
    process.inside = 0;
    pthread_mutex_unlock(&process.guard);
}

__attribute__((constructor)) static void set_up(void)
{
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    for (int gpu = 0; gpu < MAX_GPUS; gpu++)
        for (int mig = 0; mig <= MAX_MIG; mig++)
            handles[gpu][mig] = (struct nvmlDevice_st){gpu, mig - 1};
}

double mock_monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The lock and waiting */

void mock_lock(struct state *state)
{
    if (pthread_mutex_lock(&state->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&state->lock); /* no change spans more than one value, so whatever is there will do */
}

void mock_unlock(struct state *state) { pthread_mutex_unlock(&state->lock); }

void mock_wake(struct state *state)
{
    atomic_fetch_add(&state->changed, 1);
    syscall(SYS_futex, &state->changed, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* The state is locked; it is unlocked meanwhile. */
static void wait_for_change(struct state *state, double seconds)
{
    const uint32_t seen = atomic_load(&state->changed);
    const double bounded = fmin(fmax(seconds, 0.0), LONGEST_WAIT);
    const struct timespec time = {(time_t)bounded, (long)(1e9 * (bounded - floor(bounded)))};
    mock_unlock(state);
    syscall(SYS_futex, &state->changed, FUTEX_WAIT, seen, &time, NULL, 0);
    mock_lock(state);
}

/* Files */

static struct state *map_state(const char *path, bool create)
{
    const int file = open(path, create ? O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC : O_RDWR | O_CLOEXEC, 0600);
    if (file < 0)
        return NULL;
    struct stat status;
    struct state *state = NULL;
    const bool fits = create ? ftruncate(file, sizeof *state) == 0
                             : fstat(file, &status) == 0 && (size_t)status.st_size == sizeof *state;
    if (fits)
        state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return state == MAP_FAILED ? NULL : state;
}

#define FILL_INTEGER(name, initial) target->name = (initial);
#define FILL_ARRAY(name, count, initial)                                                                                \
    for (size_t i = 0; i < (count); i++)                                                                                \
        target->name[i] = (initial);
#define FILL_REAL(name, initial) target->name = (initial);
#define FILL_TEXT(name)
#define FILL_TEXTS(name, count)

static void fill_system(struct state *target)
{
    SYSTEM_VALUES(FILL_INTEGER, FILL_ARRAY, FILL_REAL, FILL_TEXT, FILL_TEXTS)
    snprintf(target->driver_version, TEXT_SIZE, "580.82.07");
    snprintf(target->nvml_version, TEXT_SIZE, "13.580.82.07");
}

static void fill_gpu(struct gpu *target, int number)
{
    GPU_VALUES(FILL_INTEGER, FILL_ARRAY, FILL_REAL, FILL_TEXT, FILL_TEXTS)
    snprintf(target->uuid, TEXT_SIZE, "GPU-00000000-0000-0000-0000-%012x", (unsigned)number);
    snprintf(target->name, TEXT_SIZE, "NVIDIA H100 80GB HBM3");
    snprintf(target->serial, TEXT_SIZE, "%013d", number);
    for (int mig = 0; mig < MAX_MIG; mig++)
        snprintf(target->mig_uuid[mig], TEXT_SIZE, "MIG-00000000-0000-0000-%04x-%012x", (unsigned)number,
                 (unsigned)mig);
    target->minor_number = number;
    target->pci_bus = 0x10 + number;
    target->topology[number] = 0;
    target->temperature_threshold[THRESHOLD_GPU_MAX] = 85;
    target->temperature_threshold[THRESHOLD_SLOWDOWN] = 90;
    target->temperature_threshold[THRESHOLD_SHUTDOWN] = 95;
    target->temperature_threshold[THRESHOLD_MEM_MAX] = 95;
    target->memory_clocks[0] = 2619;
    target->memory_clocks[1] = 1593;
    target->row_histogram[0] = 640;
    for (int profile = 0; profile < 25; profile++) {
        target->profiles_supported[0] |= 1 << profile;
        target->profile_priority[profile] = profile;
    }
}

EXPORT int nvmlMockMaxGpus(void) { return MAX_GPUS; }
EXPORT int nvmlMockGpuCount(const struct state *state) { return state->gpu_count; }

/* 0, or an errno. The file must not exist yet; it is complete once it is there under its name. */
EXPORT int nvmlMockCreate(const char *path, int gpu_count)
{
    char draft[4096];
    if (gpu_count < 0 || gpu_count > MAX_GPUS || snprintf(draft, sizeof draft, "%s.draft", path) >= (int)sizeof draft)
        return EINVAL;
    struct state *state = map_state(draft, true);
    if (!state)
        return errno ? errno : EIO;
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&state->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    fill_system(state);
    state->gpu_count = gpu_count;
    for (int number = 0; number < MAX_GPUS; number++)
        fill_gpu(&state->gpus[number], number);
    state->size = sizeof *state;
    state->magic = MAGIC;
    munmap(state, sizeof *state);
    return rename(draft, path) == 0 ? 0 : errno;
}

/* A mapping for a test to work on, independent of nvmlInit; NULL if there is no such file. */
EXPORT struct state *nvmlMockOpen(const char *path)
{
    struct state *state = map_state(path, false);
    if (state && (state->magic != MAGIC || state->size != sizeof *state)) {
        munmap(state, sizeof *state);
        return NULL;
    }
    return state;
}

EXPORT void nvmlMockClose(struct state *state) { munmap(state, sizeof *state); }

/* Everything as after nvmlMockCreate. Counters of events and rules go on, so that whoever waits notices. */
EXPORT void nvmlMockReset(struct state *state)
{
    mock_lock(state);
    fill_system(state);
    for (int number = 0; number < MAX_GPUS; number++) {
        memset(&state->gpus[number], 0, sizeof state->gpus[number]);
        fill_gpu(&state->gpus[number], number);
    }
    memset(state->rules, 0, sizeof state->rules);
    memset(state->counts, 0, sizeof state->counts);
    state->history_count = 0;
    mock_wake(state);
    mock_unlock(state);
}

/* Into and out of a call */

nvmlReturn_t mock_attach(void)
{
    nvmlReturn_t code = NVML_SUCCESS;
    pthread_mutex_lock(&process.guard);
    if (!process.references) {
        const char *path = getenv("NVML_MOCK_STATE");
        const char *root = getenv("NVML_MOCK_ROOT");
        struct state *state = path ? nvmlMockOpen(path) : NULL;
        if (state) {
            process.state = state;
            process.root_known = root != NULL && *root != '\0';
            process.root = process.root_known && *root != '0';
        } else {
            code = NVML_ERROR_DRIVER_NOT_LOADED;
        }
    }
    if (code == NVML_SUCCESS)
        process.references++;
    pthread_mutex_unlock(&process.guard);
    return code;
}

static void detach(unsigned references)
{
    struct state *state = process.state;
    process.references -= references;
    if (process.references || !state)
        return;
    process.state = NULL; /* before anybody is woken: who waits looks at this */
    mock_lock(state);
    events_forget_all();
    mock_wake(state);
    mock_unlock(state);
    if (!process.inside) /* else somebody is blocked in a call: better a mapping too many than one too few */
        munmap(state, sizeof *state);
}

nvmlReturn_t mock_detach(void)
{
    pthread_mutex_lock(&process.guard);
    const nvmlReturn_t code = process.references ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (process.references)
        detach(1);
    pthread_mutex_unlock(&process.guard);
    return code;
}

/* Undo every nvmlInit of this process, so that the next test starts afresh. */
EXPORT void nvmlMockForget(void)
{
    pthread_mutex_lock(&process.guard);
    detach(process.references);
    pthread_mutex_unlock(&process.guard);
}

/* The worst moment to be killed in: this process dies inside of a call. */
EXPORT void nvmlMockDieInside(void)
{
    if (mock_begin() == NVML_SUCCESS)
        raise(SIGKILL);
}

nvmlReturn_t mock_begin(void)
{
    pthread_mutex_lock(&process.guard);
    struct state *state = process.state;
    if (state)
        process.inside++;
    pthread_mutex_unlock(&process.guard);
    if (!state)
        return NVML_ERROR_UNINITIALIZED;
    mock = state;
    mock_lock(state);
    return NVML_SUCCESS;
}

nvmlReturn_t mock_leave(nvmlReturn_t code)
{
    mock_unlock(mock);
    mock = NULL;
    pthread_mutex_lock(&process.guard);
    if (process.inside)
        process.inside--;
    pthread_mutex_unlock(&process.guard);
    return code;
}

bool mock_wait(double seconds)
{
    wait_for_change(mock, seconds);
    return process.state == mock; /* without the guard: its holder may be waiting for the lock that is held here */
}

static bool is_lost(int gpu) { return gpu != ANY && mock->gpus[gpu].lost; }

nvmlReturn_t mock_admit(enum call call, int gpu, int traits)
{
    mock->counts[call][gpu == ANY ? MAX_GPUS : gpu]++;
    for (int i = 0; i < MAX_RULES; i++) {
        struct rule *rule = &mock->rules[i];
        if (!rule->serial || !rule->times || !(rule->calls[call / 64] >> (call % 64) & 1) ||
            (rule->gpu != ANY && rule->gpu != gpu))
            continue;
        if (rule->skip > 0) {
            rule->skip--;
            continue;
        }
        if (rule->times > 0)
            rule->times--;
        rule->hits++;
        if (!rule->blocks)
            return mock_leave(rule->code);
        const uint64_t serial = rule->serial;
        const double end = rule->seconds < 0 ? INFINITY : mock_monotonic() + rule->seconds;
        while (rule->serial == serial && mock_monotonic() < end)
            if (!mock_wait(end - mock_monotonic()))
                return mock_leave(NVML_ERROR_UNINITIALIZED);
    }
    if (is_lost(gpu))
        return mock_leave(NVML_ERROR_GPU_IS_LOST);
    if (gpu != ANY && mock->gpus[gpu].reset_required && !(traits & SURVIVES_RESET_REQUIRED))
        return mock_leave(NVML_ERROR_RESET_REQUIRED);
    if ((traits & NEEDS_ROOT) && !(process.root_known ? process.root : mock->root))
        return mock_leave(NVML_ERROR_NO_PERMISSION);
    return NVML_SUCCESS;
}

bool mock_is_handle(const struct nvmlDevice_st *device)
{
    const uintptr_t address = (uintptr_t)device, first = (uintptr_t)handles;
    if (address < first || address >= first + sizeof handles || (address - first) % sizeof *device)
        return false;
    return device->gpu < mock->gpu_count && !mock->gpus[device->gpu].absent &&
           (device->mig < 0 || (mock->gpus[device->gpu].mig_mode && device->mig < mock->gpus[device->gpu].mig_count));
}

nvmlDevice_t mock_handle(int gpu, int mig) { return &handles[gpu][mig + 1]; }

int mock_gpu_number(const struct gpu *gpu) { return (int)(gpu - mock->gpus); }

nvmlReturn_t mock_enter(enum call call, nvmlDevice_t device, int traits, struct gpu **gpu)
{
    nvmlReturn_t code = mock_begin();
    if (code != NVML_SUCCESS)
        return code;
    if (!mock_is_handle(device)) {
        mock->counts[call][MAX_GPUS]++;
        return mock_leave(NVML_ERROR_INVALID_ARGUMENT);
    }
    code = mock_admit(call, device->gpu, traits);
    if (code != NVML_SUCCESS)
        return code;
    if (device->mig >= 0 && !(traits & TAKES_MIG)) {
        if (mock->mig_refusal != COMPUTED)
            return mock_leave((nvmlReturn_t)mock->mig_refusal);
        return mock_leave(
            traits & REFUSES_WITH_INVALID_ARGUMENT ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED);
    }
    *gpu = &mock->gpus[device->gpu];
    model_update(mock, *gpu);
    return NVML_SUCCESS;
}
