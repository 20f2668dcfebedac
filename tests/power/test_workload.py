import pytest

from lightning_ntp.plan.layout import LayoutFamily, UnitSpace
from lightning_ntp.power.control import Block, relative_compute_time

FAMILY = LayoutFamily(8)
HEADS = Block("attention", UnitSpace(32), 1.0)
COLUMNS = Block("mlp", UnitSpace(7 * 8), 1.0)


def test_heads_at_seven_cost_the_largest_share_and_not_the_mean() -> None:
    assert HEADS.largest_share(FAMILY, 7) == 5 / 32
    assert relative_compute_time(FAMILY, [HEADS], 7) == 5 / 4 > 8 / 7


def test_blocks_are_weighted_by_their_work() -> None:
    assert relative_compute_time(FAMILY, [COLUMNS], 7) == pytest.approx(8 / 7)
    both = relative_compute_time(FAMILY, [Block("attention", UnitSpace(32), 3.0), COLUMNS], 7)
    assert both == pytest.approx((3 * 5 / 4 + 8 / 7) / 4)


def test_work_that_every_index_does_dampens() -> None:
    norms = Block("norms", None, 0.125)
    assert relative_compute_time(FAMILY, [HEADS, norms], 7) == pytest.approx((5 / 32 + 0.125) / (4 / 32 + 0.125))


@pytest.mark.parametrize("degree", range(1, 9))
def test_a_smaller_degree_never_computes_faster(degree: int) -> None:
    times = [relative_compute_time(FAMILY, [HEADS, COLUMNS], d) for d in range(degree, 9)]
    assert times == sorted(times, reverse=True) and times[-1] == 1


def test_shared_heads_count_the_units_that_are_there() -> None:
    shared = Block("keys", UnitSpace(8, shared_by=32), 1.0)
    assert shared.largest_share(LayoutFamily(8), 8) == 1 / 8
    assert shared.largest_share(LayoutFamily(8), 7) == 2 / 8  # five query heads that no one key/value head serves


def test_no_blocks_and_no_flops_are_refused() -> None:
    with pytest.raises(ValueError, match="name its blocks"):
        relative_compute_time(FAMILY, [], 7)
    with pytest.raises(ValueError, match="above 0"):
        Block("attention", UnitSpace(32), 0.0)
