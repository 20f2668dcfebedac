"""What the strategy is told about restarts reaches the supervisor, and only the supervisor."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_ntp import NTPStrategy
from lightning_ntp.launch import Supervisor
from lightning_ntp.lightning.launcher import NTPLauncher
from lightning_ntp.plan import TopologyError


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", None])
def test_a_number_of_restarts_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_restarts=.* must be a whole number"):
        NTPStrategy(max_restarts=value)


def test_a_predicate_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^may_restart=True must be a function of a slot"):
        NTPStrategy(may_restart=True)  # type: ignore[arg-type]


def test_settings_reach_the_supervisor_and_a_lambda_need_not_travel_to_spawned_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = NTPStrategy(max_restarts=3, restart_backoff=2, may_restart=lambda slot: slot != 1)
    told: dict[str, Any] = {}
    monkeypatch.setattr("lightning_ntp.lightning.strategy.check_trainer", lambda *_: None)
    monkeypatch.setattr(NTPStrategy, "num_processes", 2)
    monkeypatch.setattr(Supervisor, "__init__", lambda self, ranks, method, call, **options: told.update(options))
    monkeypatch.setattr(Supervisor, "run", lambda self: None)
    strategy._configure_launcher()
    launcher = strategy.launcher
    assert isinstance(launcher, NTPLauncher)
    launcher._supervise(None, None)
    assert (told["max_restarts"], told["restart_backoff"]) == (3, timedelta(seconds=2))
    assert told["may_restart"](0) and not told["may_restart"](1)
    assert isinstance(pickle.loads(pickle.dumps(strategy)), NTPStrategy)


@pytest.mark.parametrize("spares", [-1, True, 1.5, "1"])
def test_wrong_numbers_of_spares_are_refused(spares: Any) -> None:
    with pytest.raises(ValueError, match=f"spares={spares!r} must be a whole number"):
        NTPStrategy(spares=spares)


def test_a_spare_needs_a_device_of_its_own() -> None:
    with pytest.raises(
        TopologyError, match=r"degrees=\(2, 2\) need 4 devices but there are 3 .*Trainer\(devices=4\), spares"
    ):
        Trainer(accelerator="cpu", devices=4, strategy=NTPStrategy(degrees=(2, 2), spares=1))
    with pytest.raises(TopologyError, match="each spare needs a device of its own"):
        Trainer(accelerator="cpu", devices=1, strategy=NTPStrategy(spares=1))


def test_spares_wait_beside_those_that_train() -> None:
    trainer = Trainer(accelerator="cpu", devices=5, strategy=NTPStrategy(degrees=(2, 2), spares=1))
    assert (trainer.strategy.degrees, trainer.strategy.num_processes, trainer.world_size) == ((2, 2), 5, 4)
