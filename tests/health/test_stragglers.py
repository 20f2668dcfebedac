"""Slow ranks are told from those that wait for them, by what ranks show of their progress."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.health import Action, Finding, StragglerSource, Verdicts, WatchedJob
from lightning_ntp.health.rules import SeverityTable
from lightning_ntp.launch.progress import Sample, Tag, progress_path
from tests.health.sourcing import Told

MILLISECOND = 10**6


class Ranks:
    """What ranks show, and a source that looks at it."""

    def __init__(self, replicas: Mapping[int, int], **options: Any) -> None:
        self.replicas = dict(replicas)
        self.source = StragglerSource(**options)
        self.done = dict.fromkeys(self.replicas, 1)
        self.worked = dict.fromkeys(self.replicas, 0)
        self.blind = False

    def samples(self) -> dict[int, Sample]:
        samples = {}
        for slot in self.replicas:
            done = tuple(self.done[slot] if tag is Tag.STEP else 0 for tag in Tag)
            samples[slot] = Sample(done=done, worked_ns=self.worked[slot], blind=self.blind)
        return samples

    def look(self) -> list[Finding]:
        return self.source.look(self.samples(), self.replicas)

    def work(self, milliseconds: Mapping[int, float], steps: int = 10, looks: int = 1) -> list[Finding]:
        """All ranks make so many steps before each look, of 10 ms of work if nothing is said."""
        found = []
        for _ in range(looks):
            for slot in self.replicas:
                self.done[slot] += steps
                self.worked[slot] += round(milliseconds.get(slot, 10.0) * MILLISECOND) * steps
            found += self.look()
        return found

    def begin_anew(self, done: int = 0) -> None:
        """The members have changed."""
        for slot in self.replicas:
            self.done[slot] = done
            self.worked[slot] = 0


@pytest.fixture
def ranks() -> Ranks:
    ranks = Ranks({slot: slot // 4 for slot in range(8)})
    assert ranks.look() == []
    return ranks


def test_a_slow_rank_is_found_once_and_named_with_figures(ranks: Ranks) -> None:
    assert ranks.work({}, looks=10) == []
    assert ranks.work({5: 15.26}, looks=4) == []
    (finding,) = ranks.work({5: 15.26})
    assert (finding.signal, finding.slot, finding.clears, finding.action) == ("straggler", 5, False, None)
    assert finding.text == "15.3 ms of work per step against 10.0 ms, the median of its replica"
    assert finding.values == {"work_ms": pytest.approx(15.26), "median_work_ms": 10.0}
    assert ranks.work({5: 15.26}, looks=20) == []
    assert Verdicts(SeverityTable()).judge([finding], 0.0)[0].action is Action.LOG, "nobody lives there"


def test_it_is_fine_again_when_it_is_clearly_faster(ranks: Ranks) -> None:
    assert len(ranks.work({5: 20.0}, looks=5)) == 1
    assert ranks.work({5: 12.5}, looks=50) == [], "between the two thresholds nothing changes"
    assert ranks.work({5: 10.5}, looks=4) == []
    (finding,) = ranks.work({5: 10.5})
    assert (finding.slot, finding.clears) == (5, True)
    assert ranks.work({5: 12.5}, looks=50) == []
    assert len(ranks.work({5: 20.0}, looks=5)) == 1


def test_it_must_be_slow_without_a_break(ranks: Ranks) -> None:
    for _ in range(10):
        assert ranks.work({5: 20.0}, looks=4) == [] and ranks.work({}) == []


def test_long_steps_need_as_many_steps(ranks: Ranks) -> None:
    assert ranks.work({5: 9000.0, **dict.fromkeys([4, 6, 7], 5000.0)}, steps=1, looks=19) == []
    assert len(ranks.work({5: 9000.0, **dict.fromkeys([4, 6, 7], 5000.0)}, steps=1)) == 1


def test_looks_between_two_steps_say_nothing(ranks: Ranks) -> None:
    for number in range(30):
        for _ in range(5):
            assert ranks.look() == []
        found = ranks.work({5: 9000.0}, steps=1)
        assert bool(found) == (number == 19)


def test_one_pause_over_many_short_steps_is_nothing(ranks: Ranks) -> None:
    assert ranks.work({5: 20.0}, steps=1000) == []


def test_noise_of_short_steps_is_nothing(ranks: Ranks) -> None:
    assert ranks.work({slot: 0.3 if slot != 5 else 0.9 for slot in range(8)}, steps=1000, looks=50) == []


def test_replicas_are_compared_within_themselves() -> None:
    ranks = Ranks({0: 0, 1: 0, 2: 1, 3: 1, 4: 2})
    ranks.look()
    assert ranks.work({2: 30.0, 3: 30.0, 4: 90.0}, looks=20) == [], "other degrees, other parts; one rank has no peers"
    assert [each.slot for each in ranks.work({0: 14.0, 2: 30.0, 3: 30.0}, looks=5)] == [0], "the faster one of two"


def test_several_slow_ranks_are_found_up_to_half_of_a_replica(ranks: Ranks) -> None:
    assert [each.slot for each in ranks.work({4: 30.0, 5: 20.0}, looks=5)] == [4, 5]


def test_nothing_is_found_where_replicas_are_not_known() -> None:
    ranks = Ranks({0: 0, 1: 0})
    for _ in range(20):
        ranks.work({1: 50.0})
        assert ranks.source.look(ranks.samples(), {}) == []


def test_recoveries_and_what_is_done_again_do_not_count(ranks: Ranks) -> None:
    assert ranks.work({5: 20.0}, looks=4) == []
    ranks.begin_anew()
    assert ranks.look() == []
    ranks.begin_anew(done=1)  # the step in which it happened
    assert ranks.look() == []
    assert ranks.work({5: 20.0}, looks=4) == [], "it begins anew"
    assert len(ranks.work({5: 20.0})) == 1
    ranks.done = {slot: done + 3 for slot, done in ranks.done.items()}
    ranks.worked = dict.fromkeys(ranks.worked, 0)  # steps that could not be measured
    assert ranks.look() == []


def test_a_rank_that_shows_a_break_before_the_others_is_not_slow(ranks: Ranks) -> None:
    assert ranks.work({}, looks=3) == []
    for early in range(4, 8):
        ranks.done[early] += 1
        ranks.worked[early] = 0
        assert ranks.look() == []
    assert ranks.work({}, looks=20) == []


def test_a_slot_that_is_gone_is_not_slow_any_more(ranks: Ranks) -> None:
    assert len(ranks.work({5: 20.0}, looks=5)) == 1
    del ranks.replicas[5]
    (finding,) = ranks.look()
    assert (finding.slot, finding.clears) == (5, True)
    ranks.replicas[5] = 1
    ranks.begin_anew(done=1)
    assert ranks.look() == [] and ranks.work({5: 20.0}, looks=4) == []
    assert len(ranks.work({5: 20.0})) == 1, "its device is as slow as before"


def test_a_rank_without_peers_is_not_slow_any_more() -> None:
    ranks = Ranks({0: 0, 1: 0})
    ranks.look()
    assert len(ranks.work({0: 20.0}, looks=5)) == 1
    del ranks.replicas[1]
    assert [(each.slot, each.clears) for each in ranks.work({0: 20.0})] == [(0, True)]


def test_a_rank_that_changes_its_replica_begins_anew(ranks: Ranks) -> None:
    assert ranks.work({5: 20.0}, looks=4) == []
    ranks.replicas[5] = 0
    assert ranks.work({5: 20.0}, looks=4) == []


def test_waits_that_cannot_be_seen_are_told_once(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    told = Told(caplog)
    ranks.blind = True
    assert ranks.work({5: 50.0}, looks=20) == []
    (message,) = told()
    assert "stragglers are not looked for" in message


@given(
    st.lists(
        st.dictionaries(
            st.integers(0, 5),
            st.tuples(st.integers(0, 3), st.integers(0, 2**63), st.integers(-1, 2), st.booleans()),
        ),
        max_size=30,
    )
)
def test_whatever_ranks_show_there_is_an_answer(shown: list[dict[int, tuple[int, int, int, bool]]]) -> None:
    source, slow = StragglerSource(steps=1), set()
    for each in shown:
        samples = {
            slot: Sample(done=(0, done, *(0,) * 6), worked_ns=worked, blind=blind)
            for slot, (done, worked, _, blind) in each.items()
        }
        for finding in source.look(samples, {slot: replica for slot, (_, _, replica, _) in each.items()}):
            assert (finding.slot in slow) == finding.clears
            slow ^= {finding.slot}


def test_the_files_of_a_job_are_read(tmp_path: Path) -> None:
    ranks = Ranks({0: 0, 1: 0, 2: 0}, steps=10, interval=0.01)
    over = False

    def write(slot: int) -> None:
        words = [0] * 66
        words[7], words[8 + Tag.STEP] = ranks.worked[slot], ranks.done[slot]
        path = progress_path(tmp_path, slot)
        path.with_suffix(".new").write_bytes(b"".join(word.to_bytes(8, "little") for word in words))
        path.with_suffix(".new").replace(path)  # as a process does that was started again

    def live() -> list[int]:
        for slot in (0, 1, 2):
            ranks.done[slot] += 5
            ranks.worked[slot] += (30 if slot == 2 else 10) * 5 * MILLISECOND
            write(slot)
        return [0, 1, 2, 3]  # of 3 there is no file yet

    source = ranks.source(WatchedJob(tmp_path, dict, live, lambda: over, lambda: {0: 0, 1: 0, 2: 0, 3: 0}))
    assert next(iter(source)).text == "30.0 ms of work per step against 10.0 ms, the median of its replica"
    over = True
    assert list(source) == []


@pytest.mark.parametrize(
    "wrong",
    [*({"factor": value} for value in (1.0, 0, -1, float("nan"))), {"steps": 0}, {"steps": 1.5}, {"interval": 0}],
)
def test_arguments_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        StragglerSource(**wrong)
