"""``ntp_spawn`` and ``ntp_notebook``: weights, metrics and results come back to the caller, after a loss too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SHAPES = "[(1,), (1, 7), (7,), (7, 6)]"


def _run(strategy: str, directory: Path) -> list[str]:
    script = Path(__file__).with_name("returning_script.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script), strategy, str(directory)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("loss", "tested"))]
    assert len(lines) == 2, "the script goes on in the caller alone" + done.stdout + done.stderr
    assert lines[0].endswith(f"shapes {_SHAPES}"), lines
    return lines


_known: list[list[str]] = []


@pytest.mark.parametrize(
    "strategy", ["ntp_spawn", "ntp_notebook", pytest.param("ntp_spawn+loss", marks=pytest.mark.chaos)]
)
def test_results_come_back_to_the_caller(strategy: str, tmp_path: Path) -> None:
    found = _run(strategy, tmp_path)
    if not _known:
        _known.append(found if strategy == "ntp_spawn" else _run("ntp_spawn", tmp_path))
    for line, other in zip(found, _known[0], strict=True):
        for number, expected in zip(line.split(), other.split(), strict=True):
            if "." in number:
                assert float(number) == pytest.approx(float(expected), rel=1e-7), (found, _known[0])
