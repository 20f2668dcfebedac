"""What the control loop is told of what the driver has said."""

from __future__ import annotations

import time
from collections.abc import Callable

import pynvml
import pytest

from lightning_ntp.nvml import NvmlSource, Reading
from lightning_ntp.power.client import PowerHelper, power_limit
from lightning_ntp.power.control.signals import GpuReading
from lightning_ntp.power.readings import GpuReadings, gpu_reading
from tests.nvml.listening import listening, wait_until
from tests.nvml.mock import MockNvml

ALL = {
    "power_limit_w": 500.0,
    "power_limit_set_w": 600.0,
    "power_w": 410.0,
    "power_average_w": 420.0,
    "energy_j": 10_000.0,
    "temperature_margin_c": 12.0,
    "sm_clock_mhz": 1500.0,
    "clocks_event_reasons": 4.0,
    "ecc_corrected_total": 3.0,
    "row_remap_correctable": 1.0,
    "nvlink_errors": 20.0,  # which no boost ends for
    "pcie_replays": 100.0,
}


def reading(at: float = 10.0, kept: frozenset[str] = frozenset(), **values: float) -> Reading:
    return Reading("GPU-0", at, {**ALL, **values}, kept=kept)


def test_every_field_has_its_value() -> None:
    found = gpu_reading(reading(12.5, energy_j=11_000.0), reading(10.0), 1700)
    assert found == GpuReading(600.0, 400.0, 12.0, 1500.0, 1700, frozenset({"power_cap"}), 104)


def test_of_a_device_that_says_nothing_nothing_is_made_up() -> None:
    assert gpu_reading(Reading("GPU-0", 1.0), reading(), None) == GpuReading()


@pytest.mark.parametrize(
    "missing", ["power_limit_set_w", "temperature_margin_c", "sm_clock_mhz", "clocks_event_reasons"]
)
def test_a_value_that_is_missing_or_of_a_former_look_is_none(missing: str) -> None:
    none = gpu_reading(Reading("GPU-0", 10.0, {name: v for name, v in ALL.items() if name != missing}), None, None)
    assert gpu_reading(reading(kept=frozenset({missing})), None, None) == none != gpu_reading(reading(), None, None)


@pytest.mark.parametrize(
    ("now", "before", "watts"),
    [
        (reading(12.0, energy_j=10_900.0), reading(10.0), 450.0),
        (reading(12.0, energy_j=10_900.0), None, 420.0),
        (reading(12.0, energy_j=40.0), reading(10.0), 420.0),
        (reading(12.0), reading(10.0), 420.0),
        (reading(10.0, energy_j=10_900.0), reading(10.0), 420.0),
        (reading(12.0, frozenset({"energy_j"}), energy_j=10_900.0), reading(10.0), 420.0),
        (reading(12.0, energy_j=10_900.0), reading(10.0, frozenset({"energy_j"})), 420.0),
        (reading(kept=frozenset({"power_average_w"})), None, 410.0),
        (reading(kept=frozenset({"power_average_w", "power_w"})), None, None),
    ],
    ids=["mean", "first", "reset", "stands still", "no time", "kept", "kept before", "no average", "nothing"],
)
def test_the_draw_is_a_mean_where_there_is_one(now: Reading, before: Reading | None, watts: float | None) -> None:
    assert gpu_reading(now, before, None).power_w == watts


def test_counts_of_errors_that_cannot_be_read_for_once_are_as_they_were() -> None:
    assert gpu_reading(reading(kept=frozenset({"pcie_replays", "nvlink_errors"})), None, None).errors == 104
    assert gpu_reading(Reading("GPU-0", 1.0, {"pcie_replays": 7.0}), None, None).errors == 7
    assert gpu_reading(reading(ecc_corrected_total=0.0), reading(), None).errors == 101, "it was reset"


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        (0, set()),
        (pynvml.nvmlClocksEventReasonGpuIdle, set()),
        (pynvml.nvmlClocksEventReasonSwPowerCap, {"power_cap"}),
        (
            pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonSwPowerCap,
            {"sw_thermal", "power_cap"},
        ),
        (pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown, {"hw_thermal"}),
        (pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, {"power_brake"}),
        (pynvml.nvmlClocksEventReasonHwSlowdown, {"hw_thermal"}),
    ],
)
def test_reasons_are_those_of_nvml(mask: int, reasons: set[str]) -> None:
    assert gpu_reading(reading(clocks_event_reasons=float(mask)), None, None).reasons == reasons


def test_the_mean_is_since_the_last_call_and_an_old_reading_says_nothing() -> None:
    kept = GpuReadings(oldest_s=3.0)

    def watts(at: float, joules: float, now_s: float) -> float | None:
        found = kept.take({"GPU-0": reading(at, energy_j=joules)}, {"GPU-0": 900}, now_s)
        assert all(each.locked_mhz == 900 for each in found.values())
        return found["GPU-0"].power_w if found else None

    assert watts(1.0, 1000.0, 1.5) == 420, "there is no former one yet"
    assert watts(3.0, 2000.0, 3.5) == 500
    assert watts(3.0, 2000.0, 5.5) == 500, "the same reading again"
    assert watts(3.0, 2000.0, 6.5) is None
    assert watts(8.0, 3500.0, 8.5) == 300, "since the last one that was any good"


def test_counts_of_errors_only_grow() -> None:
    kept = GpuReadings(oldest_s=3.0)

    def errors(at: float, **counts: float) -> int | None:
        return kept.take({"GPU-0": Reading("GPU-0", at, counts)}, {}, at)["GPU-0"].errors

    assert errors(1.0, ecc_corrected_total=50, pcie_replays=2) == 0
    assert errors(2.0, ecc_corrected_total=53, pcie_replays=3) == 4
    assert errors(3.0, ecc_corrected_total=1, pcie_replays=4) == 5, "the counter was reset"
    assert errors(4.0, ecc_corrected_total=2, pcie_replays=4, row_remap_correctable=900) == 6, "known from now on"
    assert errors(5.0, ecc_corrected_total=3) == 7
    assert errors(6.0) is None


def test_an_age_that_no_reading_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="oldest_s=0 must be a number of seconds above 0"):
        GpuReadings(0)


def test_what_could_not_be_read_is_none_until_it_can_be(nvml: MockNvml) -> None:
    uuid, source = nvml.get("uuid", 0), NvmlSource(interval=0.1)
    with listening(source, {0: uuid}) as ears:
        ears.wait_for_look(uuid)
        with nvml.fail("nvmlDeviceGetMarginTemperature", pynvml.NVML_ERROR_UNKNOWN, gpu=0):
            wait_until(lambda: "temperature_margin_c" in source.readings[uuid].kept)
            found = gpu_reading(source.readings[uuid], None, None)
            assert source.readings[uuid].values["temperature_margin_c"] > 0
            assert found.margin_c is None and found.limit_w == 700
        wait_until(lambda: gpu_reading(source.readings[uuid], None, None).margin_c is not None)


def test_a_gpu_that_works_is_seen_as_it_is(
    nvml: MockNvml, helper: Callable[..., PowerHelper], uuids: list[str]
) -> None:
    """The model of the mock draws its limit, as long as it is cool."""
    one, source, readings = helper(), NvmlSource(interval=0.1), GpuReadings(oldest_s=2.0)
    assert one.open(uuids[:1])[uuids[0]].done
    nvml.set(0, load=1.0, temperature=40)
    nvml.start_model(speed=1.0)
    with listening(source, {0: uuids[0]}) as ears:
        assert one.set(power_limit(uuids[0], 450))[0].done
        ears.wait_for_look(uuids[0])
        readings.take(source.readings, {})
        time.sleep(1.5)
        (found,) = readings.take(source.readings, {}).values()
        assert found.limit_w == 450 and found.reasons == {"power_cap"} and found.errors == 0
        assert found.clock_mhz == pytest.approx(nvml.speed(0) * 1980, abs=1)
        assert found.margin_c is not None and found.margin_c == pytest.approx(85 - nvml.get("temperature", 0), abs=1)
        # 450 W all the time; the moment of a look is known to some milliseconds of these 1.5 s, on a busy machine
        assert found.power_w == pytest.approx(450, rel=0.03)
        latest = source.readings[uuids[0]]
        assert latest.values["power_w"] == pytest.approx(450, abs=0.01), "the model's, in mW"
        nvml.set(0, brake=0.5)
        ears.wait_for_look(uuids[0])
        assert "power_brake" in gpu_reading(source.readings[uuids[0]], latest, None).reasons
