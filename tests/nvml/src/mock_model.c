/* The physical model; its formulas are in mock.h. */
#include "mock.h"

#include <math.h>

enum { OFF, BY_HAND, REAL_TIME };

#define STEPS_PER_TIME_CONSTANT 50
#define MOST_STEPS 20000

static double present(const struct state *state)
{
    if (state->model != REAL_TIME)
        return state->model_base;
    return state->model_base + state->model_factor * (mock_monotonic() - state->model_epoch);
}

/* f for a temperature, and the reasons why it is below 1. */
static double clock_fraction(const struct gpu *gpu, double temperature, int64_t *reasons)
{
    const double top = (double)gpu->max_clock_graphics;
    const double lowest = (double)gpu->min_clock_graphics / top;
    *reasons = 0;
    if (gpu->load <= 0) {
        *reasons = REASON_IDLE;
        return fmax(lowest, (double)gpu->locked_clock_min / top);
    }
    const double limit = 1e-3 * (double)enforced_power_limit(gpu);
    const double room = fmax(0.0, limit - gpu->idle_power);
    const double powered = cbrt(room / (gpu->load * gpu->dynamic_power));
    double fraction = gpu->locked_clock_max ? fmin(1.0, (double)gpu->locked_clock_max / top) : 1.0;
    if (powered < fraction) {
        fraction = powered;
        *reasons |= REASON_SW_POWER_CAP;
    }
    const double excess = temperature - (double)gpu->temperature_threshold[THRESHOLD_GPU_MAX];
    if (excess > 0) {
        fraction *= fmax(0.0, 1.0 - gpu->thermal_slope * excess);
        *reasons |= REASON_SW_THERMAL;
    }
    if (temperature >= (double)gpu->temperature_threshold[THRESHOLD_SLOWDOWN]) {
        fraction *= 0.5;
        *reasons |= REASON_HW_THERMAL | REASON_HW_SLOWDOWN;
    }
    if (gpu->brake < 1) {
        fraction *= gpu->brake;
        *reasons |= REASON_HW_POWER_BRAKE | REASON_HW_SLOWDOWN;
    }
    return fmax(fraction, lowest);
}

static double power_of(const struct gpu *gpu, double fraction)
{
    return gpu->idle_power + fmax(0.0, gpu->load) * gpu->dynamic_power * pow(fraction, 3);
}

static void count_times(struct gpu *gpu, int64_t reasons, double seconds)
{
    const int64_t nanoseconds = llround(1e9 * seconds);
    if (reasons & REASON_SW_POWER_CAP)
        gpu->violation_time[POLICY_POWER] += nanoseconds;
    if (reasons & (REASON_SW_THERMAL | REASON_HW_THERMAL))
        gpu->violation_time[POLICY_THERMAL] += nanoseconds;
    if (reasons & REASON_SW_THERMAL)
        gpu->sw_thermal_time += nanoseconds;
    if (reasons & REASON_HW_THERMAL)
        gpu->hw_thermal_time += nanoseconds;
    if (reasons & REASON_HW_POWER_BRAKE)
        gpu->power_brake_time += nanoseconds;
}

static void integrate(struct gpu *gpu, double seconds)
{
    const double longest = fmax(gpu->time_constant / STEPS_PER_TIME_CONSTANT, seconds / MOST_STEPS);
    while (seconds > 0) {
        int64_t reasons;
        const double power = power_of(gpu, clock_fraction(gpu, gpu->model_temperature, &reasons));
        const double target = gpu->ambient + gpu->thermal_resistance * power;
        const bool settled = fabs(target - gpu->model_temperature) < 1e-9;
        const double step = settled ? seconds : fmin(longest, seconds);
        gpu->model_temperature = target + (gpu->model_temperature - target) * exp(-step / gpu->time_constant);
        gpu->model_energy += 1e3 * power * step;
        count_times(gpu, reasons, step);
        seconds -= step;
    }
}

static void show(struct gpu *gpu)
{
    const double whole = floor(gpu->model_energy);
    gpu->model_clock = clock_fraction(gpu, gpu->model_temperature, &gpu->clock_reasons);
    gpu->model_power = power_of(gpu, gpu->model_clock);
    gpu->model_energy -= whole;
    gpu->total_energy += (int64_t)whole;
    gpu->temperature = llround(gpu->model_temperature);
    gpu->power_usage = llround(1e3 * gpu->model_power);
    gpu->clock_graphics = llround(gpu->model_clock * (double)gpu->max_clock_graphics);
    gpu->clock_sm = llround(gpu->model_clock * (double)gpu->max_clock_sm);
    gpu->utilization_gpu = llround(100 * gpu->load);
}

void model_update(struct state *state, struct gpu *gpu)
{
    if (state->model == OFF)
        return;
    const double now = present(state), elapsed = now - gpu->model_time;
    gpu->model_time = now;
    integrate(gpu, elapsed);
    show(gpu);
}

double model_speed(const struct state *state, const struct gpu *gpu)
{
    return state->model == OFF ? (double)gpu->clock_sm / (double)gpu->max_clock_sm : gpu->model_clock;
}

void model_start(struct state *state, double factor)
{
    state->model = factor < 0 ? BY_HAND : REAL_TIME;
    state->model_base = 0;
    state->model_epoch = mock_monotonic();
    state->model_factor = factor;
    for (int number = 0; number < MAX_GPUS; number++)
        state->gpus[number].model_time = 0;
}
