"""From what the driver says to what the job does: the real pynvml over a stand-in for the driver, and real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.callbacks import HealthMonitor
from lightning_ntp.health import Action, SeverityTable
from tests.health.watched import GPUS
from tests.nvml.mock import MockNvml
from tests.recovery.jobs import Worlds
from tests.recovery.supervised import Supervised, SupervisingProcess
from tests.recovery.test_health import STAY, until, watched

pytestmark = pytest.mark.parametrize("nvml", [4], indirect=True)


def chaos(*values: Any) -> list[Any]:
    """Parameters that only `make chaos` runs."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.chaos) for value in values
    ]


def befalls(step: int, slot: int, what: str, phase: str = "start", **arguments: Any) -> dict[str, Any]:
    """Slot ``slot`` lets something befall its GPU."""
    return {
        "step": step,
        "slot": slot,
        "call": "gpu",
        "phase": phase,
        "arguments": {"what": what, "gpu": slot, **arguments},
    }


def run(
    supervising: SupervisingProcess,
    world: Worlds,
    directory: Path,
    nvml: MockNvml,
    strikes: list[dict[str, Any]],
    monitor: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Supervised, list[dict[str, Any]]]:
    options = {**STAY, **options}
    return watched(
        supervising,
        world,
        directory,
        strikes,
        monitor={"nvml": True, "interval": 0.1, **(monitor or {})},
        environment=nvml.variables(),
        **options,
    )


def actions(events: list[dict[str, Any]], least: str = "suspect") -> list[tuple[int, str]]:
    order = ["ignore", "log", "suspect", "restart", "drain", "dead"]
    return [(e["slot"], e["action"]) for e in events if order.index(e["action"]) >= order.index(least)]


def test_the_stand_in_has_the_devices_of_these_tests(nvml: MockNvml) -> None:
    assert [nvml.get("uuid", gpu) for gpu in range(4)] == GPUS[:4]


@pytest.mark.parametrize("phase", ["backward", *chaos("start")])
def test_off_the_bus_in_the_middle_of_a_step(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml, phase: str
) -> None:
    strikes = [befalls(2, 3, "push_xid", phase, xid=79), {**until(2, "dead"), "phase": "backward"}]
    got, events = run(supervising, world, tmp_path, nvml, strikes, degrees=(2, 1), there={0, 1, 2})
    assert "slot 3: XID 79 (ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS)" in got.output
    assert actions(events) == [(3, "dead")]


@pytest.mark.parametrize(
    ("xid", "action"), [(64, "drain"), (95, "dead"), *chaos((63, "log"), (48, "dead"), (45, "log"))]
)
def test_errors_of_memory(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml, xid: int, action: str
) -> None:
    goes: dict[str, Any] = {} if action == "log" else {"degrees": (2, 1), "there": {0, 1, 2}}
    strikes = [befalls(2, 3, "push_xid", xid=xid), until(3, action)]
    got, events = run(supervising, world, tmp_path, nvml, strikes, **goes)
    assert actions(events) == ([] if action == "log" else [(3, action)])
    assert f"slot 3: XID {xid}" in got.output


def test_a_mistake_of_the_program_on_all_devices(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    strikes = [befalls(2, slot, "push_xid", xid=xid) for slot in range(4) for xid in (13, 31)]
    _, events = run(supervising, world, tmp_path, nvml, [*strikes, until(3, "log")])
    assert {(event["code"], event["action"]) for event in events} == {(13, "log"), (31, "log")}


def test_a_contained_error(supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml) -> None:
    strikes = [befalls(2, 3, "push_xid", xid=94), until(3, "restart")]
    got, _ = run(supervising, world, tmp_path, nvml, strikes, waits=(5,), max_restarts=1)
    assert "slot 3 joined" in got.output


@pytest.mark.parametrize("action", [0, 1, *chaos(2, 3, 4, 5, 6, 7)])
def test_the_recovery_action_decides(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml, action: int
) -> None:
    strikes = [
        befalls(2, 3, "set", recovery_action=action),
        befalls(2, 3, "push_xid", xid=154),
        until(4, "log", *(["drain"] if action else [])),
    ]
    goes: dict[str, Any] = {"degrees": (2, 1), "there": {0, 1, 2}} if action else {}
    _, events = run(supervising, world, tmp_path, nvml, strikes, **goes)
    assert actions(events) == ([(3, "drain")] if action else [])


def test_no_margin_to_the_slow_down_temperature(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    rules = {"signals": {"temperature_margin": {"hold": 0.3}}}
    strikes = [befalls(2, 3, "set", margin_temperature=0), until(4, "drain")]
    got, events = run(supervising, world, tmp_path, nvml, strikes, {"rules": rules}, degrees=(2, 1), there={0, 1, 2})
    assert actions(events) == [(3, "drain")] and "slot 3 left (temperature margin: " in got.output


@pytest.mark.chaos
def test_no_margin_for_a_whole_minute(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    strikes = [befalls(2, 3, "set", margin_temperature=0), {**until(4, "drain"), "patience": 90.0}]
    got, events = run(supervising, world, tmp_path, nvml, strikes, degrees=(2, 1), there={0, 1, 2})
    assert actions(events) == [(3, "drain")] and "for 60 s" in got.output


def test_a_call_that_hangs_suspects_its_device_and_holds_up_nothing(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    strikes = [
        befalls(2, 3, "block", call="nvmlDeviceGetFieldValues"),
        {**until(4, "suspect"), "patience": 60.0},
        # of another device all is still heard
        befalls(5, 0, "push_xid", xid=64),
        until(6, "drain"),
    ]
    got, events = run(supervising, world, tmp_path, nvml, strikes, degrees=(1, 2), there={1, 2, 3})
    assert actions(events) == [(3, "suspect"), (0, "drain")]
    assert "slot 3: stalled: nvmlDeviceGetFieldValues has not answered" in got.output


def test_every_call_says_that_the_device_is_lost(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    strikes = [befalls(2, 3, "fail_all", code=15), until(4, "dead")]
    got, events = run(supervising, world, tmp_path, nvml, strikes, degrees=(2, 1), there={0, 1, 2})
    assert actions(events) == [(3, "dead")] and "slot 3: gpu lost" in got.output


@pytest.mark.chaos
def test_a_device_that_was_lost_comes_back(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    strikes = [
        befalls(2, 3, "set", lost=1),
        until(4, "dead"),
        {"step": 5, "slot": 0, "call": "gpu", "arguments": {"what": "set", "gpu": 3, "lost": 0}},
    ]
    got, _ = run(supervising, world, tmp_path, nvml, strikes, waits=(6,), max_restarts=1)
    assert "slot 3 joined" in got.output


def test_all_devices_lost_at_once_end_nobody(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    everybody = {"step": 2, "slot": 0, "call": "gpu", "arguments": {"what": "set", "gpu": None, "lost": 1}}
    got, events = run(supervising, world, tmp_path, nvml, [everybody, until(4, "suspect")])
    assert "dead" not in {event["action"] for event in events}, got.output


_ROWS = {int(key[4:]): rule for key, rule in SeverityTable().rows() if key.startswith("xid.") and key[4:].isdecimal()}
_MILD = [code for code, rule in _ROWS.items() if rule.action <= Action.SUSPECT]
_GRAVE = [code for code, rule in _ROWS.items() if rule.action > Action.SUSPECT]


@pytest.mark.chaos
@pytest.mark.parametrize("xid", _GRAVE)
def test_each_row_of_the_table_that_sends_a_slot_away(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml, xid: int
) -> None:
    action = str(_ROWS[xid].action)
    strikes = [befalls(2, 3, "push_xid", xid=xid), until(4, action)]
    _, events = run(supervising, world, tmp_path, nvml, strikes, degrees=(2, 1), there={0, 1, 2})
    assert actions(events) == [(3, action)]


@pytest.mark.chaos
def test_all_other_rows_of_the_table(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    strikes = [befalls(2, 3, "push_xid", xid=xid) for xid in _MILD]
    last = [befalls(3, 3, "push_xid", xid=1000), {**until(6, "suspect"), "code": 1000}]
    _, events = run(supervising, world, tmp_path, nvml, [*strikes, *last])
    said = {event["code"]: event["action"] for event in events if event["signal"] == "xid" and event["code"] < 1000}
    assert said == {code: str(_ROWS[code].action) for code in _MILD}


def test_a_signal_that_flaps_a_thousand_times_sends_its_slot_away_once(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    strikes = [
        *(befalls(2, 3, "flap", times=1000), until(4, "drain")),
        *(
            {"step": step, "slot": 0, "call": "gpu", "arguments": {"what": "flap", "gpu": 3, "times": 100}}
            for step in (5, 6)
        ),
    ]
    got, events = run(
        supervising, world, tmp_path, nvml, strikes, {"interval": 0.01}, degrees=(2, 1), there={0, 1, 2}, max_restarts=3
    )
    assert [each for each in actions(events) if each[1] != "suspect"] == [(3, "drain")], got.output


def test_devices_that_the_driver_does_not_have_are_an_error_at_the_start(nvml: MockNvml) -> None:
    monitor = HealthMonitor(gpus=[*GPUS[:3], "GPU-ffffffff-0000-0000-0000-000000000000"])
    with pytest.raises(ValueError, match="gpus names GPU-ffffffff-.*, which the driver of this machine does not have"):
        monitor.device_watch().check(4)


def test_without_a_driver_training_goes_on(
    supervising: SupervisingProcess, world: Worlds, tmp_path: Path, nvml: MockNvml
) -> None:
    nvml.set(init_error=9)  # NVML_ERROR_DRIVER_NOT_LOADED
    got, events = run(supervising, world, tmp_path, nvml, [{"step": 2, "slot": 0, "call": "sleep", "values": [3.0]}])
    assert "health of GPUs is not watched" in got.output and not events
