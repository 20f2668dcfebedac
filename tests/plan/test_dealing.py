"""However a global batch is dealt, it stays the same samples; who computes how many is as asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan.dealing import covers, deal, scale, shareholders
from lightning_ntp.plan.sample_limits import UNLIMITED, most_samples, within
from lightning_ntp.plan.share_schedule import Entry, ShareSchedule
from tests.plan.drawing import quick


@st.composite
def asked(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Samples of a replica's whole batch; counts that sum to the global batch, with some replicas gone; who is live."""
    replicas = draw(st.integers(1, 6))
    there = sorted(draw(st.sets(st.integers(0, replicas - 1), min_size=1)))
    size = draw(st.integers(1, 9))
    spare = size * replicas - len(there)
    cuts = sorted(draw(st.lists(st.integers(0, spare), min_size=len(there) - 1, max_size=len(there) - 1)))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, spare], strict=True)]
    counts = [0] * replicas
    for replica, part in zip(there, parts, strict=True):
        counts[replica] = 1 + part
    live = draw(st.sets(st.integers(0, replicas - 1), min_size=1))
    return size, counts, sorted(live)


def launch(size: int, replicas: int) -> list[list[int]]:
    """The batches of the launch, as a distributed sampler deals them."""
    return [list(range(replica, size * replicas, replicas)) for replica in range(replicas)]


@quick
@given(asked(), st.data())
def test_every_sample_is_dealt_once_to_somebody_who_is_there(
    case: tuple[int, list[int], list[int]], data: st.DataObject
) -> None:
    size, counts, live = case
    smaller = data.draw(st.integers(1, size))
    for given_counts in (counts, None):
        dealt = deal(launch(smaller, len(counts)), given_counts, live)
        assert list(dealt) == live
        assert sorted(index for part in dealt.values() for index in part) == list(range(smaller * len(counts)))
        assert all(dealt.values()), "everybody has at least one"


@quick
@given(asked())
def test_counts_are_met_and_each_keeps_the_head_of_its_own(case: tuple[int, list[int], list[int]]) -> None:
    size, counts, _ = case
    batches = launch(size, len(counts))
    dealt = deal(batches, counts, shareholders(counts, len(counts)))
    assert {replica: len(part) for replica, part in dealt.items()} == {r: c for r, c in enumerate(counts) if c}
    for replica, part in dealt.items():
        kept = min(size, counts[replica])
        assert part[:kept] == batches[replica][:kept]


@quick
@given(st.integers(1, 9), st.integers(1, 6))
def test_equal_counts_are_the_batches_of_the_launch(size: int, replicas: int) -> None:
    batches, everybody = launch(size, replicas), range(replicas)
    assert deal(batches, [size] * replicas, everybody) == deal(batches, None, everybody) == dict(enumerate(batches))


def test_samples_of_a_replica_that_is_gone_go_to_the_others_in_turn() -> None:
    assert deal([[0, 1], [2, 3], [4, 5]], None, [0, 2]) == {0: [0, 1, 2], 2: [4, 5, 3]}
    assert deal([[0, 1], [2, 3], [4, 5]], (1, 4, 1), [0, 2]) == {0: [0, 2, 1], 2: [4, 3, 5]}


def test_counts_that_leave_out_who_is_there_do_not_hold() -> None:
    assert covers((3, 0, 3), [0, 2]) and covers(None, [1]) and not covers((3, 0, 3), [0, 1, 2])
    assert deal([[0, 1], [2, 3], [4, 5]], (3, 0, 3), [0, 1, 2]) == {0: [0, 1], 1: [2, 3], 2: [4, 5]}


@quick
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any), st.integers(1, 60))
def test_a_smaller_batch_is_dealt_in_the_same_proportions(counts: list[int], total: int) -> None:
    scaled = scale(counts, total)
    assert sum(scaled) == total
    takers = sum(count > 0 for count in counts)
    for count, found in zip(counts, scaled, strict=True):
        assert (count > 0) or found == 0
        assert not (count and total >= takers) or found >= 1
        # one by rounding, one for each who would have had none
        assert abs(found - count * total / sum(counts)) < 1 + takers


def test_largest_remainders_are_rounded_up() -> None:
    assert scale((5, 3, 1), 6) == (3, 2, 1)
    assert scale((5, 3, 1), 9) == (5, 3, 1)
    assert scale((97, 1, 1, 1), 4) == (1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"3 samples cannot be dealt by the counts \(0, 0\)"):
        scale((0, 0), 3)


# ---- limits ---------------------------------------------------------------------------------------------------------


@quick
@given(st.integers(1, 64), st.integers(0, 100), st.integers(1, 100), st.integers(1, 4000))
def test_the_most_samples_fit_and_one_more_would_not(now: int, static: int, per_sample: int, total: int) -> None:
    found = most_samples(now, static, static + now * per_sample, total, reserve=0)
    assert found >= now
    if found > now:
        assert static + found * per_sample <= total < static + (found + 1) * per_sample


def test_what_needs_nothing_has_no_limit_and_a_reserve_stays_free() -> None:
    assert most_samples(2, 100, 100, 101) == UNLIMITED
    assert most_samples(2, 100, 120, 200) == 8
    assert most_samples(2, 100, 120, 200, reserve=0) == 10
    with pytest.raises(ValueError, match="now=0"):
        most_samples(0, 1, 2, 3)
    with pytest.raises(ValueError, match="reserve=1"):
        most_samples(1, 1, 2, 3, reserve=1)


@quick
@given(asked(), st.data())
def test_counts_are_cut_to_what_fits_and_nothing_is_lost(
    case: tuple[int, list[int], list[int]], data: st.DataObject
) -> None:
    _, counts, _ = case
    most = data.draw(st.lists(st.integers(0, 30), min_size=len(counts), max_size=len(counts)))
    cut = within(counts, most)
    room = sum(limit for limit, count in zip(most, counts, strict=True) if count)
    if cut is None:
        assert room < sum(counts)
        return
    assert sum(cut) == sum(counts) <= room
    for count, limit, found in zip(counts, most, cut, strict=True):
        assert found <= limit if count else found == 0
        assert found >= min(count, limit)


# ---- the schedule ---------------------------------------------------------------------------------------------------


def test_shares_hold_from_their_batch_on_through_later_epochs() -> None:
    schedule = ShareSchedule().announce(3, Entry(0, 5, (3, 1))).announce(4, Entry(1, 2, None))
    assert [schedule.at(0, 4), schedule.at(0, 5), schedule.at(1, 0), schedule.at(1, 2)] == [None, (3, 1), (3, 1), None]
    assert ShareSchedule.of(schedule.record()) == schedule and schedule.version == 4


def test_what_has_begun_is_not_changed_by_what_is_announced_later() -> None:
    schedule = ShareSchedule().announce(1, Entry(1, 5, (3, 1)))
    assert schedule.announce(2, Entry(1, 4, (1, 3))).entries == (Entry(1, 5, (1, 3)),)
    assert schedule.announce(2, Entry(1, 5, (1, 3))).entries == (Entry(1, 5, (1, 3)),)
    assert schedule.announce(2, None) == ShareSchedule(2, schedule.entries)


def test_a_long_schedule_forgets_its_beginning() -> None:
    schedule = ShareSchedule()
    for number in range(1000):
        schedule = schedule.announce(number + 1, Entry(number, 0, (number, 1)))
    assert len(schedule.entries) <= 256 and schedule.at(999, 0) == (999, 1) and schedule.at(800, 3) == (800, 1)
