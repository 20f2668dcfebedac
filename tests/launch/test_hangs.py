"""Who is blamed for a hang, on simulated ranks: heartbeat 2 s, a look every 0.1 s."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ntp.launch.hangs import Hangs
from lightning_ntp.launch.progress import EVERYBODY, WAITING, WAITING_BLINDLY, Sample, Tag
from tests.launch.simulated import FOR_EVER, HEARTBEAT, WORLD, Simulated, blamed

QUICK = st.lists(st.floats(0.0, 0.9 * HEARTBEAT), max_size=30)


def four(**of: Simulated) -> dict[int, Simulated]:
    """Two replicas of two; ``slot3=...`` replaces one."""
    return {slot: of.get(f"slot{slot}", Simulated(slot // 2)) for slot in range(4)}


@settings(deadline=None, max_examples=25)
@given(st.lists(QUICK, min_size=4, max_size=4), st.integers(0, 3), st.integers(2, 20))
def test_only_the_rank_that_hangs_is_blamed(seconds: list[list[float]], slot: int, position: int) -> None:
    world = {s: Simulated(s // 2, seconds[s]) for s in range(4)}
    before = (seconds[slot] + [0.3] * 20)[:position]
    world[slot] = Simulated(slot // 2, [*before, FOR_EVER])
    found = blamed(world)
    assert found.keys() == {slot}, found
    # all others come to it within 30 computations of 2 s at most
    assert "no progress for" in found[slot][1] and "in a training step" in found[slot][1]


@settings(deadline=None, max_examples=25)
@given(st.lists(QUICK, min_size=4, max_size=4), st.lists(st.floats(0.0, 3.0), min_size=4, max_size=4))
def test_healthy_ranks_are_never_blamed(seconds: list[list[float]], first: list[float]) -> None:
    assert not blamed({s: Simulated(s // 2, [first[s], *seconds[s]]) for s in range(4)})


def test_a_rank_that_hangs_is_found_within_two_heartbeats() -> None:
    ((slot, (when, why)),) = blamed(four(slot3=Simulated(1, [0.3] * 10 + [FOR_EVER]))).items()
    assert slot == 3 and 3.0 + HEARTBEAT < when < 4.5 + HEARTBEAT, (when, why)
    assert why.startswith("hung: no progress for 2.") and why.endswith("s in a training step, and slot 0 waits for it")


def test_a_slow_first_step_is_not_blamed() -> None:
    assert not blamed(four(slot3=Simulated(1, [9 * HEARTBEAT])))


def test_a_first_step_that_never_ends_is() -> None:
    found = blamed(four(slot3=Simulated(1, [FOR_EVER])))
    assert found.keys() == {3} and 10 * HEARTBEAT <= found[3][0] < 11 * HEARTBEAT


def test_the_first_step_is_no_measure_for_the_others() -> None:
    found = blamed({s: Simulated(s // 2, [15.0] + ([0.3] * 4 + [FOR_EVER] if s == 1 else [])) for s in range(4)})
    assert found.keys() == {1} and found[1][0] < 15.0 + 5.0 + HEARTBEAT


def test_a_stall_as_long_as_earlier_ones_is_not_blamed_and_a_much_longer_one_is() -> None:
    stalls = [0.3] * 4 + [1.5] * 4
    assert not blamed(four(slot0=Simulated(0, [*stalls, 6.0])))
    found = blamed(four(slot0=Simulated(0, [*stalls, 9.0])))
    assert found.keys() == {0} and "no progress for 7." in found[0][1], "five times 1.5 s and the looks between"


def test_every_kind_of_work_has_its_own_measure() -> None:
    hangs = Hangs(HEARTBEAT)
    done = [0] * len(Tag)
    done[Tag.STEP] = 5
    sample = Sample(tag=Tag.STEP, done=tuple(done))
    hangs.look(0.0, {0: sample})
    assert hangs.limit(Tag.STEP) == HEARTBEAT
    assert hangs.limit(Tag.CHECKPOINT) == hangs.limit(Tag.EVALUATION) == 10 * HEARTBEAT


def test_a_slow_replica_that_nobody_needs_yet_is_not_blamed() -> None:
    """Slot 3 hangs, slot 2 waits for it in their replica; slots 0 and 1 take long, and nobody waits for them."""
    slow = [0.3] * 8 + [7.0]
    found = blamed(
        {
            0: Simulated(0, slow),
            1: Simulated(0, slow),
            2: Simulated(1, [0.3] * 8),
            3: Simulated(1, [0.3] * 8 + [FOR_EVER]),
        },
        seconds=9.0,
    )
    assert found.keys() == {3}


def test_two_that_hang_are_blamed_one_after_the_other() -> None:
    hung = [0.3] * 8 + [FOR_EVER]
    found = blamed(four(slot1=Simulated(0, hung), slot3=Simulated(1, hung)))
    assert found.keys() == {1, 3} and abs(found[1][0] - found[3][0]) >= HEARTBEAT - 0.01


def test_a_rank_is_not_blamed_outside_of_training() -> None:
    assert not blamed(four(slot3=Simulated(1, [0.3] * 8 + [FOR_EVER], tag=Tag.SETUP)))


@pytest.mark.parametrize("tag", set(Tag) - {Tag.SETUP})
def test_a_hang_is_found_whatever_the_rank_was_doing(tag: Tag) -> None:
    found = blamed({s: Simulated(s // 2, [0.3] * 8 + [FOR_EVER] * (s == 2), tag=tag) for s in range(4)})
    assert found.keys() == {2}


def test_a_rank_frozen_in_its_wait_is_blamed() -> None:
    # before the first collective of all ends, so that it has entered what the others wait for
    world = four(slot3=Simulated(1, [0.3] * 9, frozen_from=2.75), slot0=Simulated(0, [0.3] * 7 + [1.0]))
    assert blamed(world).keys() == {3}


# ---- stopped processes -----------------------------------------------------------------------------------------------


def test_a_stopped_rank_is_blamed_also_in_its_first_step() -> None:
    found = blamed(four(slot3=Simulated(1, [30.0])), stopped=lambda now: {3} if now >= 1.0 else set())
    assert found.keys() == {3} and 1.0 + HEARTBEAT <= found[3][0] < 1.5 + HEARTBEAT
    assert "its process is stopped (SIGSTOP)" in found[3][1]


def test_a_short_stop_is_not_blamed() -> None:
    assert not blamed(four(), stopped=lambda now: {2} if 5.0 <= now < 6.5 or 7.0 <= now < 8.5 else set())


def test_ranks_that_are_all_stopped_are_not_blamed() -> None:
    assert not blamed(four(), stopped=lambda now: {0, 1, 2, 3} if 5.0 <= now < 30.0 else set())


def test_a_stopped_rank_is_blamed_also_when_all_others_are_done() -> None:
    """Nobody needs it any more, but the job would never end."""
    hangs, found = Hangs(HEARTBEAT), {}
    for look in range(100):
        now = look * 0.1
        others = {slot: Sample(seq=look, left=now >= 1.0) for slot in (0, 1, 2) if now < 1.5}
        for slot, why in hangs.look(now, {**others, 3: Sample(seq=5)}, {3} if now >= 0.5 else set()).blamed.items():
            found.setdefault(slot, (now, why))
    assert found.keys() == {3} and 0.5 + HEARTBEAT <= found[3][0] < 1.0 + HEARTBEAT, found


def test_ranks_that_are_stopped_one_after_the_other_are_blamed() -> None:
    found = blamed(four(), stopped=lambda now: {slot for slot in range(4) if now >= 1.0 + 0.5 * slot})
    assert found.keys() == {0, 1, 2, 3}, found


def test_a_pause_is_no_reason_to_blame_who_goes_on_last() -> None:
    assert not blamed(
        four(), stopped=lambda now: {slot for slot in range(4) if 5.0 + 0.1 * slot <= now < 30 + slot / 2}
    )


def test_a_pause_of_the_whole_job_is_not_blamed() -> None:
    assert not blamed(
        four(), pauses=[(5.0, 40.0)], stopped=lambda now: {0, 2} if now < 5.0 + 35.9 and now > 4.9 else set()
    )
    found = blamed(four(slot1=Simulated(0, [0.3] * 8 + [FOR_EVER])), pauses=[(4.0, 20.0)])
    assert found.keys() == {1} and found[1][0] >= 20.0 + HEARTBEAT


# ---- nobody to blame -------------------------------------------------------------------------------------------------


def test_ranks_that_all_wait_end_the_job() -> None:
    world = four()
    world[2].entered[WORLD] = -1  # it will have entered one less than the others, and wait like them
    world[3].cycle = (world[3].cycle[0], 99)
    world[3].entered[99] = 0
    world[1].entered[99] = -5
    found = blamed(world)
    assert found.keys() == {-1} and "all 4 ranks wait for each other for 20 s" in found[-1][1], found


def test_ranks_that_wait_for_their_gradient_sync_are_not_stuck_while_it_goes_on() -> None:
    hangs = Hangs(HEARTBEAT)
    for look in range(1000):
        waits = Sample(seq=3, ticks=look, waiting=WAITING, tag=Tag.STEP, groups=((WORLD, look // 100),))
        verdict = hangs.look(look * 0.1, {0: waits, 1: waits})
        assert not verdict.blamed and not verdict.deadlock


def test_a_blind_wait_is_never_blamed() -> None:
    waits = Sample(seq=3, waiting=WAITING_BLINDLY, waits_for=WORLD, tag=Tag.STEP, groups=((WORLD, 4),))
    busy = Sample(seq=3, waiting=WAITING, waits_for=EVERYBODY, tag=Tag.STEP)
    hangs = Hangs(HEARTBEAT)
    for look in range(1000):
        verdict = hangs.look(look * 0.1, {0: waits, 1: replace(busy, ticks=look, seq=look // 100)})
        assert not verdict.blamed and not verdict.deadlock


def test_where_waits_cannot_be_seen_who_is_ahead_is_not_blamed() -> None:
    done = tuple([3] * len(Tag))
    ahead = Sample(seq=9, tag=Tag.STEP, done=done, groups=((WORLD, 4),), blind=True)
    behind = Sample(seq=8, tag=Tag.STEP, done=done, groups=((WORLD, 3),), blind=True)
    hangs = Hangs(HEARTBEAT)
    found = [hangs.look(look * 0.1, {0: ahead, 1: ahead, 2: behind}) for look in range(30)]
    assert {slot for verdict in found for slot in verdict.blamed} == {2}


def test_who_has_left_is_not_missed() -> None:
    world = four()
    hangs = Hangs(HEARTBEAT)
    left = Sample(left=True, tag=Tag.STEP)
    for look in range(300):
        waits = {s: replace(r.sample, waiting=WAITING, waits_for=EVERYBODY, ticks=look) for s, r in world.items()}
        verdict = hangs.look(look * 0.1, {**waits, 0: replace(waits[0], seq=look, waiting=0), 3: left})
        assert not verdict.blamed and not verdict.deadlock


# ---- somebody is about to join --------------------------------------------------------------------------------------


def look_at_arrival(newcomer: Sample, seconds: float) -> dict[float, set[int]]:
    """Two members wait in one collective for the newcomer in slot 2, from the start. Returns who is blamed when."""
    hangs, found = Hangs(HEARTBEAT), {}
    for look in range(int(seconds / 0.1)):
        waits = Sample(ticks=look, waiting=WAITING, waits_for=WORLD, tag=Tag.STEP, groups=((WORLD, 3),))
        verdict = hangs.look(0.1 * look, {0: waits, 1: waits, 2: newcomer}, newcomers={2})
        assert not verdict.deadlock
        if verdict.blamed:
            found[0.1 * look] = {*verdict.blamed}
    return found


def test_a_newcomer_is_blamed_where_all_members_wait_and_nobody_else_can_be() -> None:
    """It has nothing in common with them yet, or seems to wait as well."""
    alone = Sample(tag=Tag.STEP, groups=((77, 1),))
    first, slots = next(iter(look_at_arrival(alone, 6.0).items()))
    assert slots == {2} and 2 * HEARTBEAT <= first < 2 * HEARTBEAT + 0.3


def test_a_newcomer_does_not_hide_that_the_members_wait_for_each_other() -> None:
    hangs = Hangs(HEARTBEAT)
    for look in range(300):
        now = 0.1 * look
        members = {
            slot: Sample(ticks=look, waiting=WAITING, waits_for=WORLD + slot, tag=Tag.STEP, groups=((WORLD + slot, 3),))
            for slot in (0, 1)
        }
        newcomers = {2: Sample(seq=look, tag=Tag.STEP)} if now < 3 * HEARTBEAT else {}
        verdict = hangs.look(now, {**members, **newcomers}, newcomers=newcomers.keys())
        if verdict.deadlock:
            break
    assert verdict.deadlock and now < 15 * HEARTBEAT
