import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.power.control import Pace, slowest, split

paces = st.builds(Pace, st.floats(0.01, 10), st.just(0.0) | st.floats(0, 20))


def best_time(batch: int, by_replica: dict[int, Pace]) -> float:
    """By trying all splits."""
    names = sorted(by_replica)
    best = float("inf")
    for cuts in itertools.combinations(range(1, batch), len(names) - 1):
        counts = [b - a for a, b in zip((0, *cuts), (*cuts, batch), strict=True)]
        best = min(best, slowest(dict(zip(names, counts, strict=True)), by_replica))
    return best


@given(st.lists(paces, min_size=1, max_size=4), st.integers(0, 12))
def test_no_other_split_is_faster(found: list[Pace], more: int) -> None:
    by_replica = dict(enumerate(found))
    batch = len(found) + more
    counts = split(batch, by_replica)
    assert sum(counts.values()) == batch and min(counts.values()) >= 1
    assert slowest(counts, by_replica) == best_time(batch, by_replica)


@given(st.lists(paces, min_size=1, max_size=6), st.integers(0, 5000))
def test_sums_are_right_and_moving_any_sample_does_not_help(found: list[Pace], more: int) -> None:
    by_replica = dict(enumerate(found))
    counts = split(len(found) + more, by_replica)
    assert sum(counts.values()) == len(found) + more and min(counts.values()) >= 1
    time = slowest(counts, by_replica)
    for replica, pace in by_replica.items():
        assert counts[replica] == 1 or pace.seconds(counts[replica]) <= min(
            p.seconds(counts[r] + 1) for r, p in by_replica.items()
        )
    assert time == slowest(counts, by_replica)


@given(st.lists(paces, min_size=2, max_size=5), st.integers(0, 200), st.floats(0.1, 1))
def test_who_becomes_faster_gets_no_fewer_samples(found: list[Pace], more: int, factor: float) -> None:
    before = split(len(found) + more, dict(enumerate(found)))
    faster = Pace(found[0].per_sample_s * factor, found[0].fixed_s)
    after = split(len(found) + more, dict(enumerate([faster, *found[1:]])))
    assert after[0] >= before[0]
    assert all(after[r] <= before[r] for r in before if r)


@given(st.lists(paces, min_size=1, max_size=5), st.integers(0, 200))
def test_a_larger_batch_takes_no_sample_from_anybody(found: list[Pace], more: int) -> None:
    by_replica = dict(enumerate(found))
    small, large = split(len(found) + more, by_replica), split(len(found) + more + 1, by_replica)
    assert all(large[r] >= small[r] for r in small)


def test_equal_replicas_share_equally() -> None:
    assert split(64, {r: Pace(0.1) for r in range(4)}) == dict.fromkeys(range(4), 16)


def test_noise_moves_no_samples() -> None:
    present = split(64, {0: Pace(1.0), 1: Pace(1.2)})
    assert split(64, {0: Pace(1.0), 1: Pace(1.21)}, present, gain=0.02) == present
    assert split(64, {0: Pace(1.0), 1: Pace(1.5)}, present, gain=0.02) != present


@pytest.mark.parametrize("present", [{0: 32, 1: 31}, {0: 64}, {0: 64, 1: 0}, {0: 32, 2: 32}])
def test_counts_that_fit_no_longer_are_not_kept(present: dict[int, int]) -> None:
    counts = split(64, {0: Pace(1.0), 1: Pace(1.0)}, present, gain=0.9)
    assert counts == {0: 32, 1: 32}


def test_a_large_batch_is_split_at_once() -> None:
    assert sum(split(10_000_000, {r: Pace(1 + 0.1 * r) for r in range(16)}).values()) == 10_000_000


@pytest.mark.parametrize(("batch", "replicas"), [(1, 2), (0, 1), (5, 0)])
def test_too_few_samples_are_refused(batch: int, replicas: int) -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        split(batch, {r: Pace(1.0) for r in range(replicas)})


@pytest.mark.parametrize("seconds", [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0), (float("nan"), 0.0), (1.0, float("inf"))])
def test_times_that_are_none_are_refused(seconds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no pace"):
        Pace(*seconds)
