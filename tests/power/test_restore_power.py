"""``lightning-ntp restore-power``: what dead owners have left is put back, and nothing else is touched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ntp import cli
from lightning_ntp.commands import restore_power
from lightning_ntp.power.client import PowerHelper, power_limit
from lightning_ntp.power.entries import CLOCKS
from tests.nvml.mock import MockNvml
from tests.power.dead import leave, left
from tests.power.standing import ROOT


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        restore_power.main(arguments)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out + err


def test_leftovers_are_put_back(
    nvml: MockNvml, uuids: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(directory, left(uuids[0], 700_000, 500_000), left(uuids[1], None, (600, 900), CLOCKS))
    nvml.set(0, power_limit=500_000)
    nvml.set(1, locked_clock_min=600, locked_clock_max=900)
    status, text = run(capsys, "--dry-run")
    assert status == 0 and f"{uuids[0]} power_limit: would be put back: 700 W (job 'gone' had set 500 W)" in text
    assert nvml.history() == [] and len(list(directory.glob("*.jsonl"))) == 1
    status, text = run(capsys)
    assert status == 0 and f"{uuids[1]} clocks: put back: unlocked (job 'gone' had set 600 to 900 MHz)" in text
    assert nvml.get("power_limit", 0) == 700_000 and nvml.get("locked_clock_max", 1) == 0
    assert list(directory.glob("*.jsonl")) == []
    assert run(capsys) == (0, f"nothing to put back ({directory})\n")


def test_what_somebody_else_has_changed_since_is_left_alone(
    nvml: MockNvml, uuids: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(directory, left(uuids[0], 700_000, 500_000))
    nvml.set(0, power_limit=650_000)
    status, text = run(capsys)
    assert status == 0 and "left as it is: the limit is 650 W, not the 500 W that were written" in text
    assert nvml.history() == [] and list(directory.glob("*.jsonl")) == []


def test_a_write_that_was_not_made_any_more_is_known(
    nvml: MockNvml, uuids: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owner was killed between the journal and the driver: the limit is the one of before."""
    entry = left(uuids[0], 700_000, 500_000)
    leave(directory, type(entry)(**{**entry.__dict__, "before": 600_000}))
    nvml.set(0, power_limit=600_000)
    assert run(capsys)[0] == 0 and nvml.get("power_limit", 0) == 700_000


def test_a_living_owner_is_left_alone(
    nvml: MockNvml,
    uuids: list[str],
    directory: Path,
    helper: Callable[..., PowerHelper],
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = helper("busy")
    one.open(uuids[:2])
    one.set(power_limit(uuids[0], 500))
    status, text = run(capsys)
    assert status == 0 and f"left alone: 1 GPUs of job 'busy', process {one.pid}: it lives" in text
    assert nvml.get("power_limit", 0) == 500_000


@pytest.mark.parametrize(("values", "said"), [({"lost": 1}, "GPU is lost"), ({"absent": 1}, "Not Found")])
def test_a_gpu_that_is_gone_stays_in_the_journal_until_it_is_back(
    nvml: MockNvml,
    uuids: list[str],
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, int],
    said: str,
) -> None:
    leave(directory, left(uuids[0], 700_000, 500_000), left(uuids[1], 700_000, 500_000))
    nvml.set(0, power_limit=500_000, **values)
    nvml.set(1, power_limit=500_000)
    status, text = run(capsys)
    assert status == 1 and said in text and "1 of 2 could not be put back" in text
    assert nvml.get("power_limit", 1) == 700_000
    nvml.set(0, **dict.fromkeys(values, 0))
    assert run(capsys)[0] == 0 and nvml.get("power_limit", 0) == 700_000


def test_without_permission_it_says_what_is_missing(
    nvml: MockNvml, uuids: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(directory, left(uuids[0], 700_000, 500_000))
    nvml.set(0, power_limit=500_000)
    nvml.permission(False)
    status, text = run(capsys)
    assert status == 1 and "run this as root" in text and len(list(directory.glob("*.jsonl"))) == 1
    assert run(capsys, "--dry-run")[0] == 0


def test_a_driver_that_hangs_costs_the_time_limit(nvml: MockNvml, uuids: list[str], directory: Path) -> None:
    leave(directory, left(uuids[0], 700_000, 500_000), left(uuids[1], 700_000, 500_000))
    nvml.set(power_limit=500_000)
    with nvml.block("nvmlDeviceSetPowerManagementLimit", gpu=0):
        command = [sys.executable, "-m", "lightning_ntp", "restore-power", "--timeout", "2"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the driver has not answered within 2 s" in done.stdout
    assert [nvml.get("power_limit", gpu) for gpu in (0, 1)] == [500_000, 700_000]
    restore_power.main([])
    assert nvml.get("power_limit", 0) == 700_000


def test_without_a_driver_nothing_is_lost(
    nvml: MockNvml, uuids: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(directory, left(uuids[0], 700_000, 500_000))
    nvml.set(init_error=9)
    status, text = run(capsys)
    assert status == 1 and "NVML error 9" in text and len(list(directory.glob("*.jsonl"))) == 1


def test_it_is_a_command(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["restore-power", "--directory", str(directory)])
    assert "nothing to put back" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["restore-power", "--help"])
    assert "usage: lightning-ntp restore-power" in capsys.readouterr().out
