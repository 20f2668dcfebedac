"""``python -m lightning_ntp``: a LightningCLI that knows the strategy and takes any model and data."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_ntp import cli

ROOT = Path(__file__).parents[1]
EXAMPLE = str(ROOT / "examples/gpt/config.yaml")
#: The example's model and data, small enough for a test.
SMALL = [
    "--seed_everything=1",
    "--model=examples.gpt.model.LanguageModel",
    "--model.dim=24",
    "--model.num_layers=1",
    "--data=examples.gpt.data.PythonDocs",
    "--data.seq_len=16",
]
ONE_PROCESS = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["lightning-ntp"])  # LightningCLI warns of arguments in both places


def test_fit_runs_any_model_and_data_and_a_second_run_overwrites_the_saved_config(tmp_path: Path) -> None:
    steps = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.logger=false"]
    for seed in (1, 2):
        cli.main(["fit", *SMALL, *ONE_PROCESS, *steps, f"--seed_everything={seed}"])
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["seed_everything"] == 2
    assert saved["model"]["class_path"] == "examples.gpt.model.LanguageModel"
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))


@pytest.mark.parametrize(
    "strategy", ["ntp", "ntp_spawn", {"class_path": "lightning_ntp.NTPStrategy", "init_args": {"degrees": [2, 1]}}]
)
def test_yaml_names_the_strategy_by_its_name_or_its_class(strategy: object, tmp_path: Path) -> None:
    from lightning_ntp import NTPStrategy

    config = tmp_path / "trainer.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "devices": 3, "strategy": strategy}}))
    made = cli.build([f"--config={config}", *SMALL], run=False)
    assert type(made.trainer.strategy) is NTPStrategy


def test_yaml_names_who_watches_the_devices_and_whom_it_asks(tmp_path: Path) -> None:
    from lightning_ntp.callbacks import HealthMonitor

    health = "lightning_ntp.health"
    sources = [
        {"class_path": f"{health}.FileSource", "init_args": {"path": "notices.txt"}},
        {"class_path": f"{health}.HttpSource", "init_args": {"url": "http://localhost/gpus"}},
        {"class_path": f"{health}.StragglerSource", "init_args": {"factor": 1.4}},
    ]
    rules = {"xid": {13: "drain"}, "signals": {"temperature_margin": {"hold": 2}}}
    arguments = {"sources": sources, "rules": rules, "gpus": ["GPU-0", "GPU-1"], "quiet": 2}
    monitor = {"class_path": "lightning_ntp.callbacks.HealthMonitor", "init_args": arguments}
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ntp", "callbacks": [monitor]}
    config = tmp_path / "trainer.yaml"
    config.write_text(yaml.safe_dump({"trainer": trainer}))
    made = cli.build([f"--config={config}", *SMALL], run=False)
    (found,) = [each for each in made.trainer.callbacks if isinstance(each, HealthMonitor)]
    assert [type(source).__name__ for source in found.sources] == ["FileSource", "HttpSource", "StragglerSource"]


def test_the_example_configuration_is_valid_and_asks_for_degrees_four_and_three(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["fit", f"--config={EXAMPLE}", "--print_config"])
    assert done.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert list(printed["trainer"]["strategy"]["init_args"]["degrees"]) == [4, 3]
    assert printed["trainer"]["devices"] == 7


def test_the_help_names_the_commands_that_are_not_lightnings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    whole = " ".join(capsys.readouterr().out.split()).replace("lightning- ntp", "lightning-ntp")  # as lines may break
    assert "`lightning-ntp doctor`" in whole
    for command in ("doctor", "plan", "status", "drain", "restart", "relayout"):
        assert f"`lightning-ntp {command}" in whole or f"`{command}" in whole
        with pytest.raises(SystemExit) as done:
            cli.main([command, "--help"])
        assert done.value.code == 0
        assert f"usage: lightning-ntp {command}" in capsys.readouterr().out


def test_without_jsonargparse_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "jsonargparse" else object())
    with pytest.raises(SystemExit, match=r"needs jsonargparse, .*pip install \"lightning-ntp\[cli\]\""):
        cli.main(["fit"])


def test_python_m_is_the_same_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning_ntp", "--version"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("lightning_ntp", run_name="__main__")
    assert done.value.code == 0
    assert "lightning-ntp" in capsys.readouterr().out


def test_the_console_script_finds_classes_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import lightning.pytorch as pl\nclass Model(pl.LightningModule):\n    def __init__(self, size: int = 3): ...\n"
    )
    script = "import sys; sys.path[0] = '/nowhere'; from lightning_ntp.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "fit", "--model=mine.Model", "--print_config"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model"] == {"class_path": "mine.Model", "init_args": {"size": 3}}
