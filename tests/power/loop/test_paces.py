"""Paces, places and energy: what the loop makes of what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ntp.launch.progress import Sample
from lightning_ntp.power.loop.paces import LEAST, PaceMeter


class Ranks:
    """Slots, and what each shows of its progress."""

    def __init__(self) -> None:
        self.shown: dict[int, Sample] = {}

    def compute(self, slot: int, micro_batches: int, seconds: float) -> None:
        """So many more, each of which takes so long."""
        before = self.shown.get(slot, Sample())
        self.shown[slot] = Sample(
            computed_ns=before.computed_ns + round(micro_batches * seconds * 1e9),
            micro_batches=before.micro_batches + micro_batches,
        )

    def meter(self) -> PaceMeter:
        return PaceMeter(Path(), self.shown.get)


REPLICAS = {0: (0, 1), 1: (2,)}


@pytest.fixture
def ranks() -> Ranks:
    ranks = Ranks()
    for slot in range(3):
        ranks.compute(slot, 5, 9.0)  # before the first look: of no measurement
    return ranks


def test_a_replica_is_as_slow_as_its_slowest_rank(ranks: Ranks) -> None:
    meter = ranks.meter()
    assert meter.measure(REPLICAS) == {}
    for slot, seconds in enumerate((0.5, 0.7, 0.4)):
        ranks.compute(slot, 2, seconds)
    assert meter.measure(REPLICAS) == pytest.approx({0: 0.7, 1: 0.4})


def test_too_few_micro_batches_are_measured_on(ranks: Ranks) -> None:
    meter = ranks.meter()
    meter.measure(REPLICAS)
    for slot in range(3):
        ranks.compute(slot, LEAST if slot else LEAST - 1, 0.5)
    assert meter.measure(REPLICAS) == {}, "slot 0 has computed too little"
    ranks.compute(0, 1, 0.8)
    assert meter.measure(REPLICAS) == pytest.approx({0: (0.5 + 0.8) / 2, 1: 0.5}), "what it had is not lost"


def test_another_rank_in_a_slot_begins_anew(ranks: Ranks) -> None:
    meter = ranks.meter()
    meter.measure(REPLICAS)
    for slot in range(3):
        ranks.compute(slot, 4, 0.5)
    ranks.shown[2] = Sample(computed_ns=10**8, micro_batches=1)
    assert meter.measure(REPLICAS) == {}
    for slot in range(3):
        ranks.compute(slot, 2, 0.3)
    assert meter.measure(REPLICAS) == pytest.approx({0: 0.3, 1: 0.3})


def test_what_was_measured_before_a_change_does_not_count(ranks: Ranks) -> None:
    meter = ranks.meter()
    meter.measure(REPLICAS)
    for slot in range(3):
        ranks.compute(slot, 4, 5.0)
    meter.begin_anew()
    assert meter.measure(REPLICAS) == {}
    for slot in range(3):
        ranks.compute(slot, 2, 0.3)
    assert meter.measure(REPLICAS) == pytest.approx({0: 0.3, 1: 0.3})


def test_a_slot_that_is_new_to_a_replica_begins_anew(ranks: Ranks) -> None:
    meter = ranks.meter()
    meter.measure({0: (0, 1)})
    for slot in range(3):
        ranks.compute(slot, 4, 0.5)
    assert meter.measure(REPLICAS) == {}


def test_who_shows_nothing_yet_has_computed_nothing() -> None:
    ranks = Ranks()
    meter = ranks.meter()
    assert meter.measure({0: (0,)}) == {} == meter.measure({0: (0,)})
    ranks.compute(0, 2, 0.25)
    assert meter.measure({0: (0,)}) == pytest.approx({0: 0.25})


def test_micro_batches_are_counted_once_and_not_those_of_before(ranks: Ranks) -> None:
    meter = ranks.meter()
    assert meter.micro_batches([0, 1, 2]) == 0
    ranks.compute(0, 3, 0.1)
    ranks.compute(1, 2, 0.1)
    assert meter.micro_batches([0, 1, 2]) == 3
    ranks.shown[0] = Sample()  # started again
    assert meter.micro_batches([0, 1, 2]) == 0
    ranks.compute(1, 2, 0.1)
    assert meter.micro_batches([0, 1, 2]) == 2
