"""``lightning-ntp drain``: a rank of a running script leaves, told from another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_ntp.commands import drain as command
from lightning_ntp.commands import jobs

ROOT = Path(__file__).parents[2]


def drain(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_ntp", "drain", *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(directory), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@contextlib.contextmanager
def running(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A job of three ranks that trains."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory), "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "-m", "tests.recovery.draining_script", str(directory)]
    job = subprocess.Popen(script, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (directory / "training").exists() and time.monotonic() < deadline and job.poll() is None:
            time.sleep(0.05)
        yield job
    finally:
        job.kill()


def test_a_rank_leaves_when_it_is_told_to_from_outside(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        wrong = drain(tmp_path, "7")
        assert wrong.returncode == 2 and "has no slot 7; it has [0, 1, 2]" in wrong.stderr, wrong
        done = drain(tmp_path, "1", "--reason", "the rack is moved", "--wait", "40")
        assert done.returncode == 0 and "slot 1 has left" in done.stdout, done
        (tmp_path / "enough").touch()
        out, err = job.communicate(timeout=60)
    assert job.returncode == 0 and "done: degrees (2,)" in out, out + err
    assert "slot 1 left (the rack is moved): degrees (3) -> (2)" in err, err
    assert "slot 1 leaves the job: the rack is moved" in err and "Traceback" not in err and " died" not in err, err


def test_a_job_whose_last_rank_is_told_to_leave_has_not_succeeded(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        for slot in "02":
            assert drain(tmp_path, slot, "--wait", "40").returncode == 0
        refused = drain(tmp_path, "1")
        assert refused.returncode == 2 and f"send SIGTERM to its launching process (pid {job.pid})" in refused.stderr
        (found,) = tmp_path.glob("lightning_ntp-*/ranks.json")
        os.kill(json.loads(found.read_text())["pids"]["1"], signal.SIGTERM)  # nobody refuses that
        out, err = job.communicate(timeout=60)
    assert job.returncode == 1 and "Traceback" not in err, err
    assert "The job has ended: slot 1, the last rank, was told to leave: SIGTERM to it alone (" in err, err


def test_without_a_job_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "running_jobs", lambda: [])
    with pytest.raises(SystemExit) as ended:
        command.main(["3"])
    assert ended.value.code == 2 and "no job runs here" in capsys.readouterr().err
