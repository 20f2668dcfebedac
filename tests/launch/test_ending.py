"""When the supervisor presses on, and what it says in the end: no processes."""

import signal
from datetime import timedelta

from lightning_ntp.launch.ending import Ending
from lightning_ntp.launch.outcome import Failure, Outcome, exit_code, failure_of, find_cause
from lightning_ntp.launch.report import Report


def _ending(ranks: int = 3) -> Ending:
    return Ending(ranks, timedelta(seconds=30), timedelta(seconds=10), timedelta(seconds=5))


def test_healthy_ranks_are_never_pressed() -> None:
    ending = _ending()
    ending.ended(0, 0, 1.0)
    assert ending.due(1e6) is None


def test_lone_failure_leads_to_sigterm_then_sigkill_each_once() -> None:
    ending = _ending()
    ending.ended(1, 1, 0.0)
    due = [ending.due(now) for now in (9.9, 10.0, 11.0, 14.9, 15.0, 20.0)]
    assert due == [None, signal.SIGTERM, None, None, signal.SIGKILL, None]


def test_lone_exception_counts_from_its_report() -> None:
    ending = _ending()
    ending.raised(2, 3.0)
    assert [ending.due(12.0), ending.due(13.0)] == [None, signal.SIGTERM]


def test_ranks_that_all_raised_may_save_a_checkpoint() -> None:
    ending = _ending(2)
    ending.raised(0, 0.0)
    ending.raised(1, 1.0)
    assert ending.due(1e6) is None  # they may catch it
    ending.ended(1, 1, 100.0)
    assert [ending.due(129.9), ending.due(130.0)] == [None, signal.SIGTERM]


def test_second_stop_kills_at_once() -> None:
    ending = _ending()
    ending.stop(signal.SIGINT, 0.0)
    assert ending.due(29.0) is None
    ending.stop(signal.SIGINT, 29.0)
    assert ending.due(29.0) == signal.SIGKILL
    assert ending.stop_signal == signal.SIGINT and ending.forced


def test_nothing_is_sent_to_nobody() -> None:
    ending = _ending(1)
    ending.ended(0, 1, 0.0)
    assert ending.due(1e6) is None


def test_newcomers_are_nobodys_business_until_they_have_joined() -> None:
    ending = _ending(2)
    ending.ended(1, 0, 0.0)  # it has died, and the others go on
    ending.came(1)
    ending.raised(0, 0.0)
    assert ending.due(1e6) is None  # all members have raised
    ending.came_to_nothing(1)
    ending.came(1)
    ending.joined(1)
    assert ending.due(12.0) == signal.SIGTERM


def test_newcomers_that_are_left_alone_are_made_to_go() -> None:
    ending = _ending(1)
    ending.came(1)
    assert not ending.begun and ending.due(0.0) is None
    ending.ended(0, 0, 10.0)
    assert ending.begun
    assert [ending.due(now) for now in (10.0, 14.9, 15.0, 20.0)] == [signal.SIGTERM, None, signal.SIGKILL, None]
    assert not ending.forced


def _report(slot: int, when: float, echo: bool = False) -> Report:
    return Report(slot, when, "ValueError: x", "ValueError|a.py:1", "Traceback ...\nValueError: x\n", echo)


def test_death_announced_after_its_echo_is_still_the_cause() -> None:
    echo = failure_of(0, 1, 10.1, _report(0, 10.0, echo=True))
    death = failure_of(1, -9, 11.5, None)
    assert echo is not None and death is not None
    assert find_cause([echo, death]) is death
    assert exit_code({0: 1, 1: -9}, death, None, False) == 137


def test_caught_exception_is_no_failure() -> None:
    assert failure_of(0, 0, 1.0, _report(0, 0.5)) is None
    assert find_cause([]) is None


def test_stopped_jobs_code_is_the_ranks_own_unless_they_were_forced() -> None:
    assert exit_code({0: 0, 1: 0}, None, signal.SIGTERM, False) == 0
    assert exit_code({0: 1, 1: 0}, None, signal.SIGINT, False) == 1
    assert exit_code({0: -15, 1: 0}, None, signal.SIGTERM, False) == 143
    assert exit_code({0: -9, 1: 0}, None, signal.SIGINT, True) == 130


def test_description_names_the_slots() -> None:
    failures = (Failure(0, "ValueError: x", 1, 1.0, "T\nValueError: x\n", "s"), Failure(2, "E: y", 1, 2.0, "U", "t"))
    outcome = Outcome(3, 1, {0: 1, 1: -15, 2: 1}, failures, failures[0])
    assert outcome.describe() == (
        "T\nValueError: x\n(raised by slot 0 of 3; slot 2 of 3 failed as a consequence: E: y)\n"
    )
    assert Outcome(3, 0, {}).describe() == ""
