"""docs/power.md says what PowerManager takes and tells, and examples/power shows it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_ntp.callbacks import PowerManager
from lightning_ntp.engine.events import read_events
from lightning_ntp.launch import jobs
from lightning_ntp.lightning.callbacks.power_manager import power_metrics
from lightning_ntp.power.loop.report import Report

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/power.md").read_text()
EVENTS = (ROOT / "docs/events.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def block(word: str) -> str:
    """The first block with this word."""
    return next(content for _, content in BLOCKS if word in content)


def test_the_table_of_settings_is_that_of_the_callback() -> None:
    section = PAGE[PAGE.index("\n## Settings") : PAGE.index("\n## What you see")]
    told = {name: ast.literal_eval(value) for name, value in re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, re.M)}
    known = {name: each.default for name, each in inspect.signature(PowerManager).parameters.items()}
    assert told == known and list(told) == list(known)


def test_the_examples_make_the_same_callback() -> None:
    (call,) = re.findall(r"PowerManager\([^\n]*\)", block("callbacks=[PowerManager"))
    made = eval(call.removesuffix("]"), {"PowerManager": PowerManager})
    (entry,) = yaml.safe_load(block("class_path"))["trainer"]["callbacks"]
    assert entry["class_path"] == f"lightning_ntp.callbacks.{PowerManager.__name__}"
    again = PowerManager(**entry["init_args"])
    assert (made.settings, made.tokens_per_step) == (again.settings, again.tokens_per_step)
    assert made.settings.ceiling == "maximum"


def test_the_lines_of_the_page_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path)
    for watts in [*[1200.0, 1500, 1800], *[1833] * 5, *[1785] * 6, *[900] * 6]:
        report.limits({1: watts}, {1: 900.0}, {1: 3})
    said = [line.split(" ", 1)[1] for line in capfd.readouterr().err.splitlines()]
    _, *lines = block("power: 8 GPUs").splitlines()  # the price is in tests/power/loop/test_telling.py
    assert said == [line for line in lines if "samples per joule" not in line] != lines


def test_the_metrics_of_the_page_are_logged(tmp_path: Path) -> None:
    each = dict.fromkeys(("watts", "limit_w", "compute_s", "relative_time", "missing_percent"), 1.0)
    state: dict[str, Any] = {"joules_per_step": 2.0, "joules_per_token": None, "replicas": {"1": each}}
    jobs.power_state(tmp_path).write_text(json.dumps(state))
    named = {name.replace("replicaN", "replica1") for name in re.findall(r"`(ntp/power/[\w/]+)`", PAGE)}
    assert named - power_metrics(tmp_path).keys() == {"ntp/power/joules_per_token"}, "nobody has said the tokens"
    assert power_metrics(tmp_path).keys() < named


def test_the_kinds_of_events_are_those_that_are_told() -> None:
    code = "".join(path.read_text() for path in (ROOT / "lightning_ntp/power/loop").glob("*.py"))
    told = set(re.findall(r"_report\.(?:event|once)\(\s*\"(\w+)\"", code))
    told |= set(re.findall(r"self\.event\(\s*\"(\w+)\"", code)) | {"note"}
    section = EVENTS[EVENTS.index("`power` is") :].split("\n\n")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == told


def test_the_picture_is_there_and_small() -> None:
    (name,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", PAGE)
    picture = (ROOT / "docs" / name).read_text()
    assert picture.startswith("<svg") and len(picture) < 150_000 and "simulated" in picture
    assert f"--plot docs/{name}" in PAGE and "The picture is simulated" in PAGE


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_the_example_keeps_pace_and_says_so(tmp_path: Path) -> None:
    script = ROOT / "examples/power/simulate.py"
    arguments = ["--plot", str(tmp_path / "loss.svg"), "--output", str(tmp_path), "--steps", "100"]
    done = subprocess.run(
        [sys.executable, str(script), *arguments, "--lose-at", "20", "--restart-after", "14"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    numbers = {name: [int(n) for n in re.findall(r"\d+", row)] for name, row in rows(done.stdout).items()}
    # the watts of both replicas, their limits, ms of compute time, joules: the noise of a busy machine on two steps
    assert numbers["with the boost"][:4] == [1200, numbers["with the boost"][1], 300, numbers["with the boost"][3]]
    assert numbers["with the boost"][3] > 500
    assert numbers["with the boost"][5] == pytest.approx(numbers["with the boost"][4], rel=0.1)
    assert numbers["slot 7 is back"][:4] == [1200, 1200, 300, 300]
    assert "limits at the end: " + ", ".join(["300"] * 8) in done.stdout
    (path,) = tmp_path.glob("lightning_logs/*/events.jsonl")
    kinds = [each["kind"] for each in read_events(path) if each["event"] == "power"]
    assert kinds[0] == "began" and "boost" in kinds and "returned" in kinds
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")


def rows(printed: str) -> dict[str, str]:
    """The rows of the summary by name."""
    names = ("before the loss", "just after it", "with the boost", "slot 7 is back")
    return {line[:22].strip(): line[22:] for line in printed.splitlines() if line[:22].strip() in names}
