"""docs/recovery.md can be run: every block of code in it, in a job that loses a rank."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lightning_ntp import NTPStrategy, cli
from lightning_ntp.engine import Change, describe
from lightning_ntp.launch import REFUSED
from lightning_ntp.lightning.callbacks.fault_schedule import PHASES
from lightning_ntp.plan import Topology
from tests.lightning.rigs import Regression, Worlds, loader, make_trainer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/recovery.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
STEPS = 6


def code(word: str) -> str:
    """The block that has this word in it."""
    (found,) = [code for _, code in BLOCKS if word in code]
    return str(found)


def names(word: str) -> dict[str, Any]:
    """What the block defines."""
    defined: dict[str, Any] = {}
    exec(code(word), defined)
    return defined


def test_every_block_is_run_by_a_test_here() -> None:
    languages = [language for language, _ in BLOCKS]
    assert languages == [*["python"] * 4, "yaml", "bash", "python", "python", "python", "yaml"]


def test_the_settings_are_those_of_the_strategy() -> None:
    strategy = names("failure_window")["strategy"]
    assert (strategy.policy.min_tensor_parallel_size, strategy.policy.max_failures) == (3, 5)
    assert strategy.policy.window_seconds == 3600


def test_neighbours_keep_copies_where_the_page_asks_for_it() -> None:
    """That they help is tested by tests/recovery/test_neighbour_copies.py."""
    strategy = names('redundancy="neighbor"')["strategy"]
    strategy.parallel_devices = [torch.device("cpu")] * 4
    assert strategy.degrees == (4,) and strategy._with_copies


def test_the_plan_command_prints_what_the_page_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command = shlex.split(code("lightning-ntp plan"))
    assert command[0] == "lightning-ntp"
    cli.main(command[1:])
    printed = capsys.readouterr().out
    assert "slot 3 lost: degrees (4, 3) -> (3, 3)" in printed
    assert "slot 4 -> slot " in printed and "free while shards move" in printed


def test_restarts_are_as_the_page_sets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That ranks come back is tested by tests/recovery/test_rejoin.py."""
    told = names("max_restarts=3")["strategy"]._supervision
    assert (told["max_restarts"], told["restart_backoff"]) == (3, timedelta(seconds=10))
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\nexit "$2"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert [told["may_restart"](slot) for slot in (0, 1)] == [True, False]


def test_restarts_are_set_in_yaml_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_checks.py").write_text("def device_is_fit(slot):\n    return True\n")
    strategy: Any = made_of("my_checks", tmp_path, monkeypatch).strategy
    assert (strategy.degrees, strategy._supervision["max_restarts"]) == ((4, 3), 3)
    assert strategy._supervision["restart_backoff"] == timedelta(seconds=10)
    assert strategy._supervision["may_restart"].__module__ == "my_checks"


def test_the_log_says_of_an_arrival_what_the_page_shows() -> None:
    full = Topology.start((4, 4))
    seconds = {"prepare": 0.2803, "travel": 0.0514, "wait": 0.0, "switch": 0.1520}
    arrival = Change(full.lose([7])[0], full, (), 116, 637_056, (4, 5, 6), seconds, planned=True)
    assert describe(arrival) in PAGE


def train(output: str) -> dict[str, Any]:
    curriculum, average = names("class Curriculum")["Curriculum"](), names("class Average")["Average"]()
    injector, sampler = names("certain =")["certain"], names("class Sampler")["Sampler"]()
    callbacks = [curriculum, average, sampler, injector]
    trainer = make_trainer((2, 1), max_steps=STEPS, max_epochs=-1, callbacks=callbacks, default_root_dir=output)
    trainer.fit(Regression(), loader((2, 1), 4 * STEPS))
    trainer.save_checkpoint(f"{output}/saved.ckpt", weights_only=False)
    strategy: Any = trainer.strategy
    full = strategy.full_state(average.state)
    again = strategy.local_state(strategy.broadcast(full))
    assert all(torch.equal(again[p]["average"], values["average"]) for p, values in average.state.items())
    assert sampler.sample.shape == (1, 1)
    return {"shown": curriculum.shown, "losses": len(curriculum.losses), "degrees": strategy.degrees}


def test_the_hooks_of_the_page_see_a_loss_and_count_right(world: Worlds, tmp_path: Path) -> None:
    outcomes = world(3).start(train, str(tmp_path)).survive()
    assert [outcome.state for outcome in outcomes] == ["returned", "died", "returned"], outcomes
    for outcome in outcomes[::2]:
        assert outcome.value == {"shown": STEPS, "losses": STEPS, "degrees": (1, 1)}
        assert "slots (1,) lost, () back, degrees (1, 1)" in outcome.output
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    shapes = {name: values["average"].shape for name, values in saved["averages"].items()}
    assert shapes == {name: value.shape for name, value in saved["state_dict"].items()}


def test_the_random_faults_are_kills_anywhere_in_a_step() -> None:
    injector = names("certain =")["random"]
    assert injector.kinds == ("kill",) and len(injector.phases) == 8
    assert all(f"`{phase}`" in PAGE for phase in PHASES)


def made_of(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pl.Trainer:
    """The trainer of the example's configuration, changed by the YAML block that has this word in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT), *sys.path])
    monkeypatch.setattr(sys, "argv", ["lightning-ntp"])
    example = yaml.safe_load((ROOT / "examples/gpt/config.yaml").read_text())
    example["trainer"] |= yaml.safe_load(code(word))["trainer"]
    Path("config.yaml").write_text(yaml.safe_dump(example))
    trainer: pl.Trainer = cli.build(["--config", "config.yaml"], run=False).trainer
    return trainer


def test_the_yaml_makes_the_same_injector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_ntp.callbacks import FaultInjector

    trainer: Any = made_of("  callbacks:", tmp_path, monkeypatch)
    (injector,) = [callback for callback in trainer.callbacks if isinstance(callback, FaultInjector)]
    assert injector.faults == names("certain =")["certain"].faults


def test_what_the_page_names_exists() -> None:
    headings = ["#" + title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", PAGE, flags=re.MULTILINE)]
    for target in re.findall(r"\]\((?!http)([^)]+)\)", PAGE):
        assert target in headings or (ROOT / "docs" / target).exists(), target
    for field in (
        "before",
        "after",
        "lost",
        "joined",
        "left",
        "step",
        "gone_back",
        "moved_bytes",
        "sources",
        "seconds",
    ):
        assert f"`{field}`" in PAGE and (field in Change.__dataclass_fields__ or hasattr(Change, field))
    assert f"exit code {REFUSED}" in PAGE and inspect.signature(NTPStrategy).parameters["max_restarts"].default == 0
