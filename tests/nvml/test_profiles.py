"""Which workload power profiles a device has: asked once, with an inventory, and said by the doctor."""

from __future__ import annotations

import json

import pynvml
import pytest

from lightning_ntp.commands import doctor
from lightning_ntp.nvml import Profile, Profiles, inventory
from lightning_ntp.nvml.profiles import MOST_PROFILES, show_profiles
from tests.nvml.mock import MockNvml

INFO = "nvmlDeviceWorkloadPowerProfileGetProfilesInfo"


def test_names_and_numbers_are_nvmls() -> None:
    prefix = "NVML_POWER_PROFILE_"
    names = {
        name: number for name, number in vars(pynvml).items() if name.startswith(prefix) and "OPERATION" not in name
    }
    del names[f"{prefix}MAX"]  # how many there are
    assert {prefix + each.name: each.value for each in Profile} == names
    assert MOST_PROFILES == pynvml.NVML_WORKLOAD_POWER_MAX_PROFILES
    assert show_profiles(Profile) == (
        "Max-P, Max-Q, compute, memory bound, network, balanced, LLM inference, LLM training, RBM, DCPCIE, HMMA sparse,"
        " HMMA dense, sync balanced, HPC, MIG, Max-Q-1, network bound, high throughput inference,"
        " medium throughput inference, low latency inference, training, inference, Max-Q-2, Max-Q-3,"
        " low priority background"
    )
    assert show_profiles([200, 1]) == "Max-Q, profile 200" and show_profiles([]) == "none"


def test_an_inventory_says_which_there_are_and_which_are_in_force(nvml: MockNvml) -> None:
    nvml.set(0, profiles_supported=[0b111, 0, 1 << 6], profiles_requested=[0b110, 0, 1 << 6])
    nvml.set(0, profile_conflicts={1 * 8: 0b100, 2 * 8: 0b10})
    nvml.unsupported(1, INFO)
    nvml.set(2, profiles_supported=[0] * 8)
    nvml.fail(INFO, pynvml.NVML_ERROR_UNKNOWN, gpu=3)
    found = inventory()
    conflicts = {1: frozenset({2}), 2: frozenset({1})}
    expected = Profiles(frozenset({0, 1, 2, 70}), frozenset({1, 2, 70}), frozenset({1, 70}), conflicts)
    assert [gpu.profiles for gpu in found.gpus[:4]] == [expected, None, None, None]
    assert [gpu.problem for gpu in found.gpus] == [""] * 8, "training does not need them"
    assert len(found.notes) == 1 and "its workload power profiles are not known" in found.notes[0]


def test_the_doctor_says_it_in_a_line_for_each_kind_of_gpu(nvml: MockNvml, capsys: pytest.CaptureFixture[str]) -> None:
    nvml.set(name="NVIDIA B200", profiles_supported=[0b10000010])
    nvml.set(0, name="NVIDIA H100")
    nvml.unsupported(0, INFO)
    for gpu in (2, 7):
        nvml.set(gpu, profiles_requested=[0b10000010], profile_conflicts={1 * 8: 1 << 7})
        nvml.set(gpu, profile_priority={7: 0})
    doctor.main(["--json"])
    (text,) = [check["text"] for check in json.loads(capsys.readouterr().out) if check["what"] == "driver"]
    assert text.splitlines()[-3:] == [
        "GPU 0 NVIDIA H100: no workload power profiles",
        "GPU 1, 3-6 NVIDIA B200: workload power profiles: Max-Q, LLM training; requested: none",
        "GPU 2, 7 NVIDIA B200: workload power profiles: Max-Q, LLM training; requested: Max-Q, LLM training;"
        " enforced: LLM training",
    ]
