"""Membership as a pure function of the log: everybody reads the same from it, and rounds are never mixed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan import Entry, Join, Roster, Topology
from lightning_ntp.plan.membership import fold

START = Topology.start((3, 2))


def uid(slot: int) -> str:
    return f"u{slot}"


def dead(slot: int) -> Entry:
    return Entry("dead", slot, uid(slot), "SIGKILL")


entries = st.one_of(
    st.builds(dead, st.integers(0, 5)),
    st.builds(lambda s: Entry("left", s, uid(s)), st.integers(0, 5)),
    st.builds(lambda s, n: Entry("standby", s, f"new{s}.{n}"), st.integers(0, 5), st.integers(0, 1)),
    st.builds(lambda r: Entry("retry", 0, "u0", "x", round=r), st.integers(-1, 12)),
    st.builds(lambda r: Entry("commit", 0, "u0", round=r), st.integers(0, 12)),
    st.builds(lambda s, r: Entry("switch", s, uid(s), "asked to", round=r), st.integers(0, 5), st.integers(-1, 12)),
    st.builds(
        lambda slots, n, r: Entry("switch", round=r, joins=tuple(Join(s, f"new{s}.{n}", s % 2) for s in sorted(slots))),
        st.sets(st.integers(0, 5), min_size=1, max_size=2),
        st.integers(0, 1),
        st.integers(-1, 12),
    ),
)


@given(st.lists(entries, max_size=14))
def test_any_log_folds_to_a_consistent_roster(log: list[Entry]) -> None:
    roster, commits = Roster.launch(START), []
    for entry in log:
        before, roster = roster, roster.apply(entry)
        assert roster.position == before.position + 1
        assert roster.change >= before.change and roster.broken <= roster.change
        if roster.commit != before.commit:
            if entry.kind == "commit":
                # for the open round, and its generation has exactly the members of that round
                assert entry.round == before.change == roster.change
                assert set(before.members) == set(roster.members)
            else:
                # a planned change is made from a settled generation alone, and nobody joins a round for it
                assert entry.kind == "switch" and entry.round == before.commit and before.settled
                assert roster.change == before.change and set(before.members) != set(roster.members)
            assert set(roster.topology.slots) == set(roster.members)
            assert roster.settled and not roster.interrupted
            commits.append(roster.commit)
        if roster.interrupted:
            assert not roster.settled
        if set(roster.members) != set(before.members) and entry.kind != "switch":
            assert roster.change == roster.position
        assert not set(roster.standby) & set(roster.members)
    assert commits == sorted(set(commits))


@given(st.lists(entries, max_size=14))
def test_entries_survive_the_store(log: list[Entry]) -> None:
    assert [Entry.decode(entry.encode()) for entry in log] == log
    assert [Entry.decode(entry.encode().encode()) for entry in log] == log


def test_a_death_voids_the_round_and_the_next_one_has_who_is_left() -> None:
    roster = fold(START, [Entry("commit", round=0), dead(4)])
    assert roster.interrupted and roster.slots == (0, 1, 2, 3) and roster.topology == START
    roster = roster.apply(dead(0)).apply(Entry("commit", round=2))  # for the round that the second death has voided
    assert roster.commit == 1 and not roster.settled
    roster = roster.apply(Entry("commit", round=3))
    assert roster.settled and roster.topology == START.lose([0, 4])[0]


def test_the_death_of_an_earlier_incarnation_changes_nothing() -> None:
    log = [Entry("commit", round=0), dead(3), Entry("commit", round=2)]
    log += [Entry("standby", 3, "new"), Entry("switch", round=3, joins=(Join(3, "new", 1),))]
    roster = fold(START, log)
    assert roster.topology.slots == START.slots and roster.members[3] == "new"
    assert roster.apply(dead(3)).members == roster.members


def test_newcomers_join_a_settled_generation_all_together_or_not_at_all() -> None:
    log = [Entry("commit", round=0), dead(2), dead(3), Entry("commit", round=3)]
    log += [Entry("standby", 2, "two"), Entry("standby", 3, "three")]
    joins = Entry("switch", round=4, joins=(Join(2, "two", 0), Join(3, "three", 1)))
    roster = fold(START, [*log, joins])
    assert roster.settled and not roster.interrupted and roster.commit == 7 and roster.topology.degrees == (3, 2)
    assert (roster.members[2], roster.members[3], roster.standby) == ("two", "three", {})
    # one of them is gone, another process has its place, or the members have changed since: nothing happens
    for meanwhile in (Entry("dead", 3, "three"), Entry("standby", 3, "other"), dead(0)):
        void = fold(START, [*log, meanwhile, joins])
        assert void.commit == 4 and void.slots == tuple(s for s in (0, 1, 4) if s in void.members), meanwhile


def test_only_the_first_of_many_retries_counts() -> None:
    roster = fold(START, [Entry("commit", round=0), Entry("retry", round=1), Entry("retry", round=1)])
    assert roster.change == 2 and len(roster.retries) == 1
    roster = roster.apply(Entry("commit", round=2)).apply(Entry("retry", round=1))  # late, about a generation long gone
    assert roster.settled


def test_who_leaves_is_missing_in_the_next_round_but_interrupts_nobody() -> None:
    roster = fold(START, [Entry("commit", round=0), Entry("left", 2, "u2", "finished")])
    assert not roster.interrupted and roster.slots == (0, 1, 3, 4)
    assert [(d.slot, d.kind) for d in roster.departures] == [(2, "left")]
    assert roster.apply(Entry("retry", round=1)).interrupted


def test_a_retry_for_a_newcomer_that_is_gone_is_not_counted() -> None:
    """One that dies again and again while it is let in would end the job, whose members are healthy."""
    roster = fold(START, [Entry("commit", round=0), Entry("dead", 1), Entry("commit", round=2)])
    for number in range(5):
        uid = f"newcomer {number}"
        for entry in (Entry("standby", 1, uid), Entry("dead", 1, uid), Entry("retry", 0, round=roster.commit)):
            roster = roster.apply(entry)
        roster = roster.apply(Entry("commit", round=roster.change))
        assert roster.settled and not roster.retries and not roster.standby
    roster = roster.apply(Entry("retry", 0, round=roster.commit))
    assert len(roster.retries) == 1
