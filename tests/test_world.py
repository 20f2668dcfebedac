"""The harness itself: what it promises about ranks that return, raise, hang and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.harness import RankError, World
from tests.harness.leaks import (
    no_environment_changes,
    no_file_leaks,
    no_process_leaks,
    no_signal_handler_changes,
    no_thread_leaks,
    session_processes,
)

Worlds = Callable[..., World]


def _slot() -> int:
    return int(os.environ["LIGHTNING_NTP_SLOT"])


def _identity() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {n: v for n, v in os.environ.items() if n in names or n.startswith("LIGHTNING_NTP_")}


def test_every_rank_has_the_environment_of_a_launched_one(world: Worlds) -> None:
    seen = world(3).run(_identity)
    assert [s["LIGHTNING_NTP_SLOT"] for s in seen] == ["0", "1", "2"]
    assert [s["RANK"] for s in seen] == [s["LOCAL_RANK"] for s in seen] == ["0", "1", "2"]
    assert {s["WORLD_SIZE"] for s in seen} == {"3"}
    assert len({s["LIGHTNING_NTP_UID"] for s in seen}) == 3
    assert {s["LIGHTNING_NTP_STORE"] for s in seen} == {f"{s['MASTER_ADDR']}:{s['MASTER_PORT']}" for s in seen}
    again = world(3).run(_identity)
    assert not {s["LIGHTNING_NTP_UID"] for s in again} & {s["LIGHTNING_NTP_UID"] for s in seen}
    assert {s["LIGHTNING_NTP_JOB"] for s in again} != {s["LIGHTNING_NTP_JOB"] for s in seen}


def _store() -> dist.TCPStore:
    host, _, port = os.environ["LIGHTNING_NTP_STORE"].rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)


def _arrive() -> int:
    return _store().add("arrived", 1)


def test_each_run_gets_a_store_of_its_own(world: Worlds) -> None:
    for _ in range(2):
        assert sorted(world(2).run(_arrive)) == [1, 2]


def _all_reduce(scale: float) -> torch.Tensor:
    dist.init_process_group("gloo", store=_store(), rank=_slot(), world_size=int(os.environ["WORLD_SIZE"]))
    value = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return value  # the group is left to the harness


def test_ranks_compute_together_and_the_next_run_starts_without_groups(world: Worlds) -> None:
    for scale in (1.0, 2.0):
        for value in world(3).run(_all_reduce, scale):
            assert torch.equal(value, torch.full((3,), 6 * scale))


def _pid() -> int:
    return os.getpid()


def test_processes_are_shared_between_runs_unless_fresh_ones_are_asked_for(world: Worlds) -> None:
    first = world(2).run(_pid)
    assert world(3).run(_pid)[:2] == first
    assert not set(world(2, fresh=True).run(_pid)) & set(first)


def _leave_a_mess() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)


def _see_a_mess() -> tuple[bool, str, bool, torch.dtype]:
    ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    return "LEFT_BEHIND" in os.environ, os.getcwd(), ignored, torch.get_default_dtype()


def test_a_run_does_not_see_what_the_one_before_has_changed(world: Worlds) -> None:
    world(1).run(_leave_a_mess)
    ((variable, directory, ignored, dtype),) = world(1).run(_see_a_mess)
    assert not variable and directory != "/" and not ignored and dtype is torch.float32


def _draw() -> float:
    return float(torch.rand(()))


def test_ranks_do_not_share_random_state(world: Worlds) -> None:
    assert len(set(world(3).run(_draw))) == 3


class _Oops(Exception):
    pass


def _raise_in(slot: int) -> None:
    print(f"slot {_slot()} speaking")
    if _slot() == slot:
        raise _Oops("no such luck")
    time.sleep(60)


def test_an_exception_is_raised_here_with_the_ranks_traceback(world: Worlds) -> None:
    ((started, failure),) = [_timed(lambda: world(2).start(_raise_in, 1).results(timeout=50, grace=0.2))]
    assert started < 20, "the other rank's sleep was waited for"
    assert failure.first.slot == 1 and failure.first.state == "raised"
    assert isinstance(failure.__cause__, _Oops)
    text = str(failure)
    assert "in _raise_in" in text and "no such luck" in text and "slot 1 speaking" in text
    # the one that was still running shows where
    assert failure.outcomes[0].state == "running" and "in _raise_in" in failure.outcomes[0].stacks


def _timed(call: Callable[[], object]) -> tuple[float, RankError]:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        call()
    return time.monotonic() - start, caught.value


def _hang_in(slot: int) -> int:
    if _slot() == slot:
        _wait_for_nothing()
    return _slot()


def _wait_for_nothing() -> None:
    threading.Event().wait()


def test_a_hanging_rank_is_shown_with_its_stack_and_killed(world: Worlds) -> None:
    seconds, failure = _timed(lambda: world(2).run(_hang_in, 0, timeout=1.0))
    assert seconds < 10
    assert "time-out after 1 s: the ranks in slots [0]" in str(failure)
    assert "_wait_for_nothing" in failure.outcomes[0].stacks
    assert failure.outcomes[1].value == 1
    assert not Path(f"/proc/{failure.first.pid}").exists()
    assert world(2).run(_pid), "the world works again"


def _train_then_hang() -> None:
    trainer = Trainer(fast_dev_run=1, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(BoringModel())
    _wait_for_nothing()


def test_a_rank_that_hangs_after_training_shows_its_stack_too(world: Worlds) -> None:
    """A Trainer saves and restores all signal handlers, the one of the stack dump must survive that."""
    _, failure = _timed(lambda: world(1).run(_train_then_hang, timeout=6.0, env={"WORLD_SIZE": "1"}))
    assert "_wait_for_nothing" in failure.first.stacks


def test_a_killed_rank_is_reported_with_its_signal(world: Worlds) -> None:
    run = world(2).start(_hang_in, 1)
    run.kill(1)
    outcomes = run.wait(timeout=30)
    assert (outcomes[0].state, outcomes[0].value) == ("returned", 0)
    assert (outcomes[1].state, outcomes[1].exit_code) == ("died", -signal.SIGKILL)
    with pytest.raises(RankError, match="slot 1 died without an answer, exit code -9"):
        run.results()


def test_a_stopped_rank_does_not_hold_up_the_report(world: Worlds) -> None:
    run = world(1).start(_hang_in, 0)
    run.kill(0, signal.SIGSTOP)
    (outcome,) = run.wait(timeout=0.5)
    assert outcome.state == "running" and "stopped" in outcome.stacks


def _start_a_child_and_hang() -> None:
    child = subprocess.Popen(["sleep", "600"])
    print(f"child={child.pid}")
    sys.stdout.flush()
    _wait_for_nothing()


def test_a_killed_world_takes_its_ranks_children_along(world: Worlds) -> None:
    (outcome,) = world(1).start(_start_a_child_and_hang).wait(timeout=1.5)
    child = int(outcome.output.rpartition("child=")[2])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()


_LEAVING = """
import os, signal, sys, time
from tests.harness import Crew, World
from tests.test_world import _wait_for_nothing
crew = Crew()
run = World(crew, 2).start(_wait_for_nothing)
print(crew.server_pid, *[o.pid for o in run.outcomes], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_no_rank_outlives_a_killed_pytest(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed process cannot remove its files
    command = [sys.executable, "-c", _LEAVING]
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 10
    while (left := [p for p in pids if _lives(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def test_leak_checks_catch_what_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tests.harness.leaks._PATIENCE_SECONDS", 0.3)
    with pytest.raises(AssertionError, match=r"left files in .*: \['leak.txt'\]"), no_file_leaks():
        Path("leak.txt").touch()
    with pytest.raises(AssertionError, match="NTP_LEAK"), no_environment_changes():
        os.environ["NTP_LEAK"] = "1"
    assert "NTP_LEAK" not in os.environ
    handler = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(AssertionError, match="SIGUSR2"), no_signal_handler_changes():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR2) is handler
    stop = threading.Event()
    with pytest.raises(AssertionError, match="non-daemon threads"), no_thread_leaks():
        thread = threading.Thread(target=stop.wait)
        thread.start()
    stop.set()
    thread.join()


def test_orphans_of_a_test_are_leaks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.harness.leaks._PATIENCE_SECONDS", 0.3)
    with pytest.raises(AssertionError, match="sleep 601"), no_process_leaks(lambda: None):
        subprocess.run(["sh", "-c", "sleep 601 & exit 0"], check=True)
    assert all("601" not in Path(f"/proc/{p}/cmdline").read_text() for p in session_processes() if _lives(p))
