"""The launching process is killed or stopped: ranks never hang for it, and a short stop is survived."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.scripts import wait_for, wait_until_gone


@contextlib.contextmanager
def _running(directory: Path, steps: int, seconds: float = 30, victim: int = -1) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment["TMPDIR"] = str(directory / "tmp")
    (directory / "tmp").mkdir()
    command = [sys.executable, str(Path(__file__).with_name("slow_script.py"))]
    with subprocess.Popen(
        [*command, str(directory), str(steps), str(seconds), str(victim)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _ranks(directory: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in wait_for(directory, "rank-*", 3)]


def test_a_killed_launching_process_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with _running(tmp_path, 200) as process:
        ranks = _ranks(tmp_path)
        process.kill()
        assert wait_until_gone(ranks, 2.0) == []
        _, stderr = process.communicate(timeout=20)
    said = [line for line in stderr.splitlines() if "launching process" in line or "store" in line]
    assert said == [f"lightning_ntp: the launching process (pid {process.pid}) is gone, and all ranks with it"], stderr
    assert "Traceback" not in stderr and "TCPStore" not in stderr, stderr
    assert [path for path in (tmp_path / "tmp").iterdir() if "lightning_ntp" in path.name] == []


@pytest.mark.chaos
def test_a_short_stop_of_the_launching_process_is_survived(tmp_path: Path) -> None:
    with _running(tmp_path, 40, victim=1) as process:
        _ranks(tmp_path)
        process.send_signal(signal.SIGSTOP)
        (tmp_path / "die").touch()  # others ask the store who died, and must wait for the answer
        time.sleep(6)
        process.send_signal(signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0 and "done: step 40, degrees (1, 1)" in stdout, stdout + stderr
    assert stderr.count(" died: ") == 1 and "hung" not in stderr, stderr


@pytest.mark.chaos
def test_a_stopped_launching_process_ends_the_ranks_that_need_it(tmp_path: Path) -> None:
    with _running(tmp_path, 200, seconds=4, victim=1) as process:
        ranks = _ranks(tmp_path)
        process.send_signal(signal.SIGSTOP)
        (tmp_path / "die").touch()
        assert wait_until_gone(ranks, 40.0) == []
        process.send_signal(signal.SIGCONT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "has given no answer within 4 s: the launching process, which hosts it, is stopped or hangs" in stderr, (
        stderr
    )


@pytest.mark.chaos
def test_a_launching_process_that_is_stopped_at_the_end_of_the_script_keeps_no_rank(tmp_path: Path) -> None:
    with _running(tmp_path, 10, seconds=4) as process:
        ranks = _ranks(tmp_path)
        process.send_signal(signal.SIGSTOP)
        assert wait_until_gone(ranks, 40.0) == []
        process.send_signal(signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=30)
    assert "done: step 10" in stdout and "has given no answer within 4 s" in stderr, stdout + stderr
