"""Client, helper or both are killed at any moment, or stopped, or the driver hangs: in the end everything is back."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_ntp.commands import restore_power
from lightning_ntp.launch.lifeline import children_of
from lightning_ntp.power.client import PowerHelper, power_limit
from lightning_ntp.power.owners import start_time
from lightning_ntp.power.putting_back import Status
from tests.nvml.mock import MockNvml
from tests.power.standing import ROOT, Raw, wait_until

WRITE = "nvmlDeviceSetPowerManagementLimit"


def is_all_back(nvml: MockNvml) -> bool:
    limits = [nvml.get("power_limit", gpu) for gpu in range(4)]
    others = [(nvml.get("locked_clock_max", gpu), nvml.get("profiles_requested", gpu)) for gpu in range(4)]
    return limits == [700_000] * 4 and others == [(0, [0] * 8)] * 4


@contextmanager
def trainer(uuids: list[str], seed: int | str = 0, lease: float = 5.0) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.power.trainer", str(seed), str(lease), *uuids]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def helper_of(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line[0] == b"open", line
    return int(line[1])


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def play(nvml: MockNvml, uuids: list[str], seed: int) -> None:
    """One round: who is killed, and when, is drawn; half of the time before the first GPU is taken."""
    chance = random.Random(seed)
    victims = chance.choice(["client", "helper", "both", "both"])
    with trainer(uuids, seed) as process:
        if chance.random() < 0.7:
            helper = helper_of(process)
            time.sleep(chance.uniform(0.0, 0.15))
        else:
            time.sleep(chance.uniform(0.0, 1.0))
            helper = next(iter(children_of(process.pid)), 0)
        if victims != "client" and helper:
            kill(helper)
        if victims != "helper":
            kill(process.pid)
    wait_until(lambda: not helper or start_time(helper) is None, "the helper goes on")
    # a child that was started, but not seen, ends by itself
    if victims == "client" and helper:
        assert is_all_back(nvml), f"seed {seed}"
    with contextlib.suppress(SystemExit):
        restore_power.main([])
    wait_until(lambda: is_all_back(nvml), f"seed {seed}")


@pytest.mark.timeout(120)
def test_whoever_is_killed_everything_is_back(nvml: MockNvml, uuids: list[str], directory: Path) -> None:
    for seed in range(4):
        play(nvml, uuids, seed)
    wait_until(lambda: not list(directory.glob("*.jsonl")))
    update = "nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1"
    assert {setting.call for setting in nvml.history()} >= {WRITE, "nvmlDeviceSetGpuLockedClocks", update}


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("driver", ["new", "without a call that replaces profiles"])
def test_whoever_is_killed_a_hundred_times(nvml: MockNvml, uuids: list[str], directory: Path, driver: str) -> None:
    if driver != "new":
        nvml.missing("nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1")
    for seed in range(1000, 1100):
        play(nvml, uuids, seed)
    wait_until(lambda: not list(directory.glob("*.jsonl")))


def test_a_trainer_that_dies_is_noticed_though_its_socket_is_held_by_others(
    nvml: MockNvml, uuids: list[str], directory: Path
) -> None:
    """Ranks are forked from the launching process, and hold whatever it has open."""
    with trainer(uuids, "share", lease=60) as process:
        helper = helper_of(process)
        assert process.stdout is not None
        sleeper = int(process.stdout.readline().split()[1])
        try:
            assert nvml.get("power_limit", 0) == 300_000
            process.kill()
            wait_until(lambda: start_time(helper) is None, "the helper has not noticed it")
            assert is_all_back(nvml) and start_time(sleeper) is not None
        finally:
            kill(sleeper)


def test_a_mistake_of_the_helpers_own_puts_everything_back(
    nvml: MockNvml, uuids: list[str], directory: Path, tmp_path: Path
) -> None:
    program = (
        "import asyncio, sys\n"
        "from lightning_ntp.power import __main__, desk\n"
        "async def tidy(self):\n"
        "    while not desk.Path(sys.argv[2]).with_name('now').exists():\n"
        "        await asyncio.sleep(0.01)\n"
        "    raise RuntimeError('a mistake')\n"
        "desk.Desk.tidy = tidy\n"
        "__main__.main(sys.argv[1:])\n"
    )
    path = tmp_path / "socket"
    command = [sys.executable, "-c", program, "--socket", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    wait_until(path.exists)
    client = Raw(path)
    client.ask(do="hello", job="one", gpus=uuids)
    client.ask(do="set", settings=[{"gpu": gpu, "limit_w": 300} for gpu in uuids])
    assert not is_all_back(nvml)
    (tmp_path / "now").touch()
    said = process.communicate(timeout=20)[1]
    client.close()
    assert b"its own mistake: RuntimeError" in said and is_all_back(nvml)


def test_a_terminal_that_takes_no_lines_holds_nobody_up() -> None:
    program = (
        "import os\nfrom lightning_ntp.power.log import Log\nlog = Log()\n"
        "for _ in range(5000):\n    log.say('x' * 1000)\nlog.close()\nos._exit(3)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE)
    assert process.wait(20) == 3
    process.communicate()


def test_a_trainer_that_is_stopped_loses_its_lease(nvml: MockNvml, uuids: list[str]) -> None:
    with trainer(uuids, lease=0.5) as process:
        helper = helper_of(process)
        wait_until(lambda: not is_all_back(nvml))
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: start_time(helper) is None, "the helper waits for who does not move")
        assert is_all_back(nvml)
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.readline() == b"lost nothing was heard for 0.5 s\n"


def test_a_helper_that_is_stopped_does_not_hold_up_who_asks(
    nvml: MockNvml, helper: Callable[..., PowerHelper], uuids: list[str]
) -> None:
    one = helper(seconds=1.5)
    if not one.open(uuids[:1])[uuids[0]].done:
        pytest.skip("this machine is too busy to start a helper in 1.5 s")
    assert one.pid is not None
    os.kill(one.pid, signal.SIGSTOP)
    begun = time.monotonic()
    (answer,) = one.set(power_limit(uuids[0], 300))
    assert answer.status is Status.LOST and "has not answered within 1.5 s" in answer.why
    assert time.monotonic() - begun < 5
    one.close()
    os.kill(one.pid, signal.SIGCONT)
    wait_until(lambda: start_time(one.pid or 0) is None)
    assert nvml.get("power_limit", 0) == 700_000


@pytest.mark.chaos
def test_a_driver_that_hangs_in_one_gpu_holds_up_no_other(
    nvml: MockNvml, helper: Callable[..., PowerHelper], uuids: list[str], directory: Path
) -> None:
    one = helper()
    one.open(uuids)
    assert all(answer.done for answer in one.set(*(power_limit(gpu, 500) for gpu in uuids)))
    with nvml.block(WRITE, gpu=0) as hang:
        answers = one.set(power_limit(uuids[0], 400), power_limit(uuids[1], 400), power_limit(uuids[2], 600))
        assert [answer.status for answer in answers] == [Status.LATE, Status.DONE, Status.REFUSED]
        begun = time.monotonic()
        assert one.set(power_limit(uuids[3], 450))[0].done and time.monotonic() - begun < 1.5
        assert one.set(power_limit(uuids[0], 650))[0].status is Status.LATE
        hang.release()
        wait_until(lambda: nvml.get("power_limit", 0) == 400_000)
        assert one.set(power_limit(uuids[0], 450))[0].done, "what could not begin in time was never made"
    with nvml.block(WRITE, gpu=0):
        assert one.release(uuids[0])[uuids[0]].status is Status.LATE
    wait_until(lambda: nvml.get("power_limit", 0) == 700_000, "what is to be put back is put back, however late")
    one.close()
    assert is_all_back(nvml) and (WRITE, 650_000) not in [(each.call, each.arguments[0]) for each in nvml.history()]


@pytest.mark.chaos
def test_a_driver_that_hangs_for_ever_delays_the_end_by_seconds_and_the_journal_knows(
    nvml: MockNvml,
    helper: Callable[..., PowerHelper],
    uuids: list[str],
    directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = helper()
    one.open(uuids)
    assert all(answer.done for answer in one.set(*(power_limit(gpu, 500) for gpu in uuids)))
    with nvml.block(WRITE, gpu=0):
        one.close()
        assert one.pid is not None and start_time(one.pid) is None
        assert [nvml.get("power_limit", gpu) for gpu in range(4)] == [500_000, 700_000, 700_000, 700_000]
        assert len(list(directory.glob("*.jsonl"))) == 1
    restore_power.main([])
    assert is_all_back(nvml) and "put back: 700 W (job 'job' had set 500 W)" in capsys.readouterr().out


@pytest.mark.chaos
def test_nvml_that_hangs_at_its_start_is_an_answer(
    nvml: MockNvml, helper: Callable[..., PowerHelper], uuids: list[str]
) -> None:
    one = helper()
    with nvml.block("nvmlInit"):
        (answer,) = one.open(uuids[:1]).values()
        assert answer.status is Status.LATE
    one.close()
