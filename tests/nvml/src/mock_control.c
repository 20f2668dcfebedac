/* What a test turns: values by name, the model, rules, fields, events. Each function takes a state of nvmlMockOpen. */
#define _GNU_SOURCE
#include "mock.h"

#include <string.h>
#include <unistd.h>

/* Values by name */

struct value {
    const char *name;
    int scope; /* 0: system, 1: GPU */
    int kind;  /* 0: integer, 1: real, 2: text */
    size_t offset;
    int count;
};

#define SYSTEM_INTEGER(name, initial) {#name, 0, 0, offsetof(struct state, name), 1},
#define SYSTEM_ARRAY(name, count, initial) {#name, 0, 0, offsetof(struct state, name), (count)},
#define SYSTEM_REAL(name, initial) {#name, 0, 1, offsetof(struct state, name), 1},
#define SYSTEM_TEXT(name) {#name, 0, 2, offsetof(struct state, name), 1},
#define SYSTEM_TEXTS(name, count) {#name, 0, 2, offsetof(struct state, name), (count)},
#define GPU_INTEGER(name, initial) {#name, 1, 0, offsetof(struct gpu, name), 1},
#define GPU_ARRAY(name, count, initial) {#name, 1, 0, offsetof(struct gpu, name), (count)},
#define GPU_REAL(name, initial) {#name, 1, 1, offsetof(struct gpu, name), 1},
#define GPU_TEXT(name) {#name, 1, 2, offsetof(struct gpu, name), 1},
#define GPU_TEXTS(name, count) {#name, 1, 2, offsetof(struct gpu, name), (count)},

static const struct value values[] = {
    SYSTEM_VALUES(SYSTEM_INTEGER, SYSTEM_ARRAY, SYSTEM_REAL, SYSTEM_TEXT, SYSTEM_TEXTS)
    GPU_VALUES(GPU_INTEGER, GPU_ARRAY, GPU_REAL, GPU_TEXT, GPU_TEXTS)
};
enum { VALUE_COUNT = sizeof values / sizeof *values };

/* What value `number` is; NULL behind the last one. */
EXPORT const char *nvmlMockValue(int number, int *scope, int *kind, int *count)
{
    if (number < 0 || number >= VALUE_COUNT)
        return NULL;
    *scope = values[number].scope;
    *kind = values[number].kind;
    *count = values[number].count;
    return values[number].name;
}

static void *locate(struct state *state, int number, int gpu, int element)
{
    static const size_t sizes[] = {sizeof(int64_t), sizeof(double), TEXT_SIZE};
    const struct value *value = &values[number];
    char *base = value->scope ? (char *)&state->gpus[gpu] : (char *)state;
    return base + value->offset + (size_t)element * sizes[value->kind];
}

static bool exists(int number, int kind, int gpu, int element)
{
    return number >= 0 && number < VALUE_COUNT && values[number].kind == kind && gpu >= 0 && gpu < MAX_GPUS &&
           element >= 0 && element < values[number].count;
}

EXPORT int nvmlMockSetInteger(struct state *state, int number, int gpu, int element, int64_t value)
{
    if (!exists(number, 0, gpu, element))
        return -1;
    mock_lock(state);
    int64_t *place = locate(state, number, gpu, element);
    if (values[number].scope)
        model_update(state, &state->gpus[gpu]);
    *place = value;
    if (place == &state->gpus[gpu].temperature)
        state->gpus[gpu].model_temperature = (double)value;
    mock_wake(state);
    mock_unlock(state);
    return 0;
}

EXPORT int nvmlMockSetReal(struct state *state, int number, int gpu, int element, double value)
{
    if (!exists(number, 1, gpu, element))
        return -1;
    mock_lock(state);
    if (values[number].scope)
        model_update(state, &state->gpus[gpu]);
    *(double *)locate(state, number, gpu, element) = value;
    mock_unlock(state);
    return 0;
}

EXPORT int nvmlMockSetText(struct state *state, int number, int gpu, int element, const char *value)
{
    if (!exists(number, 2, gpu, element) || strlen(value) >= TEXT_SIZE)
        return -1;
    mock_lock(state);
    strcpy(locate(state, number, gpu, element), value);
    mock_unlock(state);
    return 0;
}

/* Reads a value of any kind into the place for it. */
EXPORT int nvmlMockGet(struct state *state, int number, int gpu, int element, int64_t *integer, double *real, char *text)
{
    if (number < 0 || number >= VALUE_COUNT || !exists(number, values[number].kind, gpu, element))
        return -1;
    mock_lock(state);
    if (values[number].scope)
        model_update(state, &state->gpus[gpu]);
    const void *place = locate(state, number, gpu, element);
    switch (values[number].kind) {
    case 0: *integer = *(const int64_t *)place; break;
    case 1: *real = *(const double *)place; break;
    default: memcpy(text, place, TEXT_SIZE); break;
    }
    mock_unlock(state);
    return 0;
}

/* The model */

EXPORT void nvmlMockStartModel(struct state *state, double factor)
{
    mock_lock(state);
    model_start(state, factor);
    mock_unlock(state);
}

EXPORT void nvmlMockAdvance(struct state *state, double seconds)
{
    mock_lock(state);
    state->model_base += seconds;
    mock_unlock(state);
}

EXPORT double nvmlMockSpeed(struct state *state, int gpu)
{
    mock_lock(state);
    model_update(state, &state->gpus[gpu]);
    const double speed = model_speed(state, &state->gpus[gpu]);
    mock_unlock(state);
    return speed;
}

/* Calls, rules, history */

#define CALL_NAME(name) #name,
static const char *const call_names[] = {CALLS(CALL_NAME)};

EXPORT const char *nvmlMockCall(int number) { return number >= 0 && number < CALL_COUNT ? call_names[number] : NULL; }

/* The serial number of the rule, or 0 if there are too many. */
static uint64_t add_rule(struct state *state, struct rule rule)
{
    uint64_t serial = 0;
    mock_lock(state);
    for (int i = 0; i < MAX_RULES && !serial; i++)
        if (!state->rules[i].serial) {
            serial = ++state->last_serial;
            rule.serial = serial;
            state->rules[i] = rule;
        }
    mock_unlock(state);
    return serial;
}

/* `calls` is a set: bit c % 64 of word c / 64 is call c. */
EXPORT uint64_t nvmlMockFail(
    struct state *state, const uint64_t *calls, int gpu, nvmlReturn_t code, int64_t skip, int64_t times)
{
    struct rule rule = {.gpu = gpu, .code = code, .skip = skip, .times = times};
    memcpy(rule.calls, calls, sizeof rule.calls);
    return add_rule(state, rule);
}

EXPORT uint64_t nvmlMockBlock(
    struct state *state, const uint64_t *calls, int gpu, double seconds, int64_t skip, int64_t times)
{
    struct rule rule = {.gpu = gpu, .blocks = true, .seconds = seconds, .skip = skip, .times = times};
    memcpy(rule.calls, calls, sizeof rule.calls);
    return add_rule(state, rule);
}

static struct rule *find_rule(struct state *state, uint64_t serial)
{
    for (int i = 0; i < MAX_RULES && serial; i++)
        if (state->rules[i].serial == serial)
            return &state->rules[i];
    return NULL;
}

/* How many calls the rule has hit; -1 if it is gone. */
EXPORT int64_t nvmlMockHits(struct state *state, uint64_t serial)
{
    mock_lock(state);
    const struct rule *rule = find_rule(state, serial);
    const int64_t hits = rule ? (int64_t)rule->hits : -1;
    mock_unlock(state);
    return hits;
}

/* Remove one rule, or all (serial 0); whoever is blocked by it goes on. */
EXPORT void nvmlMockRemove(struct state *state, uint64_t serial)
{
    mock_lock(state);
    for (int i = 0; i < MAX_RULES; i++)
        if (!serial || state->rules[i].serial == serial)
            state->rules[i].serial = 0;
    mock_wake(state);
    mock_unlock(state);
}

/* How often a call was made: on one GPU, or in all (ANY). */
EXPORT uint64_t nvmlMockCount(struct state *state, int call, int gpu)
{
    uint64_t count = 0;
    mock_lock(state);
    for (int column = 0; column <= MAX_GPUS; column++)
        if (gpu == ANY || gpu == column)
            count += state->counts[call][column];
    mock_unlock(state);
    return count;
}

/* Entry `number` of the history (call, GPU, pid, two arguments); 0, or -1 if it is not there (any more). */
EXPORT int nvmlMockHistory(struct state *state, uint64_t number, int64_t *entry)
{
    mock_lock(state);
    const uint64_t count = state->history_count;
    const bool there = number < count && count - number <= MAX_HISTORY;
    if (there)
        memcpy(entry, state->history[number % MAX_HISTORY].columns, sizeof state->history->columns);
    mock_unlock(state);
    return there ? 0 : -1;
}

void mock_record(enum call call, const struct gpu *gpu, int64_t first, int64_t second)
{
    mock->history[mock->history_count % MAX_HISTORY] =
        (struct entry){{(int64_t)call, mock_gpu_number(gpu), getpid(), first, second}};
    mock->history_count++;
}

/* Fields and events that a test sets */

/* Code and value of a field, for one scope or all (ANY); TYPE_COUNT: as if it had never been set. */
EXPORT int nvmlMockSetField(
    struct state *state, int gpu, uint32_t id, int64_t scope, uint32_t type, nvmlReturn_t code, int64_t whole, double real)
{
    if (gpu < 0 || gpu >= MAX_GPUS)
        return -1;
    const struct field field = field_make(id, scope, type, code, whole, real);
    struct gpu *owner = &state->gpus[gpu];
    uint32_t place = 0;
    mock_lock(state);
    while (place < owner->field_count &&
           (owner->fields[place].id != field.id || owner->fields[place].scope != field.scope))
        place++;
    const bool fits = place < MAX_FIELDS;
    if (fits) {
        owner->fields[place] = field;
        if (place == owner->field_count)
            owner->field_count++;
    }
    mock_unlock(state);
    return fits ? 0 : -1;
}

/* The type that a field has by itself, or TYPE_COUNT. */
EXPORT uint32_t nvmlMockFieldType(struct state *state, uint32_t id)
{
    mock_lock(state);
    const uint32_t type = field_default(&state->gpus[0], id, 0).type;
    mock_unlock(state);
    return type;
}

EXPORT void nvmlMockPushEvent(
    struct state *state, int gpu, uint64_t type, uint64_t data, uint32_t gpu_instance, uint32_t compute_instance)
{
    mock_lock(state);
    state->events[state->event_count % MAX_EVENTS] =
        (struct event){gpu, type, data, gpu_instance, compute_instance};
    state->event_count++;
    mock_wake(state);
    mock_unlock(state);
}
