"""What the driver has, asked in a short-lived process."""

from __future__ import annotations

import os
import subprocess
import sys

import pynvml
import pytest

from lightning_ntp.launch.lifeline import children_of
from lightning_ntp.nvml import NvmlSource, find, inventory
from tests.nvml.mock import MockNvml


def test_an_inventory_says_what_there_is(nvml: MockNvml) -> None:
    nvml.enable_mig(1, 2)
    nvml.set(gpu=0, memory_used=1 << 30, memory_reserved=0, memory_total=4 << 30, name="Test GPU")
    nvml.set(gpu=2, fabric_state=1, nvlink_count=12)
    nvml.unsupported(3, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    found = inventory()
    assert found.problem == "" and found.driver == nvml.get("driver_version")
    assert [gpu.index for gpu in found.gpus] == list(range(8))
    assert [gpu.uuid for gpu in found.gpus] == [nvml.get("uuid", gpu) for gpu in range(8)]
    first, second, third, fourth = found.gpus[:4]
    assert (first.name, first.memory_total, first.memory_free) == ("Test GPU", 4 << 30, 3 << 30)
    assert first.power_limits_w == (200.0, 700.0)
    assert (first.fabric, first.nvlinks, first.mig) == ("healthy", 18, ())
    assert second.mig == tuple(nvml.get("mig_uuid", 1)[:2])
    assert (third.fabric, third.nvlinks) == ("its registration is not started", 12)
    assert "recovery_action" in first.supported and "recovery_action" not in fourth.supported


def test_an_inventory_without_a_driver_says_why(nvml: MockNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    found = inventory()
    assert (found.problem, found.gpus) == ("NVML Shared Library Not Found", ())


def test_a_device_that_does_not_answer_holds_up_no_other(nvml: MockNvml) -> None:
    nvml.block("nvmlDeviceGetFieldValues", gpu=3)
    nvml.set(gpu=4, lost=1)
    found = inventory(2.0)
    assert found.problem == "the driver has not answered everything within 2 s"
    assert [gpu.index for gpu in found.gpus if gpu.problem] == [3, 4]
    assert "has not answered" in found.gpus[3].problem
    assert "GPU is lost" in found.gpus[4].problem


def test_what_the_driver_does_not_have_is_found(nvml: MockNvml) -> None:
    nvml.enable_mig(0, 1)
    first, instance = nvml.get("uuid", 0), nvml.get("mig_uuid", 0)[0]
    nvml.set(gpu=2, lost=1)
    asked = ["GPU-b", first, "GPU-a", instance, nvml.get("uuid", 2)]
    assert find(asked) == ["GPU-b", "GPU-a"]
    assert NvmlSource().find([first]) == []
    assert find([]) == []
    with pytest.raises(ValueError, match="gpus names GPU-b, GPU-a, which the driver of this machine does not have"):
        NvmlSource().check(asked)
    NvmlSource().check([first])


@pytest.mark.parametrize("problem", ["hangs", "missing", "mismatch"])
def test_a_driver_that_says_nothing_is_taken_to_have_everything(nvml: MockNvml, problem: str) -> None:
    if problem == "hangs":
        nvml.block("nvmlInit")
    else:
        nvml.set(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED if problem == "missing" else 18)
    before = children_of(os.getpid())
    assert find(["GPU-a"], 1.0) == []
    assert children_of(os.getpid()) == before


def test_importing_the_room_brings_in_no_pynvml() -> None:
    code = "import sys, lightning_ntp.nvml; print('pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("arguments", [{"interval": 0}, {"stall": -1.0}, {"renew": 1e9}, {"interval": float("nan")}])
def test_numbers_that_are_none_of_seconds_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be a number of seconds above 0, up to 86400"):
        NvmlSource(**arguments)
