"""When a job cannot go on, its user reads one line: why, and which checkpoint to start from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.launch.scripts import run

SCRIPT = """
import lightning.pytorch as pl, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ntp import NTPStrategy
from lightning_ntp.callbacks import FaultInjector
from tests.lightning.rigs import Regression, rows

if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu", devices={devices}, precision="64-true", max_steps=6, logger=False,
        strategy=NTPStrategy(**{strategy}), enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint("saved", every_n_train_steps=2, save_top_k=-1, filename="{{step}}"),
                   FaultInjector([dict(kind="kill", slot=1, step=3, phase="backward")])],
    )
    trainer.fit(Regression(), torch.utils.data.DataLoader(rows(16), batch_size=2))
"""


def fit(tmp_path: Path, devices: int, strategy: dict[str, object]) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(SCRIPT.format(devices=devices, strategy=strategy))
    root = str(Path(__file__).parents[2])
    return run("script.py", cwd=tmp_path, env={"PYTHONPATH": root})


def reason(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    (line,) = re.findall("^The job has ended: .*$", done.stderr, flags=re.MULTILINE)
    assert done.stderr.rstrip().endswith(line)
    return str(line)


def test_units_that_nobody_else_holds_are_told_in_one_line_with_the_newest_checkpoint(tmp_path: Path) -> None:
    line = reason(fit(tmp_path, 2, {"degrees": (2,)}))
    assert "slot 1 lost: end; 3 of 7 units of a parameter had their only copies on the lost slots" in line
    path = re.search(r"restart from the newest checkpoint \(newest checkpoint: (.*)\)$", line)
    assert path is not None and Path(path[1]).name == "step=2.ckpt" and (tmp_path / path[1]).exists()


@pytest.mark.chaos
def test_a_policy_that_forbids_going_on_saves_first(tmp_path: Path) -> None:
    line = reason(fit(tmp_path, 3, {"degrees": (2, 1), "max_failures": 0}))
    assert "1 failure in this job, and max_failures=0" in line
    path = re.search(r"a checkpoint of the last complete step is at (\S+)$", line)
    assert path is not None
    saved = torch.load(tmp_path / path[1], weights_only=True)
    assert saved["global_step"] == 3 and saved["state_dict"]["net.mlp.up_proj.weight"].shape == (7, 6)


@pytest.mark.parametrize("raised", ["JobLost('no more')", "ValueError('no more')"])
def test_only_a_bug_has_a_traceback(raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_ntp.comm import JobLost
    from lightning_ntp.launch import environment
    from lightning_ntp.launch.outcome import Outcome, failure_of
    from lightning_ntp.launch.report import read_report, report

    for name, value in {environment.STORE: "127.0.0.1:9", environment.SLOT: "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(environment.JOB_DIR, str(tmp_path))
    try:
        raise eval(raised, {"JobLost": JobLost})
    except Exception as error:
        assert report(error)
    failure = failure_of(1, 1, 0.0, read_report(tmp_path, 1))
    assert failure is not None
    printed = Outcome(2, 1, {}, (failure,), failure).describe()
    if "JobLost" in raised:
        assert printed == "The job has ended: no more\n"
    else:
        assert printed.startswith("Traceback") and printed.endswith("ValueError: no more\n(raised by slot 1 of 2)\n")
