"""The power loop around real training: ranks compute as fast as simulated GPUs do, whose limits are really written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.callbacks import HealthMonitor, PowerManager
from lightning_ntp.engine.events import read_events
from lightning_ntp.launch.device_watch import DeviceWatch
from lightning_ntp.launch.device_watches import DeviceWatches
from lightning_ntp.nvml.profiles import Profile
from lightning_ntp.power.files import DIRECTORY_VARIABLE
from tests.health.watched import GPUS
from tests.nvml.mock import MockNvml
from tests.power.looped import Simulation, moments
from tests.power.standing import Standing, wait_until
from tests.recovery.jobs import Job, train
from tests.recovery.supervised import Supervised, SupervisingProcess

INTERVAL = 0.25
BACKOFF = {"restart_backoff": timedelta(seconds=2)}
"""Time for the draw of the lost GPU to be known, and lent."""


def run(
    supervising: SupervisingProcess,
    directory: Path,
    nvml: MockNvml,
    simulation: Simulation,
    job: Job,
    settings: dict[str, Any],
    **options: Any,
) -> Supervised:
    """A job with a PowerManager, on simulated GPUs."""
    settings = {"gpus": GPUS[: sum(job.degrees)], "interval": INTERVAL, **settings}
    simulation = Simulation(**{**asdict(simulation), "power": settings})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "simulation.json").write_text(json.dumps(asdict(simulation)))
    health = [options.pop("health")] if "health" in options else []
    environment = {**nvml.variables(), **options.pop("environment", {})}
    environment["LIGHTNING_NTP_POWER_DIR"] = str(directory / "journal")
    return supervising.run(
        sum(job.degrees),
        directory,
        train,
        job,
        str(directory),
        monitor=WithHealth(*health, PowerManager(**settings)),
        environment=environment,
        **options,
    )


def machine(nvml: MockNvml, gpus: int, limit_w: float, **values: Any) -> None:
    """GPUs with a limit at start, of 200 W to 700 W, whose temperature follows soon."""
    for gpu in range(gpus):
        limits = {"power_limit": int(limit_w * 1000), "power_min_limit": 100_000, "power_max_limit": 700_000}
        nvml.set(gpu, **{**limits, "time_constant": 2.0, **values})
    nvml.start_model(1.0)


def limits(nvml: MockNvml, gpus: int) -> list[float]:
    return [nvml.get("power_limit", gpu) / 1000 for gpu in range(gpus)]


def sums(nvml: MockNvml, start: list[float], gone: set[int]) -> list[float]:
    """The sum of the limits of the GPUs that work, after every single write."""
    now, found = list(start), []
    for write in nvml.history():
        if write.call == "nvmlDeviceSetPowerManagementLimit":
            now[write.gpu] = write.arguments[0] / 1000
            found.append(sum(watts for gpu, watts in enumerate(now) if gpu not in gone))
    return found


def last_limit(nvml: MockNvml, gpu: int) -> float:
    """The highest limit that a GPU has had, watts."""
    return max((each.arguments[0] / 1000 for each in nvml.history() if each.gpu == gpu), default=0.0)


def events(directory: Path) -> list[dict[str, Any]]:
    return [each for each in read_events(directory / "rows" / "events.jsonl") if each["event"] == "power"]


def left(directory: Path) -> list[str]:
    """Journals, which end soon after what they are about is put back."""
    return [path.name for path in (directory / "journal").glob("*") if path.name != "lock"]


def kept(nvml: MockNvml, directory: Path, start: list[float]) -> None:
    """Everything is as it was, and nothing is left."""
    assert limits(nvml, len(start)) == start
    assert left(directory) == []


JOB = Job((2, 2), module="tests.power.looped:Powered", batches=30, epochs=1)
LOSS = Simulation(sample_s=0.003, dies=((3, 8),))
"""Slot 3 dies: what is left of replica 1, slot 2, has 1.65 times as much to do."""
ROOM = {"ceiling": 650.0, "budget": 1600.0}


def test_a_shrunken_replica_is_given_power_which_is_put_back(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml
) -> None:
    machine(nvml, 4, 185)
    got = run(supervising, tmp_path, nvml, LOSS, JOB, ROOM)
    assert got.code == 0, got.output
    print(got.output)
    assert "power: 4 GPUs with 740 W; headroom 860 W: the budget leaves 860 W" in got.output
    assert "power: replica 1: 250 W per GPU on 1 GPUs, +65 W over the limit at start" in got.output
    assert [last_limit(nvml, gpu) for gpu in (0, 1, 3)] == [0.0, 0.0, 0.0], "only who has lost a GPU is boosted"
    assert 250 <= last_limit(nvml, 2) <= 650
    assert max(sums(nvml, [185.0] * 4, {3})) <= 1600 - 80, "a GPU that is gone still draws 80 W"
    kept(nvml, tmp_path, [185.0] * 4)
    assert ("boost", 1) in [(each["kind"], each["replica"]) for each in events(tmp_path)]
    logged = (tmp_path / "rows" / "metrics.csv").read_text().splitlines()[0]
    assert "ntp/power/replica1/watts" in logged and "ntp/power/joules_per_step" in logged


def test_what_power_cannot_do_samples_do(supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml) -> None:
    """The ceilings are the limits at start: of 24 samples 15 and 9 are the best split for paces of 1 to 1.65."""
    machine(nvml, 4, 185)
    job = replace(JOB, batches=60)
    got = run(supervising, tmp_path, nvml, replace(LOSS, sample_s=0.005), job, {})
    print(got.output)
    assert got.code == 0 and nvml.history() == [], got.output
    assert "power: 4 GPUs with 740 W; headroom 0 W: the ceilings are the limits at start" in got.output
    assert "power: replica 1: headroom 0 W: the ceiling is 185 W, the limit at start" in got.output
    shares = [moment.shares for moment in moments(tmp_path)]
    assert shares[0] == {0: 12, 1: 12} and {8, 9, 10} & {each[1] for each in shares}, shares
    assert all(sum(each.values()) == 24 for each in shares)


@pytest.mark.chaos
def test_power_that_was_lent_is_back_before_its_owner_starts(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml
) -> None:
    machine(nvml, 4, 185)
    job = replace(JOB, batches=60, strategy={"max_restarts": 1})
    got = run(supervising, tmp_path, nvml, LOSS, job, {"ceiling": "maximum"}, max_restarts=1, **BACKOFF)
    print(got.output)
    assert got.code == 0 and "slot 3 joined: degrees (2, 1) -> (2, 2)" in got.output, got.output
    assert last_limit(nvml, 2) > 230, "what slot 3 does not draw was lent"
    assert json.loads((tmp_path / "found-3").read_text())[:4] == [185.0] * 4
    assert max(sums(nvml, [185.0] * 4, {3})) <= 4 * 185 - 80
    assert "power: replica 1: 185 W per GPU again, as at the start" in got.output
    kept(nvml, tmp_path, [185.0] * 4)


@pytest.mark.chaos
@pytest.mark.parametrize("ends", ["raise", "kill helper"])
def test_however_it_ends_limits_are_put_back(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml, ends: str
) -> None:
    machine(nvml, 4, 185)
    simulation = replace(
        LOSS, does=tuple((slot, 25, ends, {}) for slot in ((0,) if ends == "kill helper" else (0, 1, 2)))
    )
    got = run(supervising, tmp_path, nvml, simulation, JOB, ROOM)
    print(got.output)
    assert last_limit(nvml, 2) > 200, got.output
    assert got.code == (1 if ends == "raise" else 0)
    if ends == "kill helper":
        assert "the helper that writes limits is gone" in got.output
        restore(nvml, tmp_path)
    kept(nvml, tmp_path, [185.0] * 4)


def test_without_permission_it_says_what_it_would_do(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml
) -> None:
    machine(nvml, 4, 185)
    got = run(supervising, tmp_path, nvml, LOSS, JOB, ROOM, environment=nvml.variables(root=False))
    print(got.output)
    assert got.code == 0 and nvml.history() == []
    assert got.output.count("power: limits cannot be written: ") == 1
    assert f"{GPUS[2]} would have got 250 W" in got.output and "samples move instead" in got.output


@pytest.mark.chaos
def test_without_permission_the_job_ends_if_it_shall(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml
) -> None:
    machine(nvml, 4, 185)
    settings = {**ROOM, "on_denied": "error"}
    got = run(supervising, tmp_path, nvml, LOSS, JOB, settings, environment=nvml.variables(root=False))
    print(got.output, got.cause)
    assert got.code != 0 and "PowerManager(on_denied='error'): power limits cannot be written" in got.cause + got.output


@pytest.mark.chaos
@pytest.mark.parametrize("what", ["permission", "lost"])
def test_what_befalls_a_gpu_while_it_is_boosted(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml, what: str
) -> None:
    machine(nvml, 4, 185)
    befalls = {"permission": ("permission", {"root": False}), "lost": ("set", {"gpu": 2, "lost": 1})}[what]
    simulation = replace(LOSS, does=((0, 15, *befalls),))
    got = run(supervising, tmp_path, nvml, simulation, replace(JOB, batches=40), ROOM)
    print(got.output)
    assert got.code == 0 and last_limit(nvml, 2) > 200, got.output
    assert f"{GPUS[2]} is not as it was at the start" in got.output
    nvml.set(2, lost=0)
    nvml.permission(True)
    restore(nvml, tmp_path)
    kept(nvml, tmp_path, [185.0] * 4)


CALLS = (
    "nvmlInitWithFlags",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceSetPowerManagementLimit",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
)


@pytest.mark.chaos
@pytest.mark.parametrize("code", [1, 3, 4, 10, 15, 999])
@pytest.mark.parametrize("call", CALLS)
def test_every_error_of_every_call(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml, call: str, code: int
) -> None:
    """Before the loss, in the middle of the boost, and until shortly before the end."""
    machine(nvml, 4, 185)
    does = tuple((0, step, *what) for step in (5, 14) for what in (("fail", {"call": call, "code": code}),))
    simulation = replace(LOSS, does=(*does, (0, 9, "forgive", {}), (0, 35, "forgive", {})))
    got = run(supervising, tmp_path, nvml, simulation, replace(JOB, batches=45), ROOM)
    print(got.output)
    assert got.code == 0, got.output
    kept(nvml, tmp_path, [185.0] * 4)


@pytest.mark.chaos
def test_clocks_that_were_locked_are_raised_and_locked_as_before(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml
) -> None:
    machine(nvml, 4, 700, locked_clock_min=210, locked_clock_max=1200)
    settings = {"levers": ["clocks"], "locked_clocks": [210, 1200]}
    got = run(supervising, tmp_path, nvml, LOSS, JOB, settings)
    print(got.output)
    assert got.code == 0, got.output
    locked = [each.arguments[1] for each in nvml.history() if each.call == "nvmlDeviceSetGpuLockedClocks"]
    assert max(locked) > 1300 and locked[-1] == 1200, locked
    assert not [each for each in nvml.history() if each.call == "nvmlDeviceResetGpuLockedClocks"]
    assert [nvml.get("locked_clock_max", gpu) for gpu in range(4)] == [1200] * 4
    kept(nvml, tmp_path, [700.0] * 4)


@pytest.mark.chaos
def test_profiles_are_requested_while_training_only(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml
) -> None:
    machine(nvml, 4, 185, profiles_supported=[1 << 7, *[0] * 7])
    assert Profile["LLM_TRAINING"] == 7
    got = run(supervising, tmp_path, nvml, LOSS, JOB, {**ROOM, "profiles": ["LLM_TRAINING"]})
    print(got.output)
    assert got.code == 0, got.output
    assert [each for each in nvml.history() if "Profile" in each.call]
    assert [nvml.get("profiles_requested", gpu)[0] for gpu in range(4)] == [0] * 4
    kept(nvml, tmp_path, [185.0] * 4)


@pytest.mark.chaos
def test_a_spare_keeps_its_power_until_it_joins(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml
) -> None:
    """Even where a whole node lends: it may be needed in the very step of a loss."""
    machine(nvml, 5, 185)
    job = replace(JOB, batches=40, strategy={"spares": 1})
    settings = {"ceiling": "maximum", "lend": "node", "gpus": GPUS[:5]}
    simulation = replace(LOSS, dies=((3, 8), (1, 20)))
    got = run(supervising, tmp_path, nvml, simulation, job, settings, spares=1)
    print(got.output)
    assert got.code == 0 and "slot 4 joined" in got.output, got.output
    assert max(sums(nvml, [185.0] * 5, {1, 3})) <= 5 * 185 - 2 * 80, "all writes came after both losses"
    kept(nvml, tmp_path, [185.0] * 5)


class WithHealth:
    """What the launcher makes of two callbacks that have devices watched."""

    def __init__(self, *callbacks: Any) -> None:
        self._callbacks = callbacks

    def device_watch(self) -> DeviceWatch:
        return DeviceWatches([callback.device_watch() for callback in self._callbacks])


@pytest.mark.chaos
def test_a_gpu_that_health_sends_away_lends_its_power(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml
) -> None:
    machine(nvml, 4, 185)
    xid = (0, 6, "push_xid", {"gpu": 3, "xid": 64})
    idle = (0, 20, "set", {"gpu": 3, "load": 0.0})
    simulation = replace(LOSS, dies=(), does=(xid, idle))
    health = HealthMonitor(gpus=GPUS[:4], interval=0.1)
    got = run(supervising, tmp_path, nvml, simulation, replace(JOB, batches=60), {"ceiling": "maximum"}, health=health)
    print(got.output)
    assert got.code == 0 and "slot 3 left (XID 64" in got.output, got.output
    assert last_limit(nvml, 2) > 230, "what the drained GPU does not draw was lent"
    assert max(sums(nvml, [185.0] * 4, {3})) <= 4 * 185 - 80
    kept(nvml, tmp_path, [185.0] * 4)


@pytest.mark.chaos
def test_a_helper_that_runs_alone_serves_a_job_without_rights(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(nvml, 4, 185)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "journal"))
    helper = Standing(tmp_path, "--ceiling", "maximum")
    try:
        settings = {**ROOM, "socket": str(helper.path)}
        got = run(supervising, tmp_path, nvml, LOSS, JOB, settings, environment=nvml.variables(root=False))
        print(got.output, helper.said)
        assert got.code == 0 and 250 <= last_limit(nvml, 2) <= 650, got.output
        wait_until(lambda: limits(nvml, 4) == [185.0] * 4 and left(tmp_path) == [])
    finally:
        helper.end()
    kept(nvml, tmp_path, [185.0] * 4)


@pytest.mark.chaos
@pytest.mark.parametrize("straggler", ["none", "rebalance"])
def test_without_power_nothing_is_written(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml, straggler: str
) -> None:
    machine(nvml, 4, 185)
    got = run(supervising, tmp_path, nvml, LOSS, JOB, {**ROOM, "straggler": straggler})
    print(got.output)
    assert got.code == 0 and nvml.history() == [], got.output
    logged = (tmp_path / "rows" / "metrics.csv").read_text().splitlines()[0]
    assert "ntp/power/replica1/watts" in logged


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("whom", ["the launching process", "the helper", "both"])
def test_kill_nine_at_any_moment_of_a_boost(
    supervising: SupervisingProcess, tmp_path: Path, nvml: MockNvml, whom: str, seed: int
) -> None:
    """What lives puts everything back at once; if nobody does, `restore-power` does it."""
    machine(nvml, 4, 185)
    began = nvml.history()
    supervising.start()
    launching = supervising.pid
    assert launching is not None

    def kill() -> None:
        deadline = time.monotonic() + 60
        while len(nvml.history()) == len(began) and time.monotonic() < deadline:
            time.sleep(0.005)
        helper = nvml.history()[-1].pid
        time.sleep(random.Random(seed).uniform(0.0, 1.0))
        for pid in {"the launching process": [launching], "the helper": [helper]}.get(whom, [launching, helper]):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    got = run(supervising, tmp_path, nvml, LOSS, replace(JOB, batches=80), ROOM)
    killer.join()
    assert (got.code == 0) == (whom == "the helper"), got.output
    if whom == "both":
        restore(nvml, tmp_path)
    wait_until(lambda: limits(nvml, 4) == [185.0] * 4 and left(tmp_path) == [], "it is not put back")
    kept(nvml, tmp_path, [185.0] * 4)


def restore(nvml: MockNvml, directory: Path) -> None:
    """As `lightning-ntp restore-power` does it, for what was left."""
    environment = {**os.environ, **nvml.variables(), "LIGHTNING_NTP_POWER_DIR": str(directory / "journal")}
    command = [sys.executable, "-m", "lightning_ntp", "restore-power"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ceiling": 900.0}, "ceiling=900 W is not between 100 W and 700 W"),
        ({"ceiling": 90.0}, "ceiling=90 W is not between 100 W and 700 W"),
        ({"budget": 300.0}, "budget=300 W is below 400 W, the sum of the lowest limits of 4 GPUs"),
        (
            {"gpus": ["GPU-12345678-0000-0000-0000-000000000000", *GPUS[:3]]},
            "which the driver of this machine does not",
        ),
        ({"gpus": GPUS[:3]}, "names 3 devices, but the job has 4 slots"),
    ],
)
def test_what_does_not_fit_the_hardware_is_told_before_anything_starts(
    nvml: MockNvml, settings: dict[str, Any], message: str
) -> None:
    machine(nvml, 4, 185)
    watch = PowerManager(**settings).device_watch()
    with pytest.raises(ValueError, match=message):
        watch.check(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"straggler": "fast"}, "straggler='fast' must be one of"),
        ({"levers": ("fans",)}, r"levers=\['fans'\] must be some of"),
        ({"levers": "clocks"}, "levers='clocks' must be a list"),
        ({"locked_clocks": 1200}, "locked_clocks=1200 must be a list"),
        ({"margin": None}, "margin=None"),
        ({"ceiling": None}, "ceiling=None"),
        ({"max_temperature": 1000}, "max_temperature=1000"),
        ({"interval": 0.001}, "interval=0.001"),
        ({"socket": 3}, "socket=3 must be a path"),
        ({"gpus": ["0", "1"]}, "gpus: '0' is no UUID"),
        ({"gpus": [GPUS[0], GPUS[0]]}, "names a GPU twice"),
        ({"ceiling": "high"}, "ceiling='high' must be one of .* or a number of watts"),
        ({"ceiling": 0}, "ceiling=0 must be a number above 0"),
        ({"budget": float("nan")}, "budget=nan"),
        ({"lost_draw": -1}, "lost_draw=-1"),
        ({"interval": 0}, "interval=0"),
        ({"interval": True}, "interval=True"),
        ({"margin": -2.0}, "margin=-2.0"),
        ({"max_temperature": 5}, "max_temperature=5"),
        ({"locked_clocks": (1500, 1200)}, "the lower one first"),
        ({"profiles": (-1,)}, "profiles="),
        ({"tokens_per_step": 0}, "tokens_per_step=0"),
        ({"on_denied": "ignore"}, "on_denied='ignore'"),
        ({"lend": "rack"}, "lend='rack'"),
        ({"gpus": [""]}, "gpus: '' is no UUID"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerManager(**settings)
