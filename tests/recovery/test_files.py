"""Files that cannot be written: one clear message, nothing half written, no hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def _run(directory: Path, what: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("full_disk_script.py")), str(directory), what],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def _reasons(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("The job has ended: ")]


def test_a_full_disk_leaves_the_checkpoint_of_before_and_says_what_to_do(tmp_path: Path) -> None:
    done = _run(tmp_path, "full")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    (reason,) = _reasons(done)
    found = re.fullmatch(
        r"The job has ended: the checkpoint (\S+\.ckpt) was not saved: slot 0 could not write it: File too large"
        r" \(EFBIG\)\. .* a file that was there before is as it was\. .* \(newest checkpoint: (\S+)\)",
        reason,
    )
    assert found is not None, reason
    assert Path(found[1]).parent == Path(found[2]).parent == tmp_path / "kept"
    assert torch.load(found[2], weights_only=True)["global_step"] == 3
    for path in (tmp_path / "kept").iterdir():
        assert not path.name.endswith(".part"), "nothing half written stays"
        assert torch.load(path, weights_only=True)["global_step"] == 3
    assert " lost: degrees" not in done.stderr, "no rank is given up for it"


@pytest.mark.chaos
def test_a_directory_that_the_next_rank_zero_cannot_write_to_is_named(tmp_path: Path) -> None:
    done = _run(tmp_path, "gone")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    (reason,) = _reasons(done)
    assert f"the checkpoint {tmp_path}/kept/" in reason and "slot 1 could not write it: " in reason, reason
    assert re.search(rf"\((EEXIST|ENOTDIR)\): {tmp_path}/kept\. ", reason), reason
    assert done.stderr.count(" lost: degrees") == 1, "the death is survived, and no other rank given up"


@pytest.mark.chaos
def test_events_that_cannot_be_written_end_no_training(tmp_path: Path) -> None:
    done = _run(tmp_path, "events")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: step 8, degrees (1, 2)" in done.stdout
    assert done.stderr.count("events.jsonl cannot be written: No space left on device") == 1, done.stderr
