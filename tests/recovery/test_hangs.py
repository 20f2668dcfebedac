"""A rank stops or hangs in a user's script: it is found, killed and declared dead, and the others go on."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.lightning.callbacks import fault_injector

STEPS = 10
"""Of the script."""


def run(directory: Path, *faults: dict[str, Any]) -> str:
    """Run the script, which must end well. Returns its standard error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory / "tmp")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    (directory / "tmp").mkdir()
    command = [sys.executable, "-m", "tests.recovery.hanging_script", str(directory)]
    done = subprocess.run(
        [*command, json.dumps(faults)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0 and f"done: step {STEPS}" in done.stdout, text
    left = [name for name in os.listdir(directory / "tmp") if "lightning_ntp" in name]
    assert "Traceback" not in done.stderr and not left, (left, text)
    return f"{done.stdout}{done.stderr}"


def blamed(out: str) -> list[int]:
    return [int(slot) for slot in re.findall(r"slot (\d) \(pid \d+\) died: hung: ", out)]


def test_a_rank_that_hangs_is_killed_and_its_stack_is_kept_but_a_slow_first_step_is_none(tmp_path: Path) -> None:
    slow = {"kind": "slow", "slot": 2, "step": 0, "phase": "forward", "seconds": 6}
    out = run(tmp_path, slow, {"kind": "hang", "slot": 3, "step": 3, "phase": "backward"})
    found = re.search(
        r"slot 3 \(pid \d+\) died: hung: no progress for [\d.]+ s in a training step, and slot \d waits for it"
        r" \(stack: (.+)\); 3 ranks go on",
        out,
    )
    assert found is not None and blamed(out) == [3] and out.count(" died: ") == 1, out
    path = Path(found[1])
    assert path.parent == tmp_path and re.fullmatch(r"hang-slot3-\d{6}\.txt", path.name)
    stack = path.read_text()
    line = next(n for n, text in enumerate(inspect.getsourcelines(fault_injector)[0], 1) if "time.sleep(3600)" in text)
    assert f'fault_injector.py", line {line} in _happen' in stack and "hanging_script.py" in stack, stack
    assert "degrees (2, 1)" in out, out


@pytest.mark.chaos
def test_a_stopped_rank_is_killed_but_not_one_that_is_about_as_slow_as_before(tmp_path: Path) -> None:
    stalls = {"kind": "slow", "slot": 2, "step": 1, "phase": "forward", "seconds": 1.4, "steps": 2}
    longer = {**stalls, "step": 5, "seconds": 3.5, "steps": 1}
    out = run(tmp_path, stalls, longer, {"kind": "stop", "slot": 1, "step": 7, "phase": "forward"})
    assert blamed(out) == [1] and out.count(" died: ") == 1, out
    assert "hung: its process is stopped (SIGSTOP) since" in out, out
    assert "no stack: a stopped process cannot write it" in out and "degrees (1, 2)" in out, out


@pytest.mark.chaos
def test_a_rank_that_would_have_come_back_too_late_counts_as_hung(tmp_path: Path) -> None:
    """And one that hangs in its update: the others have gone on, and wait for it in the next step."""
    slow = {"kind": "slow", "slot": 2, "step": 6, "phase": "data", "seconds": 60}
    out = run(tmp_path, {"kind": "hang", "slot": 0, "step": 3, "phase": "update"}, slow)
    assert blamed(out) == [0, 2] and out.count(" died: ") == 2, out
    assert re.search(r"slot 2 .* hung: no progress for [\d.]+ s between training steps", out), out
    assert "degrees (1, 1)" in out, out
