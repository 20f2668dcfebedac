"""Times to wait that cannot work together are refused where they are given."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_ntp import NTPStrategy, cli

CONFIG = Path(__file__).parents[2] / "examples/gpt/config.yaml"


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "30", timedelta(0)])
@pytest.mark.parametrize("name", ["timeout", "heartbeat", "restart_backoff"])
def test_a_time_that_is_none_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.*finite number of seconds above 0 .*, or a timedelta"):
        NTPStrategy(**{name: value})


def test_a_heartbeat_too_short_for_a_busy_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"heartbeat=0\.5 is less than 1 s"):
        NTPStrategy(heartbeat=0.5)


@pytest.mark.parametrize(("timeout", "heartbeat"), [(30, 30), (timedelta(seconds=20), 60), (20, timedelta(seconds=60))])
def test_a_pair_that_cannot_work_is_named_with_what_to_do(timeout: Any, heartbeat: Any) -> None:
    with pytest.raises(ValueError, match=r"^timeout=[23]0 s is not longer than heartbeat=[36]0 s: .*heartbeat=None"):
        NTPStrategy(timeout=timeout, heartbeat=heartbeat)


@pytest.mark.parametrize(("timeout", "heartbeat"), [(31, 30), (None, 30), (5, None), (None, timedelta(minutes=5))])
def test_pairs_that_work_are_taken(timeout: Any, heartbeat: Any) -> None:
    NTPStrategy(timeout=timeout, heartbeat=heartbeat)


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[dict[str, Any]], str]:
    """What the command line says of settings of the strategy in a configuration file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(CONFIG.parents[2]), *sys.path])
    monkeypatch.setattr(sys, "argv", ["lightning-ntp"])

    def build(settings: dict[str, Any]) -> str:
        config = yaml.safe_load(CONFIG.read_text())
        config["trainer"]["strategy"] = {"class_path": "lightning_ntp.NTPStrategy", "init_args": settings}
        Path("config.yaml").write_text(yaml.safe_dump(config))
        with pytest.raises(SystemExit) as ended:
            cli.build(["--config", "config.yaml"], run=False)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return build


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timeout": math.inf}, "timeout=inf must be a finite number of seconds above 0"),
        ({"timeout": math.nan}, "timeout=nan must be a finite number of seconds above 0"),
        ({"heartbeat": 0}, "heartbeat=0.0 must be a finite number of seconds above 0"),
        ({"heartbeat": -1}, "heartbeat=-1.0 must be a finite number of seconds above 0"),
        ({"timeout": "0:00:20"}, "timeout=20 s is not longer than heartbeat=30 s: "),
        ({"timeout": 20, "heartbeat": "0:01:00"}, "timeout=20 s is not longer than heartbeat=60 s: "),
    ],
    ids=str,
)
def test_a_configuration_file_is_refused_in_one_line(refused: Any, settings: dict[str, Any], said: str) -> None:
    (line,) = [line for line in refused(settings).splitlines() if "error" in line]
    assert line.startswith(f"lightning-ntp: error: {said}"), line


@pytest.mark.parametrize("value", ["soon", True, [30]])
def test_what_is_no_time_in_a_configuration_file_is_refused_by_its_type(refused: Any, value: Any) -> None:
    assert f"Given value: {value}" in refused({"timeout": value})
