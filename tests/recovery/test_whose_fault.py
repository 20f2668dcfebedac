"""Whose fault an exception is: of one rank, which counts as its death, or of the program, which ends the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run(directory: Path, who: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("raising_script.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, str(script), str(directory), who],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_an_exception_of_one_rank_counts_as_its_death(tmp_path: Path) -> None:
    done = _run(tmp_path, "one")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: step 8, degrees (2, 1)" in done.stdout
    assert done.stderr.count("Traceback") == 1 and "ValueError: a mistake of one" in done.stderr, done.stderr
    assert "raised by slot 2 alone" in done.stderr
    assert "died: raised ValueError: a mistake of one; 3 ranks go on" in done.stderr
    assert "slot 2 lost: degrees (2, 2) -> (2, 1)" in done.stderr


@pytest.mark.parametrize("who", ["replica", pytest.param("all", marks=pytest.mark.chaos)])
def test_an_exception_of_a_whole_replica_ends_the_job(tmp_path: Path, who: str) -> None:
    done = _run(tmp_path, who)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "done" not in done.stdout
    assert done.stderr.count("Traceback") == 1 and f"ValueError: a mistake of {who}" in done.stderr, done.stderr
    assert " lost: degrees" not in done.stderr and "alone" not in done.stderr


@pytest.mark.chaos
def test_what_every_new_rank_zero_raises_is_no_fault_of_a_rank(tmp_path: Path) -> None:
    done = _run(tmp_path, "zero")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "raised by slot 0 alone" in done.stderr
    # slot 1 is a replica of its own then
    assert "raised by slot 1 of 4" in done.stderr, done.stderr


@pytest.mark.chaos
def test_out_of_memory_after_a_shrink_is_explained(tmp_path: Path) -> None:
    done = _run(tmp_path, "memory")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "slot 3 ran out of memory at tensor-parallel degree 1: replica 1 was launched at 2" in done.stderr
    assert "2.00 times" in done.stderr and "tried to allocate 3 GiB" in done.stderr


@pytest.mark.chaos
def test_a_rank_that_alone_is_told_to_stop_leaves_alone(tmp_path: Path) -> None:
    done = _run(tmp_path, "told")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: step 8, degrees (2, 1)" in done.stdout
    assert "slot 3 leaves the job: SIGTERM to it alone" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
