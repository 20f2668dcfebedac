"""The physical model of the mock: what it shows equals the formulas in ``src/mock.h``, written down again here."""

from __future__ import annotations

import math
import time

import pynvml
import pytest

from tests.nvml.mock import MockNvml
from tests.nvml.test_mock import device, field_of

IDLE, DYNAMIC, AMBIENT, RESISTANCE, TAU, SLOPE = 80.0, 620.0, 30.0, 0.06, 20.0, 0.02
T_MAX, T_SLOW, TOP = 85.0, 90.0, 1980


@pytest.fixture
def model(nvml: MockNvml) -> MockNvml:
    pynvml.nvmlInit()
    nvml.start_model()
    return nvml


def fraction(temperature: float, limit: float = 700.0, load: float = 1.0, locked: int = TOP) -> float:
    found = min(1.0, locked / TOP, ((limit - IDLE) / (load * DYNAMIC)) ** (1 / 3))
    found *= 1 - SLOPE * max(0.0, temperature - T_MAX)
    return found / 2 if temperature >= T_SLOW else found


def steady(resistance: float = RESISTANCE, limit: float = 700.0, load: float = 1.0, locked: int = TOP) -> float:
    """The temperature at which T = ambient + R P(f(T)): the right side falls with T, so bisection finds it."""
    low, high = AMBIENT, AMBIENT + resistance * (IDLE + DYNAMIC)
    for _ in range(100):
        middle = (low + high) / 2
        power = IDLE + load * DYNAMIC * fraction(middle, limit, load, locked) ** 3
        low, high = (middle, high) if AMBIENT + resistance * power > middle else (low, middle)
    return low


CASES = [
    ({}, {}, 0),
    ({"load": 0.5}, {"load": 0.5}, 0),
    ({"power_limit": 400_000}, {"limit": 400.0}, pynvml.nvmlClocksEventReasonSwPowerCap),
    ({"external_power_limit": 300_000}, {"limit": 300.0}, pynvml.nvmlClocksEventReasonSwPowerCap),
    ({"locked_clock_max": 990}, {"locked": 990}, 0),
    ({"thermal_resistance": 0.09}, {"resistance": 0.09}, pynvml.nvmlClocksEventReasonSwThermalSlowdown),
]


@pytest.mark.parametrize(("values", "case", "reasons"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_steady_state_solves_the_formula(
    model: MockNvml, values: dict[str, float], case: dict[str, float], reasons: int
) -> None:
    model.set(gpu=2, **{"load": 1.0, **values})
    model.advance(100 * TAU)
    temperature = steady(**case)  # type: ignore[arg-type]
    speed = fraction(temperature, **{name: value for name, value in case.items() if name != "resistance"})  # type: ignore[arg-type]
    power = IDLE + values.get("load", 1.0) * DYNAMIC * speed**3
    # 1e-6: what is left of the start after 100 time constants is 1e-43; the rest is rounding of doubles.
    assert model.get("model_temperature", gpu=2) == pytest.approx(temperature, abs=1e-6)
    assert model.speed(2) == pytest.approx(speed, abs=1e-8)
    handle = device(2)
    assert pynvml.nvmlDeviceGetTemperature(handle, 0) == round(temperature)
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == pytest.approx(1000 * power, abs=1)
    assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) == round(speed * TOP)
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == reasons


def test_temperature_rises_with_the_time_constant_and_energy_with_power(model: MockNvml) -> None:
    model.set(gpu=2, load=1.0, temperature=30)
    seen = []
    for _ in range(4):
        model.advance(TAU / 2)
        seen.append(model.get("model_temperature", gpu=2))
    top = AMBIENT + RESISTANCE * (IDLE + DYNAMIC)
    expected = [top - (top - 30) * math.exp(-step / 2) for step in range(1, 5)]
    assert seen == pytest.approx(expected, abs=1e-9)  # exact where the power is constant, however often one looks
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(device(2)) == pytest.approx(1000 * 700 * 2 * TAU, abs=1)


def test_an_idle_gpu_is_cold_slow_and_says_so(model: MockNvml) -> None:
    model.advance(100 * TAU)
    handle = device(2)
    assert pynvml.nvmlDeviceGetTemperature(handle, 0) == round(AMBIENT + RESISTANCE * IDLE)
    assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) == 210
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == pynvml.nvmlClocksEventReasonGpuIdle
    model.set(gpu=2, locked_clock_min=900)
    assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) == 900


def test_a_lower_limit_through_nvml_slows_the_gpu_and_cools_it(model: MockNvml) -> None:
    handle = device(2)
    model.set(gpu=2, load=1.0)
    seen = []
    for limit in (700_000, 600_000, 500_000, 400_000, 300_000):
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, limit)
        model.advance(20 * TAU)
        assert pynvml.nvmlDeviceGetPowerUsage(handle) <= limit
        seen.append((model.speed(2), pynvml.nvmlDeviceGetTemperature(handle, 0)))
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == len(seen)
    assert model.speed(3) < 0.2  # idle, as before


def test_hardware_slows_a_gpu_down_by_half_and_counts_the_time(model: MockNvml) -> None:
    model.set(gpu=2, load=1.0, temperature=95)
    reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(device(2))
    assert reasons == (
        pynvml.nvmlClocksEventReasonSwThermalSlowdown
        | pynvml.nvmlClocksEventReasonHwThermalSlowdown
        | pynvml.nvmlClocksEventReasonHwSlowdown
    )
    assert model.speed(2) == pytest.approx((1 - SLOPE * 10) / 2)
    model.advance(0.1)
    counted = field_of(device(2), "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN").value.ullVal
    assert counted == pytest.approx(1e8, abs=1)
    violation = pynvml.nvmlDeviceGetViolationStatus(device(2), pynvml.NVML_PERF_POLICY_THERMAL).violationTime
    assert violation == counted


def test_a_power_brake(model: MockNvml) -> None:
    model.set(gpu=2, load=1.0, brake=0.5)
    model.advance(10)
    assert model.speed(2) == pytest.approx(0.5)
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(device(2)) == (
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | pynvml.nvmlClocksEventReasonHwSlowdown
    )
    counted = field_of(device(2), "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN").value.ullVal
    assert counted == pytest.approx(1e10, abs=1e3)


def test_time_may_be_real_time_and_faster(nvml: MockNvml) -> None:
    pynvml.nvmlInit()
    nvml.set(gpu=2, load=1.0)
    nvml.start_model(speed=100_000)
    time.sleep(0.05)
    assert pynvml.nvmlDeviceGetTemperature(device(2), 0) == round(AMBIENT + RESISTANCE * (IDLE + DYNAMIC))
    nvml.stop_model()
    nvml.set(gpu=2, load=0.0)
    assert pynvml.nvmlDeviceGetTemperature(device(2), 0) == round(AMBIENT + RESISTANCE * (IDLE + DYNAMIC))


def test_without_the_model_the_speed_is_the_clock_that_was_set(nvml: MockNvml) -> None:
    nvml.set(gpu=2, clock_sm=990)
    assert nvml.speed(2) == 0.5
