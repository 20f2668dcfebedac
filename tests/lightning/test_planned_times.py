"""How much longer a smaller replica computes, from the parameters of the model."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_ntp.lightning.planned_times import planned_times
from lightning_ntp.parallel import Plan, TensorParallelContext, parallelize
from lightning_ntp.plan import Topology


def times(module: nn.Module, plan: Plan, *lost: int, degrees: tuple[int, ...] = (4, 4)) -> dict[int, float]:
    topology = Topology.start(degrees)
    family = topology.family
    if lost:
        topology = topology.lose(lost)[0]
    return planned_times(parallelize(module, plan, TensorParallelContext(family, max(degrees))), topology)


def net(hidden: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {"up": nn.Linear(8, hidden, bias=False), "down": nn.Linear(hidden, 8, bias=False), "norm": nn.LayerNorm(8)}
    )


SPLIT: Plan = {"up": "colwise", "down": "rowwise"}


def test_a_full_replica_takes_its_time() -> None:
    assert times(net(48), SPLIT) == {0: 1.0, 1: 1.0}


def test_three_of_four_hold_a_third_more_of_what_is_split() -> None:
    split, whole = 2 * 8 * 48, 16  # elements; every index has the whole norm
    want = (split / 3 + whole) / (split / 4 + whole)
    assert times(net(48), SPLIT, 7) == {0: 1.0, 1: pytest.approx(want)}


def test_the_largest_share_counts_not_the_mean() -> None:
    """50 columns: 13 at degree 4, 17 at degree 3, 25 at degree 2."""
    split, whole = 2 * 8, 16
    for lost, columns in (((7,), 17), ((6, 7), 25)):
        want = (split * columns + whole) / (split * 13 + whole)
        assert times(net(50), SPLIT, *lost)[1] == pytest.approx(want)


def test_what_nothing_splits_takes_as_long_at_any_degree() -> None:
    assert times(net(48), {}, 7) == {0: 1.0, 1: 1.0}


def test_a_replica_that_is_gone_computes_nothing() -> None:
    assert times(net(48), SPLIT, 4, 5, 6, 7) == {0: 1.0}


def test_a_replica_that_was_smaller_from_the_start_is_measured_by_the_largest() -> None:
    assert times(net(48), SPLIT, degrees=(4, 3)) == {0: 1.0, 1: pytest.approx((2 * 8 * 16 + 16) / (2 * 8 * 12 + 16))}
