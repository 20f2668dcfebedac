"""Times to wait that cannot work together are refused where they are given."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from lightning_ntp import NTPStrategy


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "30", timedelta(0)])
@pytest.mark.parametrize("name", ["timeout", "heartbeat"])
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
