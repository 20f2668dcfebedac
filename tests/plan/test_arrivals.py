"""Who takes which empty place."""

from __future__ import annotations

import pytest

from lightning_ntp.plan import Topology, choose_joins

START = Topology.start((4, 4))


def chosen(lost: set[int], standby: set[int]) -> dict[int, int]:
    joins = choose_joins(START.lose(lost)[0] if lost else START, START, {slot: f"u{slot}" for slot in standby})
    assert all(join.uid == f"u{join.slot}" for join in joins)
    return {join.slot: join.replica for join in joins}


@pytest.mark.parametrize(
    ("lost", "standby", "expected"),
    [
        ({3}, {3}, {3: 0}),
        ({3, 5}, {3, 5}, {3: 0, 5: 1}),
        ({3}, {8}, {8: 0}),  # a spare
        ({3}, {3, 8}, {3: 0}),  # whose home it is comes first
        ({3, 4, 5}, {8}, {8: 1}),  # where most is missing
        ({3, 4, 5}, {3, 8, 9}, {3: 0, 8: 1, 9: 1}),
        (set(), {8}, {}),
        ({0, 1, 2, 3}, {0, 1, 2}, {}),  # a replica that is gone comes back whole
        ({0, 1, 2, 3}, {0, 1, 2, 3}, {0: 0, 1: 0, 2: 0, 3: 0}),
        ({0, 1, 2, 3}, {0, 1, 2, 8}, {0: 0, 1: 0, 2: 0, 8: 0}),
        ({0, 1, 2, 3, 7}, {0, 1, 2, 8}, {8: 1}),  # not at the cost of one that lives
    ],
)
def test_places_are_filled(lost: set[int], standby: set[int], expected: dict[int, int]) -> None:
    assert chosen(lost, standby) == expected


def test_who_has_lost_its_home_to_a_spare_works_elsewhere() -> None:
    topology = START.lose([3, 5])[0].grow({8: 0})
    assert [(j.slot, j.replica) for j in choose_joins(topology, START, {3: "u3"})] == [(3, 1)]
