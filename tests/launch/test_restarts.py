"""A rank that has died is started again, and whatever comes of that never hurts the job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_ntp.commands import restart
from lightning_ntp.launch import REFUSED, Outcome, RankIdentity, Supervisor, progress, report_alone
from lightning_ntp.launch.call import Call
from lightning_ntp.launch.log import FINISHED, RECOVERABLE, Log, left_key, released_key
from lightning_ntp.launch.obituary import is_first_survivor
from lightning_ntp.launch.restarts import Restarts
from tests.launch.scripts import TIMEOUT, run

SOON = timedelta(seconds=0.01)
NEVER = timedelta(hours=1)


class Job:
    """A job of forked ranks whose supervisor is this process. Ranks read what it says in a file.

    Args:
        directory: For files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.said = directory, directory / "stderr"
        self.supervisor = os.getpid()

    def run(self, ranks: int, body: Callable[[RankIdentity, Any], Any], **options: Any) -> Outcome:
        """Let every rank call ``body`` with who it is and a client of the store."""

        def call() -> Any:
            me = RankIdentity.from_environ()
            store = TCPStore(me.store_host, me.store_port, is_master=False, wait_for_workers=False)
            store.set(RECOVERABLE, "1")
            result = body(me, store)
            store.set(left_key(me.uid), FINISHED)
            return result

        # not in the fixture: pytest puts its own capture in place when the test begins
        with self.said.open("w", buffering=1) as file, contextlib.redirect_stderr(file):
            return Supervisor(ranks, "fork", Call(call), kill_grace=timedelta(seconds=0.2), **options).run()

    def wait_for(self, *texts: str) -> None:
        """In a rank: until the supervisor has said all of them."""
        deadline = time.monotonic() + TIMEOUT
        while not all(text in self.said.read_text() for text in texts):
            if time.monotonic() > deadline:
                os._exit(99)
            time.sleep(0.01)

    @property
    def lines(self) -> list[str]:
        """What it has said, without times, pids, and how members have died: it may not be known yet when it is said."""
        varying = r"^\d\d:\d\d:\d\d | \(pid \d+\)|(?<=died): [^;:]+(?=;)"
        return [re.sub(varying, "", line) for line in self.said.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield Job(tmp_path)
    assert not list(tmp_path.glob("lightning_ntp-*")), "the job's directory is left"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_published(me: RankIdentity, slot: int) -> bool:
    """Whether commands in other terminals see it."""
    assert me.job_dir is not None
    return str(slot) in json.loads((me.job_dir / "ranks.json").read_text())["pids"]


def wait_until_gone(me: RankIdentity, slot: int) -> None:
    while is_published(me, slot):
        time.sleep(0.01)


def leave(me: RankIdentity, store: Any, why: str, released: bool = False) -> None:
    if released:
        store.set(released_key(me.uid), why)
    store.set(left_key(me.uid), why)
    os._exit(0)


def test_a_slot_is_started_again_so_many_times_and_ever_later(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            os._exit(3)
        job.wait_for("is not started again")

    outcome = job.run(2, body, max_restarts=3, restart_backoff=SOON)
    assert job.lines == [
        "slot 1 died; 1 rank goes on",
        "slot 1 is started again in 0.01 s (restart 1 of 3)",
        "slot 1 has ended before it had joined: exit code 3",
        "slot 1 is started again in 0.02 s (restart 2 of 3)",
        "slot 1 has ended before it had joined: exit code 3",
        "slot 1 is started again in 0.04 s (restart 3 of 3)",
        "slot 1 has ended before it had joined: exit code 3",
        "slot 1 is not started again: it was, 3 times (max_restarts=3)",
    ]
    assert (outcome.exit_code, outcome.cause, outcome.failures) == (0, None, ())
    assert outcome.codes == {0: 0, 1: 3}


def test_by_default_nothing_is_started_again(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            os._exit(3)
        job.wait_for("died")

    assert job.run(2, body).exit_code == 0
    assert job.lines == ["slot 1 died; 1 rank goes on"]


def test_a_newcomer_knows_that_it_is_one_and_counts_once_it_has_joined(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> int:
        first = me.uid.endswith(f".{me.slot}")
        assert me.joins != first
        if me.slot == 1 and first:
            die()
        if me.joins:
            report_alone(False)
            store.set("joined", "")
        store.wait(["joined"])
        return me.slot

    outcome = job.run(2, body, max_restarts=1, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.codes, outcome.result) == (0, {0: 0, 1: 0}, 0), job.lines
    assert job.lines[-1] == "slot 1 is started again in 0.01 s (restart 1 of 1)"


def test_a_member_that_came_back_dies_like_any_other(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            if me.joins:
                report_alone(False)
            die()
        job.wait_for("is not started again")
        dead = [entry.uid for entry in Log(store).read_all() if entry.kind == "dead"]
        assert [uid.rpartition(".")[2] for uid in dead] == ["1", "2"]

    outcome = job.run(2, body, max_restarts=1, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.codes) == (0, {0: 0, 1: -9}), job.lines
    assert job.lines[2:] == [
        "slot 1 died; 1 rank goes on",
        "slot 1 is not started again: it was, once (max_restarts=1)",
    ]


def test_an_exception_of_a_member_that_came_back_ends_the_job(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            if not me.joins:
                die()
            report_alone(False)
            raise ValueError("a bug")
        time.sleep(TIMEOUT)

    short = timedelta(seconds=0.2)
    outcome = job.run(2, body, max_restarts=9, restart_backoff=SOON, failure_grace=short)
    assert outcome.exit_code == 1 and "ValueError: a bug" in outcome.describe()
    assert len(job.lines) == 2, job.lines


def test_what_a_newcomer_raises_concerns_nobody_else_and_is_shown_once(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            if not me.joins:
                die()
            raise ValueError(f"not this way: {me.uid}")
        job.wait_for("is not started again")

    outcome = job.run(2, body, max_restarts=2, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.failures, outcome.codes) == (0, (), {0: 0, 1: -9})
    said = job.said.read_text()
    assert said.count("Traceback") == 1 and said.count("has ended before it had joined: ValueError: not this way") == 2
    assert "(raised by slot 1, which has not joined the job yet)" in said


def test_a_job_whose_members_are_all_gone_has_failed_whatever_newcomers_do(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.joins:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            store.set("here", "")
            time.sleep(TIMEOUT)
        if me.slot == 0:
            store.wait(["here"])
        die()

    outcome = job.run(2, body, max_restarts=5, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.codes) == (128 + 9, {0: -9, 1: -9})
    assert len(outcome.failures) == 2 and outcome.stop_signal is None


def test_a_device_is_asked_for_its_health_before_a_rank_is_put_on_it(job: Job) -> None:
    answers: list[Any] = ["Xid 79", "Xid 79", False, OSError("no driver"), ""]
    asked = []

    def may_restart(slot: int) -> Any:
        asked.append(slot)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            os._exit(0 if me.joins else 3)
        job.wait_for("before it had joined")

    outcome = job.run(2, body, max_restarts=1, restart_backoff=SOON, may_restart=may_restart)
    assert outcome.exit_code == 0 and asked == [1] * 5
    assert job.lines[1:] == [
        "slot 1 is started again in 0.01 s (restart 1 of 1)",
        "slot 1 is not started again yet: Xid 79 (asked again every 0.01 s)",
        "slot 1 is not started again yet: may_restart said no (asked again every 0.01 s)",
        "slot 1 is not started again yet: may_restart raised OSError: no driver (asked again every 0.01 s)",
        "slot 1 has ended before it had joined: exit code 0",
    ]


def test_who_is_refused_or_comes_too_late_is_not_started_again(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.joins:
            os._exit({1: REFUSED, 2: 0}[me.slot])
        if me.slot:
            die()
        job.wait_for("slot 1 (pid", "does not take it", "exit code 0")

    outcome = job.run(3, body, max_restarts=5, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.codes) == (0, {0: 0, 1: -9, 2: -9})
    ends = [line for line in job.lines if "has ended before it had joined" in line]
    assert sorted(ends) == [
        "slot 1 has ended before it had joined: the job does not take it; it is not started again unless"
        " `lightning-ntp restart 1` demands it",
        "slot 2 has ended before it had joined: exit code 0",
    ]
    assert sum("is started again" in line for line in job.lines) == 2


def test_a_released_rank_comes_back_and_a_drained_one_does_not(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> int:
        if me.joins:
            report_alone(False)
            store.set("joined", "")
        elif me.slot == 1:
            leave(me, store, "replica 1 is dropped", released=True)
        elif me.slot == 2:
            leave(me, store, "the rack is moved")
        store.wait(["joined"])
        return me.slot

    outcome = job.run(3, body, max_restarts=1, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.codes, outcome.result) == (0, {0: 0, 1: 0, 2: 0}, 0)
    assert job.lines == ["slot 1 is started again in 0.01 s (restart 1 of 1)"]


def test_a_job_whose_last_ranks_have_died_has_failed_although_others_had_left_well(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            leave(me, store, "the rack is moved")
        time.sleep(0.5)
        die()

    assert job.run(2, body).exit_code == 128 + 9


def test_a_job_all_of_whose_ranks_have_left_has_failed(job: Job) -> None:
    """Two that are told to leave in the same moment do not know of each other."""
    outcome = job.run(2, lambda me, store: leave(me, store, "the rack is moved"))
    assert outcome.exit_code == 1 and "All ranks have left as they were told to" in outcome.describe()


@pytest.mark.parametrize("how", ["all are through", "one is through", "fails"])
def test_a_restart_that_is_due_does_not_hold_up_the_end(job: Job, how: str) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            die()
        job.wait_for("is started again in 3600 s")
        if how == "fails" and me.slot == 0:
            raise ValueError("a bug")
        if how == "one is through" and me.slot == 2:
            wait_until_gone(me, 0)
            restart.main(["1", "--job", me.job])
            job.wait_for("slot 1 is not started again: the job is ending")

    outcome = job.run(3, body, max_restarts=1, restart_backoff=NEVER)
    assert outcome.exit_code == (how == "fails") and len(outcome.codes) == 3


def test_sigterm_while_a_newcomer_starts_ends_it_too_and_the_code_is_the_members(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.joins:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            store.set("here", "")
            time.sleep(TIMEOUT)
        if me.slot == 1:
            die()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        store.wait(["here"])
        os.kill(job.supervisor, signal.SIGTERM)
        time.sleep(TIMEOUT)

    outcome = job.run(2, body, max_restarts=5, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.stop_signal) == (0, signal.SIGTERM)
    assert outcome.codes == {0: 0, 1: -9} and len(job.lines) == 2, job.lines


def test_a_member_that_came_back_is_watched_for_hangs_like_any_other(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        progress.start(me.slot, me.job_dir)
        if me.joins:
            report_alone(False)
        if me.slot == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        job.wait_for("is not started again")

    outcome = job.run(2, body, max_restarts=1, restart_backoff=SOON, heartbeat=timedelta(seconds=0.5))
    assert outcome.exit_code == 0
    hung = [line for line in job.lines if "hung: its process is stopped" in line]
    assert len(hung) == 2, job.lines


def test_a_restart_for_which_the_machine_has_no_process_left_hurts_nobody(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            (job.directory / "full").touch()
            die()
        job.wait_for("is not started again")

    fork = os.fork

    def scarce() -> int:
        if (job.directory / "full").exists():  # a limit would bind other processes too, and not root's
            raise BlockingIOError("Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", scarce)
    outcome = job.run(2, body, max_restarts=1, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.codes) == (0, {0: 0, 1: -9})
    assert job.lines[2:] == [
        "cannot start the rank in slot 1: Resource temporarily unavailable",
        "slot 1 has ended before it had joined: exit code 71",
        "slot 1 is not started again: it was, once (max_restarts=1)",
    ]


def test_a_person_may_start_any_slot_again(job: Job) -> None:
    def refusal(*arguments: str) -> None:
        with pytest.raises(SystemExit) as ended:
            restart.main(list(arguments))
        assert ended.value.code == 2

    def body(me: RankIdentity, store: Any) -> int:
        if me.slot == 1 and not me.joins:
            while not is_published(me, 1):
                time.sleep(0.01)
            leave(me, store, "the rack is moved")
        if me.slot == 1:
            report_alone(False)
            store.set("joined", "")
            store.wait(["seen"])
        else:
            run = ["--job", me.job, "--wait", "30"]
            store.wait([left_key(f"{me.job}.1")])
            wait_until_gone(me, 1)
            refusal("7", *run)
            refusal("0", *run)
            refusal("1", "--job", "nobody's")
            restart.main(["1", *run])
            store.wait(["joined"])
            refusal("1", *run)
            store.set("seen", "")
        return me.slot

    outcome = job.run(2, body)
    assert (outcome.exit_code, outcome.codes) == (0, {0: 0, 1: 0}), job.lines
    said = job.said.read_text()
    assert "has no slot 7; it was launched with slots 0 to 1" in said and "slot 0 of job" in said
    assert said.count("is alive (pid ") == 2 and '--job="nobody\'s" fits 0 jobs' in said
    assert "slot 1 is started again, on demand" in job.lines


def test_a_demand_is_served_when_all_restarts_are_used_up(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> None:
        if me.slot == 1:
            os._exit(3)
        job.wait_for("(max_restarts=1)")
        restart.main(["1", "--job", me.job])
        job.wait_for("on demand", "restart 1 of 1)\n")
        while len(job.lines) < 9:
            time.sleep(0.01)

    assert job.run(2, body, max_restarts=1, restart_backoff=SOON).exit_code == 0
    assert job.lines[4:] == [
        "slot 1 is started again, on demand",
        "slot 1 has ended before it had joined: exit code 3",
        "slot 1 is started again in 0.01 s (restart 1 of 1)",
        "slot 1 has ended before it had joined: exit code 3",
        "slot 1 is not started again: it was, once (max_restarts=1)",
    ]


def test_the_result_is_that_of_the_lowest_slot_that_saw_the_end(job: Job) -> None:
    def body(me: RankIdentity, store: Any) -> int:
        from lightning_ntp.launch.obituary import expect_deaths
        from lightning_ntp.plan import Entry, Join

        expect_deaths()
        if me.slot == 0 and not me.joins:
            die()
        if me.joins:
            report_alone(False)
            Log(store).append(Entry("switch", joins=(Join(me.slot, me.uid, 0),)))
            store.set("joined", "")
        store.wait(["joined"])
        assert is_first_survivor() == (me.slot == 0)
        return me.slot

    outcome = job.run(2, body, max_restarts=1, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.result) == (0, 0), job.lines


def test_who_has_not_joined_does_not_speak_for_the_job(job: Job) -> None:
    """Whoever is back in slot 0 too late holds the values of the start, which are nobody's result."""

    def body(me: RankIdentity, store: Any) -> int:
        from lightning_ntp.launch.obituary import expect_deaths

        expect_deaths()
        if me.slot == 0 and not me.joins:
            die()
        if me.joins:
            store.set("speaks", str(is_first_survivor()))
            return me.slot
        assert store.get("speaks") == b"False"
        return me.slot

    outcome = job.run(2, body, max_restarts=1, restart_backoff=SOON)
    assert (outcome.exit_code, outcome.result) == (0, 1), job.lines


SCRIPT = """\
import os, sys, time
from datetime import timedelta
from lightning_ntp.launch import RankIdentity, is_rank, report_alone, run_call, run_script
from lightning_ntp.launch import supervisor

class Store(dict):
    # no other process needs it here, and torch's would cost an import of 7 s
    port = 9
    def check(self, keys):
        return all(key in self for key in keys)
    def compare_set(self, key, expected, desired):
        return self.setdefault(key, desired).encode()

supervisor.host_store = lambda: Store(recoverable="1")

def work():
    me = RankIdentity.from_environ()
    print(f"slot {me.slot} {me.joins} {sys.argv[1:]}", flush=True)
    if me.slot == 1 and not me.joins:
        os._exit(3)
    if me.joins:
        report_alone(False)
        open("joined", "w").close()
    while not os.path.exists("joined"):
        time.sleep(0.01)
    return me.slot
"""


@pytest.mark.parametrize("method", ["popen", "popen cold", "spawn"])
def test_every_start_method_starts_ranks_again(tmp_path: Path, method: str) -> None:
    options = f"max_restarts=1, restart_backoff=timedelta(seconds=0.01), cold={'cold' in method}"
    if method == "spawn":
        main = f"if __name__ == '__main__':\n    print('result', run_call(2, work, {options}))\n"
    else:
        main = f"if not is_rank():\n    sys.exit(run_script(2, {options}))\nwork()\n"
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT) + main)
    done = run("script.py", "--lr", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("slot"))
    assert lines == [f"slot {who} ['--lr', '3']" for who in ("0 False", "1 False", "1 True")]
    assert "slot 1 is started again in 0.01 s (restart 1 of 1)" in done.stderr


def test_backoff_doubles_up_to_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    restarts = Restarts(99, timedelta(seconds=5))
    for count in range(70):
        restarts.gone(3, 0.0)
        delay = min(5.0 * 2**count, 60.0)
        assert restarts.due(delay - 0.1) == [] and restarts.due(delay) == [3] and restarts.due(delay) == []
    restarts.gone(4, 0.0)
    assert restarts.due(5.0) == [4]  # every slot has its own


def test_a_slow_answer_about_a_device_holds_up_nothing() -> None:
    healthy = threading.Event()
    restarts = Restarts(1, timedelta(0), lambda slot: healthy.wait(TIMEOUT))
    restarts.gone(0, 0.0)
    assert [restarts.due(now) for now in (1.0, 2.0, 3.0)] == [[], [], []]
    healthy.set()
    while not restarts.due(4.0):
        time.sleep(0.01)


@pytest.mark.parametrize("settings", [{"max_restarts": -1}, {"max_restarts": True}, {"restart_backoff": -SOON}])
def test_settings_out_of_range_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Supervisor(1, **settings)
