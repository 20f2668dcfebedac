"""From findings to verdicts, over a clock of the tests' own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ntp.health import Action, Finding, Limits, SeverityTable, Verdict, Verdicts
from lightning_ntp.health.verdicts import HEALTHY

GPUS = [f"GPU-{number}" for number in range(8)]
"""By slot."""
LIMITS = Limits()


class Judge:
    """Verdicts about four ranks, or so, and a clock."""

    def __init__(self, slots: int = 4, rules: dict[str, Any] | None = None) -> None:
        self.verdicts = Verdicts(SeverityTable(rules), LIMITS)
        self.now = 1000.0
        self.said: list[Verdict] = []
        self.verdicts.place(dict(enumerate(GPUS[:slots])))
        for slot in range(slots):
            self.verdicts.started(slot)

    def hear(self, *findings: Finding, after: float = 0.0) -> list[tuple[Action, int]]:
        """Judge; returns what is to be done with whom."""
        self.now += after
        said = self.verdicts.judge(findings, self.now)
        for verdict in said:
            assert "\n" not in verdict.text and verdict.text.isprintable() and verdict.action >= Action.LOG
        self.said += said
        return [(verdict.action, verdict.slot) for verdict in said]

    def leave(self, slot: int) -> None:
        self.verdicts.ended(slot)

    def unfit(self, slot: int) -> str:
        return self.verdicts.unfit(slot, self.now)

    def done(self, slot: int, action: Action) -> int:
        return sum((verdict.action, verdict.slot) == (action, slot) for verdict in self.said)

    def wait_until_fit(self, slot: int, longest: float = 1e5) -> float:
        """Seconds until nothing speaks against a rank in the slot."""
        begun = self.now
        while self.unfit(slot):
            self.hear(after=1.0)
            assert self.now - begun < longest, self.unfit(slot)
        return self.now - begun


def xid(code: int, slot: int = 0, text: str = "seen") -> Finding:
    return Finding("xid", text, GPUS[slot], code=code)


def level(signal: str, slot: int = 0, over: bool = False, **fields: Any) -> Finding:
    return Finding(signal, "read", GPUS[slot], clears=over, **fields)


def healthy(slot: int = 0, sure: bool = False) -> Finding:
    return Finding(HEALTHY, "", GPUS[slot], code=int(sure))


# ---- one finding ------------------------------------------------------------------------------------------------


def test_a_verdict_names_slot_and_mnemonic() -> None:
    judge = Judge()
    assert judge.hear(xid(79, 2)) == [(Action.DEAD, 2)]
    assert judge.said[0].text == "slot 2: XID 79 (ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS): seen"
    assert judge.said[0].name == "XID 79 (ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS)"
    assert judge.hear(Finding("xid", "seen", "GPU-else", code=79)) == [(Action.LOG, -1)]
    assert judge.said[1].text.startswith("GPU-else, where no rank works: XID 79 (")


def test_what_a_source_writes_stays_one_line_of_plain_text() -> None:
    judge = Judge()
    text = "a\nb\r\x1b[31m\x00" + "c" * 10**6
    judge.hear(Finding("two\nlines", text, slot=1, action=Action.SUSPECT))
    assert judge.said[0].text.startswith("slot 1: two lines: a b ?[31m?ccc") and len(judge.said[0].text) < 600
    assert "\n" not in judge.said[0].name and "\n" not in judge.verdicts.standing(1)[0]
    judge.hear(Finding("maintenance", text, slot=2))
    assert "\n" not in judge.unfit(2)


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 68, 154])
def test_what_is_no_fault_of_the_device_is_noted_only(code: int) -> None:
    judge = Judge()
    assert judge.hear(xid(code)) == [(Action.LOG, 0)]
    assert judge.hear(after=10.0) == [] and judge.unfit(0) == ""


def test_the_recovery_action_decides_where_its_change_is_only_noted() -> None:
    judge = Judge()
    assert judge.hear(xid(154)) == [(Action.LOG, 0)]
    assert judge.hear(level("recovery_action", code=1)) == [(Action.DRAIN, 0)]
    judge.leave(0)
    assert "recovery action" in judge.unfit(0)
    judge.hear(level("recovery_action", code=1, over=True), after=1.0)
    judge.hear(healthy(sure=True), after=1.0)
    assert judge.wait_until_fit(0) == pytest.approx(LIMITS.quiet - 1.0, abs=1.5)


def test_a_contained_error_restarts_the_rank_once_and_its_slot_is_fit_at_once() -> None:
    judge = Judge()
    assert judge.hear(xid(94)) == [(Action.RESTART, 0)]
    judge.leave(0)
    assert judge.verdicts.sent_away(0) and judge.unfit(0) == ""
    judge.verdicts.started(0)
    for _ in range(10):
        assert judge.hear(after=1.0) == [], "nobody has said that it is over: the rank must not end for it again"
    assert judge.hear(xid(94), after=1.0) == [(Action.RESTART, 0)], "another one"


def test_a_contained_error_of_a_rank_that_is_gone_by_itself_does_not_end_the_next_one() -> None:
    judge = Judge()
    judge.leave(0)
    assert judge.hear(xid(94)) == [(Action.LOG, -1)]
    judge.verdicts.started(0)
    assert judge.hear(after=1.0) == [] and judge.unfit(0) == ""


def test_a_contained_error_after_a_drain_does_not_make_a_slot_wait() -> None:
    judge = Judge()
    judge.hear(level("maintenance"))
    judge.leave(0)
    judge.verdicts.started(0)  # a person has done so
    judge.hear(level("maintenance", over=True), after=1.0)
    assert judge.hear(xid(94), after=1.0) == [(Action.RESTART, 0)]
    judge.leave(0)
    assert judge.unfit(0) == ""


def test_heat_must_last_without_a_break() -> None:
    judge = Judge()
    assert judge.hear(level("temperature_margin")) == []
    for _ in range(59):
        assert judge.hear(level("temperature_margin"), after=1.0) == []
    judge.hear(level("temperature_margin", over=True), after=0.5)
    assert judge.hear(level("temperature_margin"), after=0.1) == []
    assert judge.hear(after=59.0) == []
    assert judge.hear(after=1.5) == [(Action.DRAIN, 0)]
    assert judge.said[-1].text.endswith("read for 60 s")


def test_a_break_within_one_batch_is_a_break() -> None:
    judge = Judge()
    judge.hear(level("temperature_margin"))
    judge.hear(level("temperature_margin", over=True), level("temperature_margin"), after=59.0)
    assert judge.hear(after=59.0) == [] and judge.hear(after=2.0) == [(Action.DRAIN, 0)]


def test_what_is_over_before_it_is_judged_was_there() -> None:
    judge = Judge()
    said = judge.hear(level("sram_threshold"), level("sram_threshold", over=True), healthy())
    assert said == [(Action.DRAIN, 0)]


def test_a_device_that_is_known_late_is_judged_when_it_is_known() -> None:
    judge = Judge()
    judge.verdicts.place({})
    assert judge.hear(level("recovery_action", code=2), xid(63)) == [(Action.LOG, -1)] * 2
    assert judge.hear(after=1.0) == []
    judge.verdicts.place({1: GPUS[0]})
    assert judge.hear(after=1.0) == [(Action.DRAIN, 1)], "it says nothing new about what was only noted"
    assert judge.hear(after=1.0) == []


def test_a_source_may_ask_for_more_and_for_less() -> None:
    judge = Judge()
    assert judge.hear(Finding("maintenance", "later", slot=1, action=Action.LOG)) == [(Action.LOG, 1)]
    assert judge.unfit(1) == ""
    assert judge.hear(Finding("maintenance", "now", slot=1, action=Action.DRAIN)) == [(Action.DRAIN, 1)]
    judge.leave(1)
    assert "now" in judge.unfit(1)
    judge.hear(Finding("maintenance", "never mind", slot=1, action=Action.IGNORE), after=1.0)
    assert "now" not in judge.unfit(1) and judge.wait_until_fit(1) <= LIMITS.quiet


def test_an_end_counts_also_where_a_beginning_would_not() -> None:
    judge = Judge(rules={"signals": {"maintenance": "ignore"}})
    assert judge.hear(level("maintenance")) == []
    judge.hear(level("maintenance", action=Action.DRAIN))
    judge.leave(0)
    judge.hear(level("maintenance", over=True))
    assert judge.wait_until_fit(0) <= LIMITS.quiet


# ---- mistakes of the program --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [13, 31, 43, 68])
def test_a_mistake_on_all_devices_suspects_nobody(code: int) -> None:
    judge = Judge()
    for _ in range(10):
        for slot in range(4):
            judge.hear(xid(code, slot), healthy(slot), after=0.4)
        judge.hear(after=100.0)
    assert {verdict.action for verdict in judge.said} == {Action.LOG}
    assert any("all devices show it at once: a mistake of the program" in verdict.text for verdict in judge.said)


@pytest.mark.parametrize("code", [13, 31, 43, 68])
def test_a_device_that_alone_shows_a_mistake_again_and_again_is_suspected(code: int) -> None:
    judge = Judge()
    for times in range(3):
        assert judge.done(1, Action.SUSPECT) == 0, f"after {times} times"
        judge.hear(*[xid(code, 1)] * 20, after=1000.0)  # one fault raises many
        judge.hear(healthy(1, sure=True), after=5.0)
    assert judge.done(1, Action.SUSPECT) == 1 and "3 times within" in judge.said[-1].text
    for _ in range(10):
        judge.hear(healthy(1, sure=True), after=1.0)
    assert judge.verdicts.worst(1) is Action.SUSPECT, "checks say nothing about it"
    assert judge.unfit(1) == ""
    judge.verdicts.ended(1)
    judge.verdicts.started(1)
    judge.hear(after=1.0)
    assert judge.done(1, Action.SUSPECT) == 2 and judge.verdicts.worst(1) is Action.SUSPECT, "so is the next rank"
    judge.hear(after=LIMITS.repeat_window)
    assert judge.verdicts.worst(1) is Action.LOG and judge.verdicts.standing(1) == []


def test_times_that_lie_far_apart_or_at_once_are_no_repetition() -> None:
    judge = Judge()
    for _ in range(6):
        judge.hear(*[xid(31, 1)] * 50, after=1801.0)
        judge.hear(after=5.0)
    assert judge.done(1, Action.SUSPECT) == 0


def test_a_device_is_not_alone_if_another_has_shown_it_within_the_hour() -> None:
    judge = Judge()
    judge.hear(xid(31, 2))
    for _ in range(5):
        judge.hear(xid(31, 1), after=100.0)
    judge.hear(after=100.0)
    assert judge.done(1, Action.SUSPECT) == 0


def test_who_is_pardoned_begins_anew() -> None:
    judge = Judge()
    for _ in range(2):
        judge.hear(xid(31, 1), after=100.0)
    judge.verdicts.pardon(1)
    judge.hear(xid(31, 1), after=100.0)
    judge.hear(after=100.0)
    assert judge.done(1, Action.SUSPECT) == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([13, 31, 43, 45, 68]), st.integers(0, 3), st.floats(0, 3000), st.booleans(), st.booleans()
        ),
        max_size=60,
    )
)
def test_mistakes_of_the_program_never_cost_a_rank(shown: list[tuple[int, int, float, bool, bool]]) -> None:
    judge = Judge()
    for code, slot, after, passes, restarts in shown:
        judge.hear(xid(code, slot), *([healthy(slot)] if passes else []), after=after)
        if restarts:
            judge.leave(slot)
            judge.verdicts.started(slot)
        assert judge.unfit(slot) == ""
    judge.hear(after=10.0)
    assert {verdict.action for verdict in judge.said} <= {Action.LOG, Action.SUSPECT}
    assert all(verdict.finding.code != 45 for verdict in judge.said if verdict.action is Action.SUSPECT)


def test_a_suspicion_for_an_xid_is_there_for_who_looks() -> None:
    judge = Judge()
    judge.hear(xid(74, 1), xid(1000, 1))
    for _ in range(9):
        judge.hear(healthy(1, sure=True), after=60.0)
    assert judge.verdicts.worst(1) is Action.SUSPECT and len(judge.verdicts.standing(1)) == 2
    judge.hear(healthy(1, sure=True), after=LIMITS.suspicion - 540.0)
    assert judge.verdicts.worst(1) is Action.LOG
    assert judge.done(1, Action.SUSPECT) == 2


def test_findings_without_end_are_not_kept_without_end() -> None:
    judge = Judge()
    for number in range(20):
        judge.hear(*[Finding("external", "hello", slot=0, code=1000 * number + each) for each in range(1000)])
    assert len(judge.said) == LIMITS.most + 1 and "only what is grave is heard" in judge.said[-1].text
    judge.hear(xid(79, 1))
    assert judge.done(1, Action.DEAD) == 1


# ---- coming and going ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [0.0, 0.3, 20.0, 100.0])
@pytest.mark.parametrize("stays", [False, True])
def test_a_condition_that_flaps_a_thousand_times_drains_once(pause: float, stays: bool) -> None:
    judge = Judge()
    for _ in range(1000):
        judge.hear(level("recovery_action", code=1), after=pause)
        if stays:
            judge.verdicts.stays(0)
        judge.hear(level("recovery_action", code=1, over=True), after=pause)
    assert judge.done(0, Action.DRAIN) == 1
    lines = 2 * 1000 * pause / LIMITS.lines
    assert len(judge.said) <= 2 + 1.1 * lines, "lines are few too"


def test_every_stay_may_end_once() -> None:
    judge = Judge()
    for stay in range(1, 5):
        for _ in range(100):
            judge.hear(level("recovery_action", code=1), after=0.1)
            judge.hear(level("recovery_action", code=1, over=True), after=0.1)
        assert judge.done(0, Action.DRAIN) == stay
        judge.leave(0)
        judge.wait_until_fit(0)
        judge.verdicts.started(0)


def test_the_time_needed_doubles_with_each_drain() -> None:
    judge, needed = Judge(), []
    for _ in range(9):
        judge.hear(level("row_remap_failure"))
        judge.leave(0)
        judge.hear(level("row_remap_failure", over=True))
        needed.append(judge.wait_until_fit(0))
        judge.verdicts.started(0)
    assert needed == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    judge.verdicts.pardon(0)
    judge.hear(level("row_remap_failure"))
    judge.leave(0)
    judge.hear(level("row_remap_failure", over=True))
    assert judge.wait_until_fit(0) == 60


def test_who_could_not_leave_was_not_sent_away() -> None:
    judge = Judge()
    for _ in range(5):
        judge.hear(level("row_remap_failure"), after=1.0)
        judge.verdicts.stays(0)
        judge.hear(level("row_remap_failure", over=True))
        judge.hear(after=100.0)
        assert judge.verdicts.reconsider(0, judge.now)
    assert judge.done(0, Action.DRAIN) == 5, "it was asked again each time"
    judge.hear(level("row_remap_failure"))
    judge.leave(0)
    judge.hear(level("row_remap_failure", over=True))
    assert judge.wait_until_fit(0) == 60, "this is the first time that it has left"


def test_a_restart_that_becomes_a_drain_is_one() -> None:
    judge = Judge()
    assert judge.hear(xid(94)) == [(Action.RESTART, 0)]
    assert judge.hear(level("row_remap_failure")) == [(Action.DRAIN, 0)]
    judge.leave(0)
    judge.hear(level("row_remap_failure", over=True))
    assert judge.wait_until_fit(0) == 60


periods = st.floats(0.05, LIMITS.quiet - 1.0)
BAD = [
    ("recovery_action", {"code": 1}),
    ("temperature_margin", {}),
    ("stalled", {}),
    ("gpu_lost", {}),
    ("nvml_error", {}),
    ("maintenance", {}),
]


@pytest.mark.parametrize(("signal", "fields"), BAD, ids=[signal for signal, _ in BAD])
@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(periods, periods), min_size=1, max_size=20))
def test_a_device_that_keeps_flapping_is_never_fit(
    signal: str, fields: dict[str, Any], flaps: list[tuple[float, float]]
) -> None:
    judge = Judge()
    judge.hear(level("row_remap_failure"))  # it left for this, and now shows something else
    judge.leave(0)
    judge.hear(level("row_remap_failure", over=True))
    for on, off in flaps:
        judge.hear(level(signal, **fields))
        assert judge.unfit(0)
        judge.hear(after=on)
        judge.hear(level(signal, over=True, **fields), healthy(sure=True))
        assert judge.unfit(0)
        judge.hear(after=off)
        assert judge.unfit(0)
    assert judge.wait_until_fit(0) <= LIMITS.quiet + 1.0


def test_an_xid_ends_with_a_reset_that_the_driver_shows() -> None:
    judge = Judge()
    assert judge.hear(xid(64)) == [(Action.DRAIN, 0)]
    judge.leave(0)
    for _ in range(100):
        judge.hear(healthy(), after=1.0)
    assert "XID 64" in judge.unfit(0), "the driver does not say whether a reset is needed"
    judge.hear(healthy(sure=True), after=1.0)
    assert judge.wait_until_fit(0) == LIMITS.quiet


def test_a_device_that_was_lost_and_is_back_has_lost_what_was_wrong_but_not_its_appointments() -> None:
    judge = Judge()
    judge.hear(Finding("maintenance", "at noon", GPUS[0]))
    judge.hear(level("gpu_lost"), xid(79))
    judge.leave(0)
    judge.hear(level("gpu_lost", over=True), after=10.0)
    judge.hear(healthy(), after=1.0)
    assert judge.unfit(0) == "maintenance: at noon"
    judge.hear(level("maintenance", over=True), after=1.0)
    assert judge.wait_until_fit(0) <= LIMITS.quiet


def test_a_finding_that_comes_with_a_check_is_newer() -> None:
    judge = Judge()
    judge.hear(xid(64), healthy(sure=True))
    judge.leave(0)
    assert "XID 64" in judge.unfit(0)


# ---- all at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finding", [lambda s: xid(79, s), lambda s: level("gpu_lost", s), lambda s: xid(94, s)])
def test_all_at_once_ends_nobody(finding: Any) -> None:
    judge = Judge()
    said = judge.hear(*map(finding, range(4))) or judge.hear(after=2.0)
    assert said == [(Action.SUSPECT, slot) for slot in range(4)]
    assert all("nobody would be left" in verdict.text for verdict in judge.said)
    assert judge.hear(*map(finding, range(4)), after=1.0) == []
    judge.leave(0)
    assert not judge.verdicts.sent_away(0)


def test_all_that_are_lost_one_after_the_other_within_a_look_are_lost_at_once() -> None:
    judge = Judge()
    for slot in range(4):
        assert judge.hear(level("gpu_lost", slot), after=0.3) == []
    while len(judge.said) < 4:
        judge.hear(after=0.1)
    assert {(verdict.action, verdict.slot) for verdict in judge.said} == {(Action.SUSPECT, slot) for slot in range(4)}


def test_the_last_ones_go_on() -> None:
    judge = Judge()
    assert judge.hear(*(xid(79, slot) for slot in range(3))) == [(Action.DEAD, slot) for slot in range(3)]
    assert judge.hear(xid(79, 3)) == [(Action.SUSPECT, 3)]


def test_who_is_leaving_is_still_leaving_when_all_fail() -> None:
    judge = Judge()
    assert judge.hear(level("maintenance", 1)) == [(Action.DRAIN, 1)]
    judge.hear(*(xid(79, slot) for slot in range(4)))
    judge.leave(1)
    assert judge.verdicts.sent_away(1) and "maintenance" in judge.unfit(1)


def test_one_reason_is_enough() -> None:
    judge = Judge()
    said = judge.hear(xid(79), xid(95), level("sram_threshold"), level("maintenance"))
    assert Counter(said) == {(Action.DEAD, 0): 1, (Action.LOG, 0): 3}


# ---- anything -----------------------------------------------------------------------------------------------------

SIGNALS = sorted({key.partition(".")[0] for key, _ in SeverityTable().rows()} | {HEALTHY, "moon phase", "two\nlines"})
findings = st.builds(
    lambda signal, text, slot, gpu, code, action, clears: Finding(
        signal, text, gpu, -1 if gpu else slot, code, action, clears
    ),
    st.sampled_from(SIGNALS) | st.sampled_from(["xid", HEALTHY, "recovery_action"]),
    st.text(max_size=5),
    st.integers(0, 5),
    st.sampled_from([*GPUS[:6], "", ""]),
    st.none() | st.sampled_from([0, 1, 2, 13, 31, 45, 48, 64, 79, 94, 95, 154, 10**30, -1]),
    st.none() | st.sampled_from(Action),
    st.booleans(),
)
steps = st.one_of(
    st.tuples(st.just("hear"), st.lists(findings, max_size=6), st.sampled_from([0.0, 0.1, 3.0, 59.0, 61.0, 4000.0])),
    st.tuples(st.sampled_from(["started", "ended", "stays", "pardon", "reconsider"]), st.integers(0, 5), st.just(0.0)),
    st.tuples(st.just("place"), st.dictionaries(st.integers(0, 5), st.sampled_from(GPUS[:6])), st.just(0.0)),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(steps, max_size=60))
def test_whatever_happens_there_is_an_answer(happens: list[tuple[str, Any, float]]) -> None:
    judge, live = Judge(), {0, 1, 2, 3}
    ended: set[int] = set()
    for what, given_, after in happens:
        if what == "hear":
            said = judge.hear(*given_, after=after)
            assert all(slot in live for action, slot in said if action > Action.LOG), "about who works there"
            if live:
                ends = {slot for action, slot in said if action in (Action.RESTART, Action.DEAD)}
                ended |= ends
                # the others may have gone by themselves since
                assert not ends or live - ended, "somebody is left"
        elif what == "started":
            judge.verdicts.started(given_)
            live.add(given_)
            ended.discard(given_)
            assert not judge.verdicts.sent_away(given_)
        elif what == "ended":
            judge.verdicts.ended(given_)
            live.discard(given_)
            ended.discard(given_)
        elif what == "stays":
            # a slot that is to end at once is not asked
            if given_ not in ended:
                judge.verdicts.stays(given_)
        elif what == "reconsider":
            judge.verdicts.reconsider(given_, judge.now)
        elif what == "pardon":
            judge.verdicts.pardon(given_)
            assert judge.unfit(given_) == ""
        else:
            judge.verdicts.place(given_)
        for slot in range(6):
            assert isinstance(judge.unfit(slot), str)
            worst, standing = judge.verdicts.worst(slot), judge.verdicts.standing(slot)
            assert (worst >= Action.SUSPECT) == bool(standing)


def test_what_is_long_over_is_forgotten() -> None:
    judge = Judge(rules={"xid": {"unknown": "log"}})
    for number in range(1500):
        judge.hear(xid(1000 + number), level("nvlink_errors", code=number), level("maintenance", over=True), after=10.0)
    remembered = len(judge.verdicts._conditions)
    assert remembered <= 2 * LIMITS.forget / 10.0 + 2
