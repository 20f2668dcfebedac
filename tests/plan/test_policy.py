"""What is decided when slots are lost."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan import Segment, Sharding, Topology, TopologyError, UnitSpace
from lightning_ntp.plan.cost import CutTensor, reshard_cost
from lightning_ntp.plan.policy import Action, PolicyError, RecoveryPolicy, decide
from lightning_ntp.plan.reshard import plan_reshard
from tests.plan.drawing import quick

ANY = RecoveryPolicy()


def cut(units: int, size: int = 1) -> Sharding:
    return Sharding(0, (Segment(UnitSpace(units), size),))


@pytest.mark.parametrize(
    ("degrees", "lost", "least", "action", "after", "line"),
    [
        ((4, 4), [5], 1, Action.SHRINK, (4, 3), "slot 5 lost: degrees (4, 4) -> (4, 3)"),
        ((4, 4), [7, 6], 2, Action.SHRINK, (4, 2), "slots 6, 7 lost: degrees (4, 4) -> (4, 2)"),
        (
            (4, 4),
            [6, 7],
            3,
            Action.DROP,
            (4, 0),
            "slots 6, 7 lost: degrees (4, 4) -> (4, -); replica 1 is dropped (degree 2 is below"
            " min_tensor_parallel_size=3); healthy slots 4, 5 leave",
        ),
        (
            (2, 2, 2),
            [2, 3],
            1,
            Action.DROP,
            (2, 0, 2),
            "slots 2, 3 lost: degrees (2, 2, 2) -> (2, -, 2); replica 1 is gone",
        ),
        ((1, 1), [0], 1, Action.DROP, (0, 1), "slot 0 lost: degrees (1, 1) -> (-, 1); replica 0 is gone"),
        (
            (4, 2, 3),
            [1, 4],
            2,
            Action.DROP,
            (3, 0, 3),
            "slots 1, 4 lost: degrees (4, 2, 3) -> (3, -, 3); replica 1 is dropped (degree 1 is below"
            " min_tensor_parallel_size=2); healthy slot 5 leaves; slot 3 index 3 -> 1",
        ),
        (
            (2, 2),
            [1, 2],
            2,
            Action.CHECKPOINT_AND_END,
            (1, 1),
            "slots 1, 2 lost: checkpoint, then end; no replica would be left: replica 0 is dropped (degree 1 is below"
            " min_tensor_parallel_size=2), replica 1 is dropped (degree 1 is below min_tensor_parallel_size=2); a copy"
            " of everything is left",
        ),
        (
            (4,),
            [2],
            1,
            Action.END,
            None,
            "slot 2 lost: end; some units had their only copies on the lost slots; restart from the newest checkpoint",
        ),
        ((2,), [0, 1], 1, Action.END, None, "slots 0, 1 lost: end; nobody is left; restart from the newest checkpoint"),
    ],
)
def test_decisions(
    degrees: tuple[int, ...], lost: list[int], least: int, action: Action, after: Any, line: str
) -> None:
    decision = decide(Topology.start(degrees), lost, RecoveryPolicy(least))
    assert decision.action is action
    assert (decision.after and decision.after.degrees) == after
    assert str(decision) == line
    assert decision.goes_on == (action in (Action.SHRINK, Action.DROP))


def test_only_replicas_below_the_minimum_because_of_this_loss_are_dropped() -> None:
    # replica 1 is at 2 already, by a policy that the user has changed since: its slots are healthy and stay
    topology = Topology.start((4, 2, 4))
    decision = decide(topology, [9], RecoveryPolicy(3))
    assert (decision.action, decision.after and decision.after.degrees) == (Action.SHRINK, (4, 2, 3))


def test_healthy_members_of_a_dropped_replica_still_count_as_copies() -> None:
    # index 0 is lost in replica 0, index 1 in replica 1, which is dropped: its slot 2 holds what replica 0 needs
    decision = decide(Topology.start((3, 2)), [0, 4], RecoveryPolicy(2))
    assert decision.action is Action.DROP
    assert decision.released == (3,)
    assert decision.after is not None
    plan_reshard(decision.before, decision.after, cut(9), gone=decision.lost)


def test_whether_a_copy_is_left_depends_on_how_the_model_is_cut() -> None:
    # at (3, 2) index 2's units are dealt to 0 and 1 in replica 1; of only three units there is one, and it goes to 0
    topology = Topology.start((3, 2))
    assert decide(topology, [2, 4], ANY, shardings=[cut(9)]).action is Action.END
    assert decide(topology, [2, 4], ANY, shardings=[cut(3)]).action is Action.SHRINK
    assert decide(topology, [2, 4], ANY).action is Action.END, "the worst is assumed"
    whole = Sharding(None, gradient="full")
    assert decide(topology, [0, 3], ANY, shardings=[whole]).action is Action.SHRINK
    decision = decide(topology, [0, 3], ANY, shardings=[whole, cut(8)])
    assert str(decision).startswith("slots 0, 3 lost: end; 3 of 8 units of a parameter had their only copies")


@st.composite
def losses(draw: st.DrawFn) -> tuple[Topology, list[int], int]:
    degrees = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda d: sum(d) > 1))
    topology = Topology.start(degrees)
    lost = draw(st.lists(st.sampled_from(topology.slots), min_size=1, unique=True, max_size=topology.world_size))
    return topology, lost, draw(st.integers(max(degrees), 12))


@quick
@given(losses(), st.integers(1, 4))
def test_what_goes_on_has_a_copy_of_everything_and_what_ends_has_not(
    loss: tuple[Topology, list[int], int], least: int
) -> None:
    topology, lost, units = loss
    sharding = cut(units)
    decision = decide(topology, lost, RecoveryPolicy(least), shardings=[sharding])
    if decision.action is Action.END:
        if len(lost) < topology.world_size:
            with pytest.raises(TopologyError):
                plan_reshard(topology, topology.lose(lost)[0], sharding, lost)
        return
    assert decision.after is not None
    plan_reshard(topology, decision.after, sharding, lost)  # raises if a unit has no holder
    assert set(decision.after.slots) == set(topology.slots) - set(lost) - set(decision.released)
    if decision.goes_on:
        for replica in decision.after.live_replicas:
            degree = decision.after.degrees[replica]
            assert degree >= least or degree == topology.degrees[replica]


@pytest.mark.parametrize(
    ("settings", "failures", "goes_on"),
    [
        (RecoveryPolicy(), [1.0, 2.0, 3.0], True),
        (RecoveryPolicy(max_failures=0), [5.0], False),
        (RecoveryPolicy(max_failures=2), [1.0, 1000.0], True),
        (RecoveryPolicy(max_failures=2), [1.0, 1000.0, 9000.0], False),
        (RecoveryPolicy(max_failures=1, failure_window=60), [10.0, 71.0], True),
        (RecoveryPolicy(max_failures=1, failure_window=60), [11.0, 70.9], False),
        (RecoveryPolicy(max_failures=1, failure_window=timedelta(minutes=1)), [11.0, 70.9], False),
    ],
)
def test_failures_are_counted_in_their_window(settings: RecoveryPolicy, failures: list[float], goes_on: bool) -> None:
    decision = decide(Topology.start((2, 2)), [3], settings, failures)
    assert decision.action is (Action.SHRINK if goes_on else Action.CHECKPOINT_AND_END)


def test_too_many_failures_say_how_many_and_when() -> None:
    settings = RecoveryPolicy(max_failures=1, failure_window=timedelta(hours=1))
    line = str(decide(Topology.start((2, 2)), [3], settings, [3.0, 4.0]))
    assert line == (
        "slot 3 lost: checkpoint, then end; 2 failures within 3600 s, and max_failures=1; a copy of everything is left"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_tensor_parallel_size": 0}, "min_tensor_parallel_size=0 is not an integer of at least 1"),
        ({"min_tensor_parallel_size": math.nan}, "min_tensor_parallel_size=nan is not an integer"),
        ({"min_tensor_parallel_size": True}, "min_tensor_parallel_size=True is not"),
        ({"max_failures": -1}, "max_failures=-1 is not an integer of at least 0"),
        ({"max_failures": math.nan}, "max_failures=nan is not"),
        ({"max_failures": 1.5}, "max_failures=1.5 is not"),
        ({"failure_window": 60}, "failure_window=60 does nothing without max_failures"),
        ({"max_failures": 1, "failure_window": math.nan}, "failure_window=nan must be a finite number of seconds"),
        ({"max_failures": 1, "failure_window": 0}, "failure_window=0 must be a finite number of seconds above 0"),
        ({"max_failures": 1, "failure_window": timedelta(0)}, "must be a finite number of seconds above 0"),
        ({"max_failures": 1, "failure_window": "soon"}, "failure_window='soon' is neither a number of seconds nor"),
        ({"max_failures": 1, "failure_window": True}, "failure_window=True must be a finite number"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        RecoveryPolicy(**settings)


def test_a_minimum_above_a_starting_degree_is_refused_with_the_largest_that_works() -> None:
    RecoveryPolicy(3).check_degrees((4, 3))
    with pytest.raises(
        PolicyError, match=r"min_tensor_parallel_size=4 is above the starting degree 3 of replica 1 .*at most 3"
    ):
        RecoveryPolicy(4).check_degrees((4, 3))


def test_bad_losses_are_refused() -> None:
    with pytest.raises(ValueError, match="lost_slots is empty"):
        decide(Topology.start((2, 2)), [], ANY)
    with pytest.raises(TopologyError, match="slot 9 is not alive"):
        decide(Topology.start((2, 2)), [9], ANY)


def test_the_cost_of_losing_the_dropped_index_is_exactly_what_was_lost() -> None:
    tensor = CutTensor("w", (32, 10), cut(32), element_bytes=12)
    topology = Topology.start((8, 8))
    after, _ = topology.lose([15])
    cost = reshard_cost(topology, after, [tensor], [15])
    assert cost.bytes_moved == 4 * 10 * 12
    assert cost.sources == (7,)
    assert cost.transfers == {(7, slot): 120 for slot in (8, 9, 10, 11)}
    assert [cost.extra(slot) for slot in after.slots] == [0] * 8 + [120] * 4 + [0] * 3
    assert cost.largest_share(1) == (4 / 32, 5 / 32)
    # the new shard of 5 rows beside the old one, and the row that arrives
    assert (cost.peak[8], cost.peak[7], cost.peak[0]) == (5 * 120 + 120, 4 * 120, 0)


def test_a_dropped_replica_costs_nothing_and_its_healthy_members_may_send() -> None:
    tensor = CutTensor("w", (12, 2), cut(12), element_bytes=4, count=3)
    topology = Topology.start((3, 2))
    decision = decide(topology, [0, 4], RecoveryPolicy(2))
    assert decision.after is not None
    cost = reshard_cost(topology, decision.after, [tensor], decision.lost)
    assert cost.largest_share(1)[1] == 0
    assert 3 in cost.sources
    assert sum(cost.held_after.values()) == cost.model_bytes == 12 * 2 * 4 * 3
