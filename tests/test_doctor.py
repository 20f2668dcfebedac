"""``lightning-ntp doctor``: what it sees, and what it would not train on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_ntp.commands import doctor
from tests.nvml.mock import MockNvml

SIZES = "--heads 32 --kv-heads 8 --hidden 4096 --ffn 14336 --vocab 128256 --layers 32".split()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        doctor.main(arguments)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out + err


def states(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    _, text = run(capsys, "--json", *arguments)
    return {check["what"]: (check["state"], check["text"]) for check in json.loads(text)}


def test_a_healthy_machine(nvml: MockNvml, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys)
    assert status == 0 and "training would survive a loss here" in text
    assert "8 GPUs" in text and nvml.get("uuid", 7) in text
    assert "degrees (4, 4): the loss of any slot is survived" in text
    assert states(capsys)["memory"][0] == "warning"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"recovery_action": 1}, "the driver asks for its recovery (action 1)"),
        ({"margin_temperature": 0, "temperature": 88}, "88 degrees C, where it slows down"),
        ({"lost": 1}, "does not say everything"),
    ],
)
def test_a_sick_device_is_named(
    nvml: MockNvml, capsys: pytest.CaptureFixture[str], values: dict[str, Any], said: str
) -> None:
    nvml.set(3, **values)
    status, text = run(capsys)
    assert status == 1 and said in text and "would not survive a loss here: GPU 3" in text


def test_of_a_device_that_does_not_answer_nothing_is_made_up(
    nvml: MockNvml, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml.set(2, lost=1)
    line = states(capsys)["GPU 2"][1]
    assert line.startswith("does not say everything") and "NVLinks" not in line


def test_one_replica_has_no_second_copy(nvml: MockNvml, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "--degrees", "8")
    assert status == 1 and "only copies on the lost slots" in text and "redundancy='neighbor'" in text
    assert run(capsys, "--degrees", "8", "--redundancy", "neighbor")[0] == 0


def test_room_for_a_shrink(nvml: MockNvml, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3 8B with AdamW in float32 holds 96 GB; on four devices a replica 24 GB each, on three 32 GB."""
    assert states(capsys, *SIZES, "--memory", "80")["memory"][0] == "ok"
    state, text = states(capsys, *SIZES, "--memory", "32")["memory"]
    assert state == "fails" and "while shards move" in text


def test_no_driver_is_no_reason_to_fail(
    nvml: MockNvml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.set(init_error=9)
    status, text = run(capsys, "--degrees", "2", "2")
    assert status == 0 and "the health of GPUs is not watched" in text


def test_a_setting_that_lets_nccl_end_ranks(
    nvml: MockNvml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    status, text = run(capsys)
    assert status == 1 and "TORCH_NCCL_ASYNC_ERROR_HANDLING=1: leave it unset" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--degrees 0 4", "degree"),
        ("--degrees 2 2 --heads 4", "missing"),
        ("--degrees 2 2 --min-tensor-parallel-size 3", "min_tensor_parallel_size"),
        ("--degrees two", "invalid int value"),
        ("--heartbeat 0", "heartbeat must be at least 1 s"),
        ("--timeout nan", "heartbeat must be at least 1 s"),
    ],
)
def test_nonsense_is_said_in_a_line(
    nvml: MockNvml, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    status, text = run(capsys, *arguments.split())
    assert status in (1, 2) and said in text and "Traceback" not in text
