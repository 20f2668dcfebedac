"""What a user says about power becomes bounds of GPUs."""

from __future__ import annotations

import pytest

from lightning_ntp.power.control import BudgetError
from lightning_ntp.power.loop.settings import Ceiling, PowerSettings

FOUND = {"limit_w": 300.0, "minimum_w": 200.0, "maximum_w": 700.0, "max_clock_mhz": 1980}


@pytest.mark.parametrize(("ceiling", "top"), [("found", 300.0), ("maximum", 700.0), (450.0, 450.0), (250, 250.0)])
def test_the_ceiling_is_what_was_asked_for(ceiling: Ceiling, top: float) -> None:
    bounds = PowerSettings(ceiling=ceiling).bounds("GPU-a", 1, "node", FOUND, writes=True)
    assert (bounds.top_w, bounds.start_w, bounds.minimum_w, bounds.maximum_w) == (top, 300.0, 200.0, 700.0)
    assert (bounds.gpu, bounds.replica, bounds.node) == ("GPU-a", 1, "node")


def test_where_nothing_can_be_written_the_ceiling_is_what_is_there() -> None:
    settings = PowerSettings(ceiling="maximum", locked_clocks=(900, 1200))
    bounds = settings.bounds("GPU-a", 0, "node", FOUND, writes=False)
    assert (bounds.top_w, bounds.start_clock_mhz) == (300.0, None)


def test_locked_clocks_are_believed() -> None:
    bounds = PowerSettings(locked_clocks=(900, 1200)).bounds("GPU-a", 0, "node", FOUND, writes=True)
    assert (bounds.start_clock_mhz, bounds.max_clock_mhz) == (1200, 1980)


def test_a_ceiling_that_the_hardware_does_not_take_is_an_error_with_its_bounds() -> None:
    with pytest.raises(BudgetError, match="the ceiling, 900 W, is not between .* 200 W and 700 W"):
        PowerSettings(ceiling=900.0).bounds("GPU-a", 0, "node", FOUND, writes=True)


@pytest.mark.parametrize(
    ("straggler", "writes", "moves"),
    [
        ("power+rebalance", True, True),
        ("power", True, False),
        ("rebalance", False, True),
        ("none", False, False),
    ],
)
def test_what_may_be_done_about_a_straggler(straggler: str, writes: bool, moves: bool) -> None:
    settings = PowerSettings(straggler=straggler)  # type: ignore[arg-type]
    assert (settings.writes, settings.moves_samples) == (writes, moves)
