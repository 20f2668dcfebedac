"""What a rank shows of its progress, and its stacks on demand."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_ntp.launch.progress import (
    DUMP_SIGNAL,
    EVERYBODY,
    NOBODY,
    NOT_WAITING,
    WAITING,
    Progress,
    ProgressReader,
    Sample,
    Tag,
    dump_path,
)


class Shown:
    """A rank's side and the supervisor's on the same memory."""

    def __init__(self) -> None:
        self._memory = bytearray(8 * 66)
        self.progress = Progress(memoryview(self._memory).cast("Q"))

    def sample(self) -> Sample:
        return Sample.decode(bytes(self._memory))


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_every_beginning_is_progress_and_completes_what_was_before(shown: Shown) -> None:
    before = shown.sample()
    shown.progress.begin(Tag.STEP)
    shown.progress.begin(Tag.BETWEEN)
    with shown.progress.within(Tag.CHECKPOINT):
        inside = shown.sample()
    after = shown.sample()
    assert before.seq < inside.seq < after.seq
    assert (before.tag, inside.tag, after.tag) == (Tag.SETUP, Tag.CHECKPOINT, Tag.BETWEEN)
    assert after.done[Tag.STEP] == 1 and after.done[Tag.CHECKPOINT] == 1 and after.done[Tag.BETWEEN] == 0
    shown.progress.forget_done()
    assert set(shown.sample().done) == {0}


def test_collectives_are_counted_by_group(shown: Shown) -> None:
    world, pair = shown.progress.group("1/world"), shown.progress.group("1/pair")
    for mark in (world, pair, world):
        shown.progress.entered(mark)
    (first, entered), (second, once) = shown.sample().groups
    assert first != second and (entered, once) == (2, 1)
    same = Shown()
    same.progress.group("1/pair")
    assert same.sample().groups == ((second, 0),), "members call it alike"
    shown.progress.enter_groups(blind=True)
    assert shown.sample().groups == () and shown.sample().blind


def test_groups_that_find_no_room_do_no_harm(shown: Shown) -> None:
    marks = [shown.progress.group(f"user/{number}") for number in range(40)]
    assert marks.count(0) == 16 and len(shown.sample().groups) == 24
    shown.progress.entered(0)
    assert shown.progress.begin_wait(0) and shown.sample().waits_for == EVERYBODY
    assert all(entered == 0 for _, entered in shown.sample().groups)


def test_a_wait_says_for_whom_and_ticks(shown: Shown) -> None:
    mark = shown.progress.group("1/world")
    shown.progress.begin_wait(mark)
    shown.progress.tick()
    sample = shown.sample()
    assert (sample.waiting, sample.waits_for, sample.ticks) == (WAITING, sample.groups[0][0], 1)
    shown.progress.end_wait()
    assert shown.sample().waiting == NOT_WAITING and shown.sample().seq > sample.seq


def test_waiting_for_a_condition_ticks_until_it_is_true(shown: Shown) -> None:
    condition, done = threading.Condition(), threading.Event()

    def wait() -> None:
        with condition:
            assert shown.progress.wait_for(condition, done.is_set, None, NOBODY)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 20
    while shown.sample().ticks < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert shown.sample().ticks >= 3 and shown.sample().waits_for == NOBODY
    with condition:
        done.set()
        condition.notify_all()
    thread.join(20)
    assert not thread.is_alive() and shown.sample().waiting == NOT_WAITING
    with condition:
        assert not shown.progress.wait_for(condition, lambda: False, 0.01), "it gives up in time"


def test_a_step_is_measured_without_its_waits_and_without_what_lies_between(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)

    def pass_time(nanoseconds: int) -> None:
        nonlocal now
        now += nanoseconds

    def wait(nanoseconds: int) -> None:
        assert shown.progress.begin_wait(0)
        pass_time(nanoseconds)
        shown.progress.end_wait()

    def step(work: int = 10) -> int:
        """Returns what the rank shows afterwards."""
        shown.progress.begin(Tag.STEP)
        wait(3)
        pass_time(work)
        with shown.progress.polling() as waits:
            for _ in range(3):
                waits()
                pass_time(1)
        shown.progress.begin(Tag.BETWEEN)
        pass_time(100)
        return shown.sample().worked_ns

    wait(7)
    assert [step(), step(20), step()] == [10, 30, 40]
    with shown.progress.within(Tag.CHECKPOINT):
        pass_time(1000)
    assert step() == 50
    shown.progress.begin(Tag.STEP)
    pass_time(1)
    shown.progress.begin(Tag.STEP)  # a micro-batch that no update follows
    pass_time(1)
    shown.progress.begin(Tag.EPOCH_END)
    assert shown.sample().worked_ns == 52

    shown.progress.begin(Tag.STEP)
    shown.progress.enter_groups(blind=False)  # a change of the members: what this step takes says nothing
    pass_time(1000)
    shown.progress.begin(Tag.BETWEEN)
    assert shown.sample().worked_ns == 0 and shown.sample().done[Tag.STEP] == 1
    assert step() == 10
    shown.progress.begin(Tag.STEP)
    with shown.progress.within(Tag.CHECKPOINT):
        pass_time(1000)
    pass_time(5)
    shown.progress.begin(Tag.BETWEEN)
    assert shown.sample().worked_ns == 0
    shown.progress.begin(Tag.STEP)
    shown.progress.back_to(Tag.STEP)
    pass_time(1000)
    assert step() == 10, "a step that is done again does not count"


def test_waiting_for_a_condition_is_no_work(shown: Shown) -> None:
    shown.progress.begin(Tag.STEP)
    with (condition := threading.Condition()):
        shown.progress.wait_for(condition, lambda: False, 0.5, NOBODY)
    shown.progress.begin(Tag.BETWEEN)
    assert shown.sample().worked_ns < 400_000_000, "it has waited for 500 ms, and a busy machine may take a while"


def test_what_a_thread_beside_does_is_no_progress_of_the_rank(shown: Shown) -> None:
    mark = shown.progress.group("1/sync")

    def beside() -> None:
        with shown.progress.beside():
            shown.progress.entered(mark)
            assert not shown.progress.begin_wait(mark)

    before = shown.sample()
    thread = threading.Thread(target=beside)
    thread.start()
    thread.join(20)
    after = shown.sample()
    assert after.seq == before.seq and after.waiting == NOT_WAITING and after.groups[0][1] == 1


RANK = """\
import sys, time
from pathlib import Path
from lightning_ntp.launch import progress
progress.start(5, Path(sys.argv[1]))
progress.current().begin(progress.Tag.STEP)
def sleeping_line():
    print("ready", flush=True)
    time.sleep(100)
sleeping_line()
"""


@pytest.mark.skipif(DUMP_SIGNAL is None, reason="the system has no real-time signals")
def test_the_file_is_read_by_another_process_and_stacks_come_on_demand(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path, 5)
    assert reader.read() is None
    with subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            sample = reader.read()
            assert sample is not None and sample.tag is Tag.STEP and sample.dumps
            assert DUMP_SIGNAL is not None
            os.kill(process.pid, DUMP_SIGNAL)
            deadline = time.monotonic() + 20
            while "sleeping_line" not in dump_path(tmp_path, 5).read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert "sleeping_line" in dump_path(tmp_path, 5).read_text() and process.poll() is None
        finally:
            process.kill()
            reader.close()


def test_what_was_computed_adds_up(shown: Shown) -> None:
    assert (shown.sample().computed_ns, shown.sample().micro_batches) == (0, 0)
    shown.progress.computed(40)
    shown.progress.computed(2)
    assert (shown.sample().computed_ns, shown.sample().micro_batches) == (42, 2)
    shown.progress.enter_groups(blind=False)
    shown.progress.begin(Tag.STEP)
    assert shown.sample().micro_batches == 2, "a change of the members is none of what was computed"
