"""The source, when there is no driver, when the driver hangs, when its process dies, and at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from lightning_ntp.launch.lifeline import children_of
from lightning_ntp.nvml import NvmlSource
from tests.nvml.listening import Listening, listening, wait_until
from tests.nvml.mock import MockNvml

# ---- no driver ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [9, 12, 18, 4, 13])
def test_without_a_driver_there_is_one_line_and_nothing_else(
    nvml: MockNvml, source: NvmlSource, uuids: list[str], warnings: Callable[[], list[str]], code: int
) -> None:
    nvml.set(init_error=code)
    ears = Listening(source, {0: uuids[0]})
    ears.thread.join(20)
    assert not ears.thread.is_alive(), "the source has not ended"
    assert list(source(ears.job)) == [], "and when it is called again, it ends at once"
    (line,) = warnings()
    assert line.startswith("health of GPUs is not watched: ") and line.endswith("; training goes on")
    assert ears.findings == []


def test_without_the_library_it_says_which_one(
    nvml: MockNvml,
    source: NvmlSource,
    uuids: list[str],
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    ears = Listening(source, {0: uuids[0]})
    ears.thread.join(20)
    assert not ears.thread.is_alive()
    assert warnings() == ["health of GPUs is not watched: NVML Shared Library Not Found; training goes on"]


def test_a_start_that_fails_for_now_is_tried_again(nvml: MockNvml, source: NvmlSource, uuids: list[str]) -> None:
    nvml.set(init_error=pynvml.NVML_ERROR_UNKNOWN)
    with listening(source, {0: uuids[0]}) as ears:
        ears.wait_for("nvml_error", uuids[0], code=pynvml.NVML_ERROR_UNKNOWN)
        nvml.set(init_error=0)
        ears.wait_for("nvml_error", uuids[0], clears=True)
        ears.wait_for("healthy", uuids[0])


# ---- hangs ----------------------------------------------------------------------------------------------------


def test_a_call_that_hangs_is_named_and_holds_up_nobody_else(
    nvml: MockNvml, source: NvmlSource, uuids: list[str]
) -> None:
    with listening(source, dict(enumerate(uuids))) as ears:
        ears.wait_for_events(nvml, *uuids)
        rule = nvml.block("nvmlDeviceGetFieldValues", gpu=1)
        finding = ears.wait_for("stalled", uuids[1])
        assert finding.text.startswith("nvmlDeviceGetFieldValues has not answered for ")
        nvml.set(gpu=2, recovery_action=1)
        ears.wait_for("recovery_action", uuids[2])
        nvml.push_xid(1, 119)
        ears.wait_for("xid", uuids[1], code=119)
        ears.wait_for_look(uuids[0])
        rule.release()
        ears.wait_for("stalled", uuids[1], clears=True)
        ears.wait_for_look(uuids[1])
        assert ears.signals() == {"stalled", "recovery_action", "xid"}


@pytest.mark.chaos
def test_while_a_call_hangs_nvml_is_not_started_anew(nvml: MockNvml, source: NvmlSource, uuids: list[str]) -> None:
    with listening(source, dict(enumerate(uuids))) as ears:
        ears.wait_for_events(nvml, *uuids)
        rule = nvml.block("nvmlDeviceGetTemperatureV", gpu=1)
        ears.wait_for("stalled", uuids[1])
        nvml.set(gpu=2, lost=1)
        ears.wait_for("gpu_lost", uuids[2])
        ears.wait_for_look(uuids[0])
        rule.release()
        nvml.set(gpu=2, lost=0)
        ears.wait_for("gpu_lost", uuids[2], clears=True)


def test_a_driver_that_hangs_at_its_start_stalls_all_devices(
    nvml: MockNvml, source: NvmlSource, uuids: list[str]
) -> None:
    rule = nvml.block("nvmlInit")
    with listening(source, {0: uuids[0], 1: uuids[1]}) as ears:
        assert ears.wait_for("stalled", uuids[0]).text.startswith("nvmlInit has not answered")
        ears.wait_for("stalled", uuids[1])
        rule.release()
        ears.wait_for("stalled", uuids[0], clears=True)
        ears.wait_for("stalled", uuids[1], clears=True)


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetFieldValues", "nvmlEventSetWait"])
def test_a_driver_that_hangs_does_not_hold_up_the_end(
    nvml: MockNvml, source: NvmlSource, uuids: list[str], call: str
) -> None:
    rule = nvml.block(call)
    with listening(source, {0: uuids[0]}) as ears:
        rule.wait()
        pid = ears.pid()
        ears.end()
        assert pid not in children_of(os.getpid())


@pytest.mark.chaos
def test_a_process_that_says_nothing_any_more_is_replaced(
    nvml: MockNvml, source: NvmlSource, uuids: list[str], warnings: Callable[[], list[str]]
) -> None:
    nvml.set(gpu=0, margin_temperature=-1)
    with listening(source, {0: uuids[0], 1: uuids[1]}) as ears:
        ears.wait_for("temperature_margin", uuids[0])
        ears.wait_for_events(nvml, *uuids[:2])
        pid = ears.pid()
        os.kill(pid, signal.SIGSTOP)
        ears.wait_for("stalled", uuids[0])
        assert "has said nothing for" in ears.wait_for("stalled", uuids[1]).text
        ears.wait_for("stalled", uuids[0], clears=True)
        assert ears.pid() != pid
        nvml.set(gpu=0, margin_temperature=9)
        ears.wait_for("temperature_margin", uuids[0], clears=True)
        assert [told for told in ears.told() if told[0] == "temperature_margin"] == [
            ("temperature_margin", "0", None, False),
            ("temperature_margin", "0", None, True),
        ], "the new process knows what was told"
    assert len(warnings()) == 1


def test_a_killed_process_comes_back_and_knows_what_was_told(
    nvml: MockNvml, source: NvmlSource, uuids: list[str], warnings: Callable[[], list[str]]
) -> None:
    nvml.set(gpu=0, recovery_action=1)
    with listening(source, {0: uuids[0], 1: uuids[1]}) as ears:
        ears.wait_for("recovery_action", uuids[0])
        wait_until(lambda: uuids[0] in source.readings)
        pid = ears.pid()
        os.kill(pid, signal.SIGKILL)
        nvml.set(gpu=0, recovery_action=0)
        ears.wait_for("recovery_action", uuids[0], code=1, clears=True)
        assert ears.pid() != pid
        ears.wait_for_look(uuids[1])
        assert ears.signals() == {"recovery_action"}
    assert warnings() == ["the process that asks NVIDIA's driver is started again: it was killed (SIGKILL)"]


def test_a_process_that_dies_after_an_event_leaves_no_condition_without_an_end(
    nvml: MockNvml, uuids: list[str]
) -> None:
    source = NvmlSource(interval=0.1, renew=600.0)  # so that it does not end it itself
    with listening(source, {0: uuids[0]}) as ears:
        ears.wait_for_events(nvml, uuids[0])
        nvml.push_event(0, pynvml.nvmlEventTypeGpuUnavailableError)
        ears.wait_for("gpu_unavailable", uuids[0])
        os.kill(ears.pid(), signal.SIGKILL)
        ears.wait_for("gpu_unavailable", uuids[0], clears=True)


# ---- ends -----------------------------------------------------------------------------------------------------


def test_a_closed_generator_leaves_no_process(nvml: MockNvml, source: NvmlSource, uuids: list[str]) -> None:
    ears = Listening(source, {0: uuids[0]})
    ears.end()
    before = children_of(os.getpid())
    job = type(ears.job)(Path(), lambda: {0: uuids[0]}, lambda: [0], lambda: False)
    findings = source(job)
    assert next(iter(findings)).signal == "healthy"
    assert len(children_of(os.getpid()) - before) == 1
    findings.close()  # type: ignore[attr-defined]
    assert children_of(os.getpid()) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_sent_to_the_whole_group_is_not_for_the_process(
    nvml: MockNvml, source: NvmlSource, uuids: list[str], number: int
) -> None:
    with listening(source, {0: uuids[0]}) as ears:
        ears.wait_for_events(nvml, uuids[0])
        pid = ears.pid()
        os.kill(pid, number)
        ears.wait_for_look(uuids[0])
        assert ears.pid() == pid


@pytest.mark.parametrize("call", ["", "nvmlDeviceGetFieldValues"])
def test_the_process_dies_with_who_launched_it(nvml: MockNvml, uuids: list[str], call: str) -> None:
    rule = nvml.block(call) if call else None
    script = (
        "import sys; from pathlib import Path; from lightning_ntp.health.findings import WatchedJob\n"
        "from lightning_ntp.nvml import NvmlSource\n"
        f"job = WatchedJob(Path(), lambda: {{0: {uuids[0]!r}}}, lambda: [0], lambda: False)\n"
        "for finding in NvmlSource(0.1, stall=0.1)(job): print(finding.signal, flush=True)\n"
    )
    environment = {**nvml.environment(), "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline().strip() in (b"healthy", b"stalled")
        (child,) = children_of(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, child) > os.getpriority(os.PRIO_PROCESS, 0), "training goes first"
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: not Path(f"/proc/{child}").exists() or b"Z" in Path(f"/proc/{child}/stat").read_bytes())
    if rule is not None:
        rule.release()


def test_an_end_of_its_input_ends_the_process(nvml: MockNvml, uuids: list[str]) -> None:
    command = [sys.executable, "-m", "lightning_ntp.nvml"]
    environment = {**nvml.environment(), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert b"heartbeat" in process.stdout.readline()
        process.stdin.write(b'{"watch": ["%s"], "interval": 0.1, "renew": 1}\n' % uuids[0].encode())
        process.stdin.flush()
        assert any(b'"healthy"' in line for line in iter(process.stdout.readline, b""))
        process.stdin.close()
        assert process.wait(20) == 0
