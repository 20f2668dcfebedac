/*
 * A stand-in for NVIDIA's libnvidia-ml.so.1: what the files of the mock share.
 *
 * Everything that a GPU "is" lies in one file, which all processes map (environment variable NVML_MOCK_STATE). A robust
 * mutex guards it: a process may be killed at any moment, and the next one to take the lock goes on. What belongs to a
 * process (how often it has called nvmlInit, its event sets) stays in the process.
 *
 * Signatures, layouts and versions of structures follow nvidia-ml-py 13.615.71 (pynvml.py), which the tests call.
 *
 * mock_state.c    the file, the lock, the way into and out of a call
 * mock_control.c  what a test turns: values by name, rules (errors, blocking), fields, events
 * mock_model.c    the physical model
 * mock_devices.c  init, system, identity, MIG, topology, processes
 * mock_power.c    temperatures, power, clocks, profiles
 * mock_health.c   ECC, rows, pages, NVLink, fabric
 * mock_fields.c   nvmlDeviceGetFieldValues
 * mock_events.c   event sets
 *
 *
 * The physical model (off at first; nvmlMockStartModel)
 *
 * Time is real time since the start of the model times a factor, or goes on by nvmlMockAdvance alone. A GPU is brought up
 * to the present whenever it is asked or told something. With
 *
 *     load             0 (idle) to 1                       idle_power, dynamic_power   W
 *     f                clock / max_clock_graphics          ambient                     degrees C
 *     limit            W, the enforced power limit         thermal_resistance R        degrees C / W
 *     T                temperature, degrees C              time_constant tau           s
 *     T_max, T_slow    thresholds GPU_MAX, SLOWDOWN        thermal_slope s             1 / degree C
 *
 * the power of a clock is        P(f) = idle_power + load * dynamic_power * f^3
 * the clock that is reached is   f = min(1, locked_clock_max / max_clock_graphics,
 *                                        cbrt((limit - idle_power) / (load * dynamic_power)))
 *                                  * max(0, 1 - s * max(0, T - T_max))     software slows down
 *                                  * (T >= T_slow ? 1/2 : 1)               hardware slows down
 *                                  * brake                                 below 1: an external power brake
 *                                but never below min_clock_graphics / max_clock_graphics
 * and the temperature follows    dT/dt = (ambient + R * P(f) - T) / tau
 *
 * so that a steady state has     T = ambient + R * (idle_power + load * dynamic_power * f(T)^3).
 *
 * An idle GPU runs at its lowest clock (or locked_clock_min) and takes idle_power. The speed of computing is f. Energy is
 * the integral of P. Reasons: GPU_IDLE at load 0, SW_POWER_CAP if the limit is what holds the clock, SW_THERMAL_SLOWDOWN
 * above T_max, HW_THERMAL_SLOWDOWN and HW_SLOWDOWN from T_slow on, HW_POWER_BRAKE_SLOWDOWN and HW_SLOWDOWN if brake < 1;
 * while they hold, their counters of nanoseconds grow. The step of integration is tau / 50 (exact where P is constant).
 */
#ifndef NVML_MOCK_H
#define NVML_MOCK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    MAX_GPUS = 16,
    MAX_MIG = 7, /* MIG devices of one GPU */
    MAX_LINKS = 36,
    MAX_RULES = 256,
    MAX_EVENTS = 1024, /* the newest ones are kept */
    MAX_HISTORY = 512,
    MAX_FIELDS = 256, /* fields of one GPU that a test has set */
    MAX_PROCESSES = 32,
    MAX_PAGES = 64,
    TEXT_SIZE = 96,
    FIELD_COUNT = 308, /* NVML_FI_MAX */
    LINK_COUNTERS = 22, /* fields 201 to 222 */
};

#define ANY (-1)             /* no GPU, or a rule for all of them */
#define COMPUTED INT64_MIN   /* a value that follows from others until it is set */
#define ALL_LINKS UINT32_MAX /* scope of a field: the sum over links */

/* What of NVML's constants the mock needs. */

typedef unsigned int nvmlReturn_t;
enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_RESET_REQUIRED = 16,
    NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
};
enum { THRESHOLD_SHUTDOWN, THRESHOLD_SLOWDOWN, THRESHOLD_MEM_MAX, THRESHOLD_GPU_MAX, THRESHOLD_COUNT = 8 };
enum {
    REASON_IDLE = 0x1,
    REASON_SW_POWER_CAP = 0x4,
    REASON_HW_SLOWDOWN = 0x8,
    REASON_SW_THERMAL = 0x20,
    REASON_HW_THERMAL = 0x40,
    REASON_HW_POWER_BRAKE = 0x80,
    REASONS_SUPPORTED = 0x1FF,
};
enum { POLICY_POWER = 0, POLICY_THERMAL = 1, POLICY_COUNT = 12 };
enum { ECC_TYPES = 2, ECC_COUNTERS = 2, ECC_LOCATIONS = 8 };
enum { LINK_ERRORS = 5 };
enum { PROFILE_COUNT = 255, MASK_WORDS = 8 };
enum { EVENTS_SUPPORTED = 0xFFFF & ~(0x20 | 0x40 | 0x80) }; /* all but a laptop's change of power source */

/* Named values. All that is whole is an int64_t, arrays are flat, so one pair of functions reaches everything. */

#define SYSTEM_VALUES(INTEGER, ARRAY, REAL, TEXT, TEXTS)                                                                \
    INTEGER(init_error, NVML_SUCCESS)  /* what nvmlInit returns */                                                     \
    INTEGER(root, 1)                   /* may setters be called? NVML_MOCK_ROOT=0 or 1 decides for one process */       \
    INTEGER(lost_ends_wait, 1)         /* does nvmlEventSetWait return GPU_IS_LOST once a registered GPU is lost? */    \
    INTEGER(mig_refusal, COMPUTED)     /* what calls return that refuse MIG devices */                                  \
    INTEGER(cuda_version, 13000)                                                                                        \
    INTEGER(model, 0)                  /* 0: off, 1: nvmlMockAdvance moves time, 2: real time */                        \
    REAL(model_base, 0.0)                                                                                               \
    REAL(model_epoch, 0.0)                                                                                              \
    REAL(model_factor, 1.0)                                                                                             \
    TEXT(driver_version)                                                                                                \
    TEXT(nvml_version)

/* Powers in mW, clocks in MHz, temperatures in degrees C, energy in mJ, memory in bytes, times in ns: as NVML gives them. */
#define GPU_VALUES(INTEGER, ARRAY, REAL, TEXT, TEXTS)                                                                   \
    TEXT(uuid) TEXT(name) TEXT(serial) TEXTS(mig_uuid, MAX_MIG)                                                         \
    INTEGER(absent, 0)         /* not enumerated: neither counted nor found */                                          \
    INTEGER(lost, 0)           /* every call returns GPU_IS_LOST */                                                     \
    INTEGER(reset_required, 0) /* calls return RESET_REQUIRED, but for identity, events and the recovery action */      \
    INTEGER(minor_number, 0)                                                                                            \
    INTEGER(pci_domain, 0) INTEGER(pci_bus, 0) INTEGER(pci_device, 0)                                                   \
    INTEGER(pci_device_id, 0x233010DE) INTEGER(pci_subsystem_id, 0x16C110DE)                                            \
    INTEGER(architecture, 9) INTEGER(compute_major, 9) INTEGER(compute_minor, 0)                                        \
    INTEGER(persistence_mode, 1)                                                                                        \
    INTEGER(memory_total, 80LL << 30) INTEGER(memory_used, 0) INTEGER(memory_reserved, 512LL << 20)                     \
    INTEGER(mig_mode, 0) INTEGER(mig_pending, 0) INTEGER(mig_count, 0)                                                  \
    INTEGER(process_count, 0) ARRAY(process_pid, MAX_PROCESSES, 0) ARRAY(process_memory, MAX_PROCESSES, 0)              \
    ARRAY(topology, MAX_GPUS, 10) ARRAY(p2p_status, MAX_GPUS, 0)                                                        \
    INTEGER(temperature, 40) INTEGER(memory_temperature, 45) ARRAY(temperature_threshold, THRESHOLD_COUNT, 0)           \
    INTEGER(margin_temperature, COMPUTED)                                                                               \
    INTEGER(shutdown_tlimit, -10) INTEGER(slowdown_tlimit, -5) INTEGER(memory_max_tlimit, 0) INTEGER(gpu_max_tlimit, 0) \
    INTEGER(power_usage, 120000) INTEGER(power_average, COMPUTED)                                                       \
    INTEGER(power_limit, 700000) INTEGER(power_default_limit, 700000)                                                   \
    INTEGER(power_min_limit, 200000) INTEGER(power_max_limit, 700000)                                                   \
    INTEGER(external_power_limit, 0) /* 0: none; else the enforced limit is the smaller one */                          \
    INTEGER(total_energy, 0)                                                                                            \
    INTEGER(clock_graphics, 1980) INTEGER(clock_sm, 1980) INTEGER(clock_memory, 2619) INTEGER(clock_video, 1545)        \
    INTEGER(max_clock_graphics, 1980) INTEGER(max_clock_sm, 1980)                                                       \
    INTEGER(max_clock_memory, 2619) INTEGER(max_clock_video, 1545) INTEGER(min_clock_graphics, 210)                     \
    INTEGER(locked_clock_min, 0) INTEGER(locked_clock_max, 0) /* 0: not locked */                                       \
    INTEGER(locked_memory_min, 0) INTEGER(locked_memory_max, 0)                                                         \
    ARRAY(memory_clocks, 4, 0)                                                                                          \
    INTEGER(performance_state, 0) INTEGER(utilization_gpu, 0) INTEGER(utilization_memory, 0)                            \
    INTEGER(clock_reasons, 0) INTEGER(supported_clock_reasons, REASONS_SUPPORTED)                                       \
    ARRAY(violation_time, POLICY_COUNT, 0)                                                                              \
    INTEGER(sw_thermal_time, 0) INTEGER(hw_thermal_time, 0) INTEGER(power_brake_time, 0)                                \
    ARRAY(profiles_supported, MASK_WORDS, 0) ARRAY(profiles_requested, MASK_WORDS, 0)                                   \
    ARRAY(profile_priority, PROFILE_COUNT, 0) ARRAY(profile_conflicts, PROFILE_COUNT * MASK_WORDS, 0)                   \
    INTEGER(supported_events, EVENTS_SUPPORTED)                                                                         \
    INTEGER(recovery_action, 0)                                                                                         \
    INTEGER(unrepairable_memory, 0) INTEGER(channel_repair_pending, 0) INTEGER(tpc_repair_pending, 0)                   \
    INTEGER(pcie_replay, 0)                                                                                             \
    INTEGER(ecc_mode, 1) INTEGER(ecc_pending, 1)                                                                        \
    ARRAY(ecc_errors, ECC_TYPES * ECC_COUNTERS * ECC_LOCATIONS, 0)                                                      \
    INTEGER(sram_aggregate_parity, 0) INTEGER(sram_aggregate_secded, 0) INTEGER(sram_aggregate_corrected, 0)            \
    INTEGER(sram_volatile_parity, 0) INTEGER(sram_volatile_secded, 0) INTEGER(sram_volatile_corrected, 0)               \
    INTEGER(sram_bucket_l2, 0) INTEGER(sram_bucket_sm, 0) INTEGER(sram_bucket_pcie, 0) INTEGER(sram_bucket_mcu, 0)      \
    INTEGER(sram_bucket_other, 0) INTEGER(sram_threshold_exceeded, 0)                                                   \
    INTEGER(remapped_correctable, 0) INTEGER(remapped_uncorrectable, 0)                                                 \
    INTEGER(remapped_pending, 0) INTEGER(remapped_failure, 0)                                                           \
    INTEGER(remapped_correctable_inactive, 0) INTEGER(remapped_uncorrectable_inactive, 0)                               \
    ARRAY(row_histogram, 5, 0)                                                                                          \
    INTEGER(banks_active, 0) INTEGER(banks_inactive, 0) INTEGER(banks_pending, 0)                                       \
    INTEGER(banks_full, 640) INTEGER(banks_none, 0)                                                                     \
    INTEGER(retired_pending, 0) ARRAY(retired_count, 2, 0) ARRAY(retired_address, 2 * MAX_PAGES, 0)                     \
    INTEGER(nvlink_count, 18) INTEGER(nvlink_version, 6) INTEGER(nvlink_speed, 26562)                                   \
    ARRAY(nvlink_state, MAX_LINKS, 1) ARRAY(nvlink_remote_type, MAX_LINKS, 2)                                           \
    ARRAY(nvlink_errors, MAX_LINKS * LINK_ERRORS, 0) ARRAY(nvlink_counters, MAX_LINKS * LINK_COUNTERS, 0)               \
    INTEGER(fabric_state, 3) INTEGER(fabric_status, NVML_SUCCESS) INTEGER(fabric_clique, 1)                             \
    ARRAY(fabric_cluster, 16, 0xAB) INTEGER(fabric_health_mask, 0x1AA) INTEGER(fabric_health_summary, 1)                \
    REAL(load, 0.0) REAL(brake, 1.0)                                                                                    \
    REAL(idle_power, 80.0) REAL(dynamic_power, 620.0)                                                                   \
    REAL(ambient, 30.0) REAL(thermal_resistance, 0.06) REAL(time_constant, 20.0) REAL(thermal_slope, 0.02)              \
    REAL(model_temperature, 40.0) REAL(model_power, 120.0) REAL(model_clock, 1.0) REAL(model_time, 0.0)                 \
    REAL(model_energy, 0.0)

#define DECLARE_INTEGER(name, initial) int64_t name;
#define DECLARE_ARRAY(name, count, initial) int64_t name[count];
#define DECLARE_REAL(name, initial) double name;
#define DECLARE_TEXT(name) char name[TEXT_SIZE];
#define DECLARE_TEXTS(name, count) char name[count][TEXT_SIZE];

/* Every call that can be counted, blocked or made to fail. */
#define CALLS(CALL)                                                                                                     \
    CALL(nvmlInit) CALL(nvmlInit_v2) CALL(nvmlInitWithFlags) CALL(nvmlShutdown)                                         \
    CALL(nvmlSystemGetDriverVersion) CALL(nvmlSystemGetNVMLVersion)                                                     \
    CALL(nvmlSystemGetCudaDriverVersion) CALL(nvmlSystemGetCudaDriverVersion_v2)                                        \
    CALL(nvmlDeviceGetCount) CALL(nvmlDeviceGetCount_v2)                                                                \
    CALL(nvmlDeviceGetHandleByIndex) CALL(nvmlDeviceGetHandleByIndex_v2) CALL(nvmlDeviceGetHandleByUUID)                \
    CALL(nvmlDeviceGetHandleByPciBusId_v2)                                                                              \
    CALL(nvmlDeviceGetUUID) CALL(nvmlDeviceGetName) CALL(nvmlDeviceGetSerial) CALL(nvmlDeviceGetIndex)                  \
    CALL(nvmlDeviceGetMinorNumber) CALL(nvmlDeviceGetPciInfo_v3) CALL(nvmlDeviceGetArchitecture)                        \
    CALL(nvmlDeviceGetCudaComputeCapability)                                                                            \
    CALL(nvmlDeviceGetMemoryInfo) CALL(nvmlDeviceGetMemoryInfo_v2)                                                      \
    CALL(nvmlDeviceGetPersistenceMode) CALL(nvmlDeviceSetPersistenceMode)                                               \
    CALL(nvmlDeviceGetMigMode) CALL(nvmlDeviceGetMaxMigDeviceCount) CALL(nvmlDeviceGetMigDeviceHandleByIndex)           \
    CALL(nvmlDeviceGetDeviceHandleFromMigDeviceHandle) CALL(nvmlDeviceIsMigDeviceHandle)                                \
    CALL(nvmlDeviceGetGpuInstanceId) CALL(nvmlDeviceGetComputeInstanceId)                                               \
    CALL(nvmlDeviceGetComputeRunningProcesses_v2) CALL(nvmlDeviceGetComputeRunningProcesses_v3)                         \
    CALL(nvmlDeviceGetTopologyCommonAncestor) CALL(nvmlDeviceGetTopologyNearestGpus) CALL(nvmlDeviceGetP2PStatus)       \
    CALL(nvmlDeviceGetTemperature) CALL(nvmlDeviceGetTemperatureV) CALL(nvmlDeviceGetMarginTemperature)                 \
    CALL(nvmlDeviceGetTemperatureThreshold)                                                                             \
    CALL(nvmlDeviceGetPowerUsage) CALL(nvmlDeviceGetTotalEnergyConsumption)                                             \
    CALL(nvmlDeviceGetPowerManagementLimit) CALL(nvmlDeviceGetPowerManagementLimitConstraints)                          \
    CALL(nvmlDeviceGetPowerManagementDefaultLimit) CALL(nvmlDeviceGetEnforcedPowerLimit)                                \
    CALL(nvmlDeviceSetPowerManagementLimit) CALL(nvmlDeviceSetPowerManagementLimit_v2)                                  \
    CALL(nvmlDeviceGetClockInfo) CALL(nvmlDeviceGetMaxClockInfo)                                                        \
    CALL(nvmlDeviceSetGpuLockedClocks) CALL(nvmlDeviceResetGpuLockedClocks)                                             \
    CALL(nvmlDeviceSetMemoryLockedClocks) CALL(nvmlDeviceResetMemoryLockedClocks)                                       \
    CALL(nvmlDeviceGetSupportedGraphicsClocks) CALL(nvmlDeviceGetSupportedMemoryClocks)                                 \
    CALL(nvmlDeviceGetCurrentClocksEventReasons) CALL(nvmlDeviceGetSupportedClocksEventReasons)                         \
    CALL(nvmlDeviceGetCurrentClocksThrottleReasons) CALL(nvmlDeviceGetSupportedClocksThrottleReasons)                   \
    CALL(nvmlDeviceGetViolationStatus) CALL(nvmlDeviceGetPerformanceState) CALL(nvmlDeviceGetUtilizationRates)          \
    CALL(nvmlDeviceWorkloadPowerProfileGetProfilesInfo) CALL(nvmlDeviceWorkloadPowerProfileGetCurrentProfiles)          \
    CALL(nvmlDeviceWorkloadPowerProfileSetRequestedProfiles)                                                            \
    CALL(nvmlDeviceWorkloadPowerProfileClearRequestedProfiles) CALL(nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1)    \
    CALL(nvmlDeviceGetEccMode) CALL(nvmlDeviceGetTotalEccErrors) CALL(nvmlDeviceGetMemoryErrorCounter)                  \
    CALL(nvmlDeviceGetSramEccErrorStatus) CALL(nvmlDeviceGetRemappedRows) CALL(nvmlDeviceGetRemappedRows_v2)            \
    CALL(nvmlDeviceGetRowRemapperHistogram) CALL(nvmlDeviceGetBankRemapperStatus_v1)                                    \
    CALL(nvmlDeviceGetRepairStatus) CALL(nvmlDeviceGetUnrepairableMemoryFlag_v1)                                        \
    CALL(nvmlDeviceGetRetiredPages) CALL(nvmlDeviceGetRetiredPages_v2) CALL(nvmlDeviceGetRetiredPagesPendingStatus)     \
    CALL(nvmlDeviceGetPcieReplayCounter)                                                                                \
    CALL(nvmlDeviceGetNvLinkState) CALL(nvmlDeviceGetNvLinkVersion) CALL(nvmlDeviceGetNvLinkErrorCounter)               \
    CALL(nvmlDeviceGetNvLinkRemoteDeviceType) CALL(nvmlDeviceGetNvLinkCapability)                                       \
    CALL(nvmlDeviceGetGpuFabricInfo) CALL(nvmlDeviceGetGpuFabricInfoV)                                                  \
    CALL(nvmlDeviceGetFieldValues)                                                                                      \
    CALL(nvmlEventSetCreate) CALL(nvmlEventSetFree) CALL(nvmlEventSetWait_v2)                                           \
    CALL(nvmlDeviceRegisterEvents) CALL(nvmlDeviceGetSupportedEventTypes)

#define NUMBER_CALL(name) CALL_##name,
enum call { CALLS(NUMBER_CALL) CALL_COUNT };
enum { CALL_WORDS = (CALL_COUNT + 63) / 64 };

/* Structures of NVML that several files need. */

struct nvmlDevice_st {
    int gpu;
    int mig; /* number of the MIG device, or -1 for the GPU itself */
};
typedef struct nvmlDevice_st *nvmlDevice_t;

typedef union {
    double dVal;
    unsigned int uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
    long long sllVal;
    int siVal;
    unsigned short usVal;
} nvmlValue_t;
enum { TYPE_DOUBLE, TYPE_UINT, TYPE_ULONG, TYPE_ULLONG, TYPE_SLLONG, TYPE_SINT, TYPE_USHORT, TYPE_COUNT };

/* The shared state. */

struct field {
    uint32_t id;
    int64_t scope; /* or ANY */
    uint32_t type;
    nvmlReturn_t code;
    nvmlValue_t value;
};

struct gpu {
    GPU_VALUES(DECLARE_INTEGER, DECLARE_ARRAY, DECLARE_REAL, DECLARE_TEXT, DECLARE_TEXTS)
    uint32_t field_count;
    struct field fields[MAX_FIELDS];
};

struct rule {
    uint64_t serial; /* 0: this place is free */
    uint64_t calls[CALL_WORDS]; /* a set */
    int32_t gpu;                /* or ANY */
    bool blocks;
    nvmlReturn_t code;
    double seconds; /* how long a block lasts; below 0: until the rule is removed */
    int64_t skip;   /* so many matching calls pass first */
    int64_t times;  /* so many calls are hit; below 0: all */
    uint64_t hits;
};

struct event {
    int32_t gpu;
    uint64_t type;
    uint64_t data;
    uint32_t gpu_instance;
    uint32_t compute_instance;
};

struct entry { /* of the history: a setter that has succeeded */
    int64_t columns[5]; /* call, GPU, pid, two arguments */
};

struct state {
    uint32_t magic;
    uint32_t size;
    pthread_mutex_t lock;
    _Atomic uint32_t changed; /* a futex: whoever waits for an event or for the end of a block waits here */
    int32_t gpu_count;
    SYSTEM_VALUES(DECLARE_INTEGER, DECLARE_ARRAY, DECLARE_REAL, DECLARE_TEXT, DECLARE_TEXTS)
    uint64_t last_serial;
    struct rule rules[MAX_RULES];
    uint64_t event_count; /* ever; event n lies in place n % MAX_EVENTS */
    struct event events[MAX_EVENTS];
    uint64_t history_count;
    struct entry history[MAX_HISTORY];
    uint64_t counts[CALL_COUNT][MAX_GPUS + 1]; /* the last column: calls on no GPU */
    struct gpu gpus[MAX_GPUS];
};

/* mock_state.c */

/* How a call treats MIG devices and a GPU that must be reset. */
enum {
    TAKES_MIG = 1,
    REFUSES_WITH_INVALID_ARGUMENT = 2, /* a MIG device; otherwise NOT_SUPPORTED */
    SURVIVES_RESET_REQUIRED = 4,
    NEEDS_ROOT = 8,
    IDENTITY = TAKES_MIG | SURVIVES_RESET_REQUIRED,
};

/* The state that this thread's call works on; valid from mock_begin to mock_leave. */
extern _Thread_local struct state *mock;

/* Enter a call: the library must be initialised. The state is locked from here on. */
nvmlReturn_t mock_begin(void);
/* Count the call, apply the rules and the state of GPU `gpu` (or ANY). Leaves the call unless it returns SUCCESS. */
nvmlReturn_t mock_admit(enum call call, int gpu, int traits);
/* mock_begin, the handle's GPU, mock_admit; `*gpu` is that GPU, brought up to the present. */
nvmlReturn_t mock_enter(enum call call, nvmlDevice_t device, int traits, struct gpu **gpu);
/* Leave a call: gives `code` back. */
nvmlReturn_t mock_leave(nvmlReturn_t code);
/* Let others have the state for at most so many seconds, or until it changes. False once the library is shut down. */
bool mock_wait(double seconds);
void mock_record(enum call call, const struct gpu *gpu, int64_t first, int64_t second);
int mock_gpu_number(const struct gpu *gpu);
/* The handle of a GPU (mig -1) or of one of its MIG devices. */
nvmlDevice_t mock_handle(int gpu, int mig);
bool mock_is_handle(const struct nvmlDevice_st *device);
double mock_monotonic(void);
/* How often this process has initialised the library since it was last shut down, changed by `change`. */
nvmlReturn_t mock_attach(void);
nvmlReturn_t mock_detach(void);
/* Wake everybody who waits for something. The state must be locked. */
void mock_wake(struct state *state);
void mock_lock(struct state *state);
void mock_unlock(struct state *state);

#define DEVICE_CALL(name, device, traits)                                                                               \
    struct gpu *gpu = NULL;                                                                                             \
    const nvmlReturn_t refusal_ = mock_enter(CALL_##name, (device), (traits), &gpu);                                    \
    if (refusal_ != NVML_SUCCESS)                                                                                       \
    return refusal_

#define SYSTEM_CALL(name)                                                                                               \
    nvmlReturn_t refusal_ = mock_begin();                                                                               \
    if (refusal_ == NVML_SUCCESS)                                                                                       \
        refusal_ = mock_admit(CALL_##name, ANY, 0);                                                                     \
    if (refusal_ != NVML_SUCCESS)                                                                                       \
    return refusal_

#define REQUIRE(condition, code)                                                                                        \
    if (!(condition))                                                                                                   \
    return mock_leave(code)

/* mock_model.c */

/* Bring a GPU up to the present. */
void model_update(struct state *state, struct gpu *gpu);
double model_speed(const struct state *state, const struct gpu *gpu);
void model_start(struct state *state, double factor); /* below 0: time is moved by hand */

/* mock_power.c, mock_health.c: what fields give too */

int64_t enforced_power_limit(const struct gpu *gpu);
int64_t ecc_total(const struct gpu *gpu, int type, int counter);
int64_t link_total(const struct gpu *gpu, int counter);

/* mock_fields.c */

/* A field whose value is given as a whole number or a real one, whatever its type takes. */
struct field field_make(uint32_t id, int64_t scope, uint32_t type, nvmlReturn_t code, int64_t whole, double real);
/* The value of a field without what a test has set; the type is TYPE_COUNT if there is none. */
struct field field_default(const struct gpu *gpu, uint32_t id, uint32_t scope);

/* mock_events.c */

void events_forget_all(void);

#endif
