"""The helper that runs by itself: who may speak to it, what it makes of nonsense, and who has which GPU."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ntp.power.client import PowerHelper, power_limit
from lightning_ntp.power.putting_back import Status
from lightning_ntp.power.requests import MOST_LINE_BYTES, Refusal, Request, parse
from tests.nvml.mock import MockNvml
from tests.power.standing import ROOT, Raw, Standing, wait_until

Make = Callable[..., Standing]
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def test_two_clients_each_have_their_own_gpus(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    helper = standing()
    assert stat.S_IMODE(helper.path.stat().st_mode) == 0o660
    first, second = helper.client(), helper.client()
    assert first.ask(id=1, do="hello", job="one", gpus=uuids[:2])["id"] == 1
    taken = second.ask(do="hello", job="two", gpus=uuids[1:3])["gpus"]
    assert taken[uuids[1]]["status"] == "refused" and taken[uuids[1]]["why"] == "it is in use by job 'one'"
    assert taken[uuids[2]]["status"] == "done"
    (answer,) = second.ask(do="set", gpu=uuids[0], limit_w=300)["settings"]
    assert (answer["status"], answer["why"]) == ("refused", "it was not taken")
    first.ask(do="set", gpu=uuids[1], limit_w=400)
    assert second.ask(do="state")["gpus"][uuids[1]] == {
        "job": "one",
        "limit_w": 400.0,
        "clocks_mhz": None,
        "profiles": None,
        "leaving": False,
    }
    first.close()
    wait_until(lambda: second.ask(do="hello", job="two", gpus=uuids[1:3])["gpus"][uuids[1]]["status"] == "done")
    assert nvml.get("power_limit", 1) == 700_000
    assert second.ask(do="ping", id="a") == {"id": "a"}


def test_two_helpers_do_not_fight(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    first, second = standing().client(), standing().client()
    first.ask(do="hello", job="one", gpus=uuids[:1])
    taken = second.ask(do="hello", job="two", gpus=uuids[:2])["gpus"]
    assert taken[uuids[0]]["status"] == "refused" and "in use by job 'one' (process" in taken[uuids[0]]["why"]
    assert taken[uuids[1]]["status"] == "done"


@pytest.mark.chaos
def test_a_helper_puts_back_what_another_one_leaves_that_is_killed(
    nvml: MockNvml, standing: Make, uuids: list[str], directory: Path
) -> None:
    first, _ = standing(), standing()
    client = first.client()
    client.ask(do="hello", job="one", gpus=uuids[:1])
    client.ask(do="set", gpu=uuids[0], limit_w=300)
    first.process.kill()
    wait_until(lambda: nvml.get("power_limit", 0) == 700_000 and not list(directory.glob("*.jsonl")))


def test_a_hello_gives_up_what_it_does_not_name(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    client = standing().client()
    client.ask(do="hello", job="one", gpus=uuids[:2])
    client.ask(do="set", settings=[{"gpu": gpu, "limit_w": 300} for gpu in uuids[:2]])
    client.ask(do="hello", job="one", gpus=uuids[1:2])
    wait_until(lambda: nvml.get("power_limit", 0) == 700_000)
    assert nvml.get("power_limit", 1) == 700_000, "what is named again begins anew"
    wait_until(lambda: list(client.ask(do="state")["gpus"]) == uuids[1:2])  # its thread has still to let go


def test_another_user_is_turned_away(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    helper = standing("--allow-uid", "54321")
    client = helper.client()
    message = client.hear()
    assert message is not None and f"user {os.geteuid()} is not among those that are allowed" in message["ended"]
    client.say(json.dumps({"do": "hello", "job": "one", "gpus": uuids}).encode() + b"\n")
    assert client.hear() is None
    wait_until(lambda: f"of user {os.geteuid()} is refused" in helper.said)  # read from its stderr
    assert nvml.history() == []
    one = PowerHelper("job", helper.path)
    (answer,) = one.open(uuids[:1]).values()
    assert answer.status is Status.LOST and "is not among those that are allowed" in answer.why
    one.close()


def test_a_client_that_is_silent_loses_its_lease(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    client = standing("--lease", "0.5").client()
    assert client.ask(do="hello", job="one", gpus=uuids)["lease_s"] == 0.5
    client.ask(do="set", gpu=uuids[0], limit_w=300)
    for _ in range(4):
        time.sleep(0.25)
        client.say(b'{"do": "ping"}\n')
    assert nvml.get("power_limit", 0) == 300_000
    assert client.hear() == {"ended": "nothing was heard for 0.5 s"} and client.hear() is None
    wait_until(lambda: nvml.get("power_limit", 0) == 700_000)


def test_a_client_cannot_write_as_often_as_it_wants(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    client = standing("--rate", "4").client()
    client.ask(do="hello", job="one", gpus=uuids)
    answers = [client.ask(do="set", gpu=uuids[0], limit_w=300 + n)["settings"][0] for n in range(20)]
    assert len(nvml.history()) < 12
    assert {answer["why"] for answer in answers if answer["status"] == "refused"} == {"more than 4 writes per second"}
    assert client.ask(do="release", gpu="all")["gpus"][uuids[0]]["status"] == "done"


def test_there_is_an_end_to_clients_lines_and_unread_answers(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    helper = standing("--clients", "2")
    first, second, third = helper.client(), helper.client(), helper.client()
    first.ask(do="ping", id=1)
    second.ask(do="ping", id=1)
    assert third.hear() == {"ended": "there are 2 clients already (--clients)"}
    second.say(b"x" * (2 * MOST_LINE_BYTES))
    assert second.hear() == {"ended": "a line was too long"}
    fourth = helper.client()
    fourth.ask(do="hello", job="one", gpus=uuids)
    fourth.ask(do="set", gpu=uuids[0], limit_w=300)
    fourth._socket.settimeout(0.2)
    try:
        while True:  # it reads no answer
            fourth._socket.sendall(b'{"do": "nothing"}\n' * 100)
    except OSError:
        pass
    fourth.close()
    wait_until(lambda: nvml.get("power_limit", 0) == 700_000)
    assert first.ask(do="ping", id=2) == {"id": 2}


texts = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["do", "id", "job", "gpus", "gpu", "limit_w", "clocks_mhz", "profiles", "settings"])
words = st.sampled_from(["hello", "set", "release", "state", "ping", "all", "GPU-1"])
messages = st.dictionaries(names, words | json_values, max_size=5)
lines = st.binary(max_size=200).map(lambda data: data.replace(b"\n", b" ")) | messages.map(
    lambda message: json.dumps(message).encode()
)


@given(lines)
def test_a_message_is_a_request_or_a_refusal(line: bytes) -> None:
    try:
        request = parse(line)
    except Refusal as refusal:
        assert str(refusal).isprintable()
    else:
        assert isinstance(request, Request)


@pytest.mark.parametrize("line", [b"[" * 50_000, b'{"do":"set","gpu":"GPU-1","limit_w":' + b"9" * 5000 + b"}", b"\xff"])
def test_what_breaks_parsers_is_refused(line: bytes) -> None:
    with pytest.raises(Refusal):
        parse(line)


def test_nonsense_is_refused_and_the_helper_lives(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    helper = standing()
    owner = helper.client()
    owner.ask(do="hello", job="one", gpus=uuids)

    @FUZZ
    @given(st.lists(lines, min_size=1, max_size=8), st.booleans())
    def play(said: list[bytes], cut: bool) -> None:
        client = Raw(helper.path)
        client.say(b"\n".join(said) + (b"" if cut else b"\n"))
        if not cut:
            client.say(b'{"do": "ping", "id": "the end"}\n')
            while (answer := client.hear()) != {"id": "the end"}:
                assert answer is not None
        client.close()
        owner.say(b'{"do": "ping"}\n')

    play()
    owner.say(b"nonsense\n")
    assert owner.hear() == {"id": None, "refused": "it is no JSON"}
    assert list(owner.ask(do="state")["gpus"]) == uuids and helper.process.poll() is None
    wait_until(lambda: "it is no JSON: b'nonsense" in helper.said)
    assert nvml.history() == []


def test_no_value_gets_past_the_bounds(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    nvml.set(power_limit=600_000, profiles_supported=[0b10111], profile_conflicts={1 * 8: 1 << 2})
    client = standing("--rate", "100000").client()
    client.ask(do="hello", job="one", gpus=uuids)

    @FUZZ
    @given(
        st.sampled_from(uuids),
        st.floats(-1e6, 1e6) | st.floats(150, 750) | st.integers(),
        st.lists(st.integers(0, 3000), min_size=2, max_size=2),
        st.lists(st.integers(0, 5) | st.integers(-1, 256), max_size=4),
    )
    def play(gpu: str, watts: float, clocks: list[int], profiles: list[int]) -> None:
        values = {"limit_w": watts, "clocks_mhz": clocks, "profiles": profiles}
        for message in ({"gpu": gpu, name: value} for name, value in values.items()):
            answer = client.ask(do="set", **message)
            assert "refused" in answer or answer["settings"][0]["status"] in ("done", "refused")

    play()
    for setting in nvml.history():
        if setting.call == "nvmlDeviceSetPowerManagementLimit":
            assert 200_000 <= setting.arguments[0] <= 600_000
        elif "Profile" in setting.call:
            mask, beyond = setting.arguments
            assert mask & ~0b10111 == 0 and mask & 0b110 != 0b110 and beyond == 0
        else:
            assert 210 <= setting.arguments[0] <= setting.arguments[1] <= 1980


def test_it_takes_the_place_of_a_socket_that_nobody_listens_on(
    nvml: MockNvml, standing: Make, directory: Path, tmp_path: Path
) -> None:
    helper = standing()
    command = [sys.executable, "-m", "lightning_ntp.power", "--socket"]
    for path, said in ((helper.path, "another helper listens there"), (ROOT / "LICENSE", "there is something else")):
        done = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr
    helper.process.kill()
    helper.process.wait()
    (tmp_path / "0.log").unlink()  # so that the next one gets the same name
    assert standing().client().ask(do="ping", id=1) == {"id": 1}


def test_a_client_of_a_socket(nvml: MockNvml, standing: Make, uuids: list[str]) -> None:
    helper = standing()
    lost: list[str] = []
    one = PowerHelper("job", helper.path, on_lost=lost.append)
    assert one.open(uuids[:1])[uuids[0]].done and one.pid is None
    assert one.set(power_limit(uuids[0], 300))[0].done
    helper.end()
    wait_until(lambda: lost)
    assert nvml.get("power_limit", 0) == 700_000 and "the helper ends" in lost[0]
    one.close()
