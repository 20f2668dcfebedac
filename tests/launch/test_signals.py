"""SIGINT and SIGTERM reach every rank exactly once, however they were sent."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_ntp.launch import StopRequest
from lightning_ntp.launch.relay import SignalRelay
from tests.launch.scripts import running, wait_for, write

#: Counts the signals a rank gets during a second, and leaves with 10 + the first one's number.
COUNT = """
import signal
got = []
for s in (signal.SIGINT, signal.SIGTERM):
    signal.signal(s, lambda n, _: got.append(n))
open(f"ready-{slot}", "w").close()
while not got:
    time.sleep(0.02)
time.sleep(1.0)
open(f"got-{slot}", "w").write(" ".join(map(str, map(int, got))))
sys.exit(10 + got[0])
"""

GRACEFUL = """
with StopRequest() as stop:
    open(f"ready-{slot}", "w").close()
    for step in range(600):
        if stop.stop_requested():
            open(f"stopped-{slot}", "w").write(str(stop.stop_requested()))
            break
        time.sleep(0.05)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_group", [False, True])
def test_signal_reaches_every_rank_once(tmp_path: Path, signum: signal.Signals, to_group: bool) -> None:
    write(tmp_path, COUNT)
    with running("script.py", cwd=tmp_path) as supervisor:
        wait_for(tmp_path, "ready-*", 2)
        (os.killpg if to_group else os.kill)(supervisor.pid, signum)
        _, stderr = supervisor.communicate(timeout=20)
    assert [path.read_text() for path in wait_for(tmp_path, "got-*", 2)] == [str(int(signum))] * 2
    assert (supervisor.returncode, stderr) == (10 + signum, "")


def test_ctrl_c_on_a_terminal_reaches_every_rank_once_and_the_terminal_stays_readable(tmp_path: Path) -> None:
    write(tmp_path, "print('typed', input(), flush=True) if slot == 0 else None\n" + COUNT)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        # The shell-like part: a new session whose controlling terminal is the pty.
        [sys.executable, "-c", _ATTACH, "script.py"],
        cwd=tmp_path,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        os.write(master, b"hello\n")
        wait_for(tmp_path, "ready-*", 2)
        os.write(master, b"\x03")
        output = _read_all(master)
        assert process.wait(timeout=20) == 10 + signal.SIGINT, output
        assert "typed hello" in output
        assert [path.read_text() for path in wait_for(tmp_path, "got-*", 2)] == ["2", "2"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(master)


_ATTACH = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def _read_all(master: int) -> str:
    chunks = []
    with contextlib.suppress(OSError):  # EIO once the last process has closed the other end
        while chunk := os.read(master, 4096):
            chunks.append(chunk)
    return b"".join(chunks).decode()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ranks_stop_by_themselves_and_the_job_ends_with_their_code(tmp_path: Path, signum: signal.Signals) -> None:
    write(tmp_path, GRACEFUL)
    with running("script.py", cwd=tmp_path) as supervisor:
        wait_for(tmp_path, "ready-*", 2)
        os.kill(supervisor.pid, signum)
        _, stderr = supervisor.communicate(timeout=20)
    assert (supervisor.returncode, stderr) == (0, "")
    assert [path.read_text() for path in wait_for(tmp_path, "stopped-*", 2)] == [str(int(signum))] * 2


def test_ranks_with_default_handlers_end_with_the_signals_code(tmp_path: Path) -> None:
    write(tmp_path, "open(f'ready-{slot}', 'w').close()\ntime.sleep(60)")
    for signum, send in ((signal.SIGINT, os.kill), (signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)):
        with running("script.py", cwd=tmp_path) as supervisor:
            wait_for(tmp_path, "ready-*", 2)
            send(supervisor.pid, signum)
            _, stderr = supervisor.communicate(timeout=20)
        assert (supervisor.returncode, stderr) == (128 + signum, "")
        for path in tmp_path.glob("ready-*"):
            path.unlink()


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"ready-{slot}", "w").close()
time.sleep(60)
"""


def test_ranks_that_do_not_stop_are_killed_after_the_grace(tmp_path: Path) -> None:
    write(tmp_path, STUBBORN, options="stop_grace=timedelta(seconds=0.5)")
    with running("script.py", cwd=tmp_path) as supervisor:
        wait_for(tmp_path, "ready-*", 2)
        supervisor.terminate()
        supervisor.communicate(timeout=20)
    assert supervisor.returncode == 128 + signal.SIGTERM


def test_asking_twice_kills_at_once(tmp_path: Path) -> None:
    write(tmp_path, STUBBORN)
    with running("script.py", cwd=tmp_path) as supervisor:
        wait_for(tmp_path, "ready-*", 2)
        supervisor.terminate()
        time.sleep(0.8)
        supervisor.terminate()
        supervisor.communicate(timeout=10)
    assert supervisor.returncode == 128 + signal.SIGTERM


def test_stop_before_any_rank_has_started(tmp_path: Path) -> None:
    write(tmp_path, "open('started', 'w')", before="import torch\nopen('launching', 'w').close()\n")
    with running("script.py", cwd=tmp_path) as supervisor:
        wait_for(tmp_path, "launching", 1)
        time.sleep(0.3)
        os.killpg(supervisor.pid, signal.SIGTERM)
        _, stderr = supervisor.communicate(timeout=20)
    assert supervisor.returncode == 128 + signal.SIGTERM, stderr
    assert not (tmp_path / "started").exists()


def test_stop_request_keeps_the_first_signal_and_calls_the_users_handler() -> None:
    called: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda n, _: called.append(n))
    try:
        with StopRequest() as stop:
            assert stop.stop_requested() is None
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)  # must not raise KeyboardInterrupt
            time.sleep(0.01)
            assert stop.stop_requested() == signal.SIGTERM
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, former)


def test_wrapper_that_passes_on_a_ctrl_c_counts_once() -> None:
    relay = SignalRelay()
    relay.received(2)
    relay.received(2)
    relay.reached_ranks(2)
    assert relay.pending
    now = time.monotonic()
    assert relay.due(now) == [(2, False)]
    assert relay.due(now + 1) == []


def test_signal_that_only_the_supervisor_got_is_forwarded() -> None:
    relay = SignalRelay()
    relay.received(15)
    now = time.monotonic()
    assert relay.due(now) == []
    assert relay.due(now + 0.3) == [(15, True)]
    relay.received(15)
    assert relay.due(now + 10) == []  # within the debounce time of the first
