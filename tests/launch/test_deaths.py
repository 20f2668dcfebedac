"""The supervisor lets a job go on that has said it recovers from deaths, and only such a job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lightning_ntp.launch.exits import ExitWatch

SCRIPT = """\
import os, signal, sys, time
from datetime import timedelta
from lightning_ntp.launch import RankIdentity, is_rank, run_call, run_script
if not is_rank() and __name__ == "__main__" and "call" not in sys.argv:
    sys.exit(run_script(3, failure_grace=timedelta(seconds=1){options}))
import torch, torch.distributed as dist
from lightning_ntp.comm import Interrupted, runtime
from lightning_ntp.plan import Topology

def work(recovers=True):
    me = RankIdentity.from_environ()
    current = runtime.start((me.store_host, me.store_port), me.slot, Topology.start((2, 1)), "gloo",
                            timedelta(seconds=60), torch.device("cpu"))
    if recovers:
        current.announce_recoverable()
    dist.barrier()
    time.sleep(0.1)
    fail(me.slot)
    try:
        while True:
            dist.barrier()
    except Interrupted:
        current.recover({{}})
    dist.barrier()
    # one write for the whole line: ranks share the pipe
    os.write(1, f"slot {{me.slot}} went on with {{current.generation.topology.degrees}}\\n".encode())
    return me.slot

def fail(slot):
    {failure}
"""


def run(
    tmp_path: Path, failure: str, main: str = "if is_rank(): work()", *arguments: str, options: str = ""
) -> tuple[int, str, str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(failure=failure, options=options) + textwrap.dedent(main))
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=tmp_path,
        env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr


def test_survivors_go_on_and_their_exit_code_counts(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "if slot == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 0, err
    assert sorted(out.split("\n")[:-1]) == [f"slot {slot} went on with (1, 1)" for slot in (0, 2)]
    assert re.search(r"slot 1 \(pid \d+\) died: SIGKILL; 2 ranks go on\n", err), err


def test_an_exit_without_a_farewell_is_a_death(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "if slot == 0: os._exit(3)")
    assert code == 0 and out.count("went on with (1, 1)") == 2, err
    assert "died: exit code 3; 2 ranks go on" in err


@pytest.mark.chaos
def test_without_the_announcement_a_death_ends_the_job(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "if slot == 1: os.kill(os.getpid(), signal.SIGKILL)", "if is_rank(): work(False)")
    assert code == 128 + signal.SIGKILL and out == "" and "killed by SIGKILL" in err and "go on" not in err


@pytest.mark.chaos
def test_an_exception_ends_the_job_as_ever(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "if slot == 2: raise ValueError('a bug')")
    assert code == 1 and out == "" and err.count("ValueError: a bug") == 1 and "go on" not in err, err


def test_when_all_die_the_job_has_failed(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 128 + signal.SIGKILL and "killed by SIGKILL" in err


def test_a_call_returns_the_result_of_the_lowest_survivor(tmp_path: Path) -> None:
    main = """
    if __name__ == "__main__" and not is_rank():
        print("result", run_call(3, work))
    """
    code, out, err = run(tmp_path, "if slot == 0: os.kill(os.getpid(), signal.SIGKILL)", main, "call")
    assert code == 0 and "result 1\n" in out, err


def test_a_result_that_dies_with_its_rank_is_told(tmp_path: Path) -> None:
    main = """
    def last():
        slot = work()
        if slot == 0:
            time.sleep(1.5)  # the others have ended, and left the result to the lowest slot
            os.kill(os.getpid(), signal.SIGKILL)
    if __name__ == "__main__" and not is_rank():
        run_call(3, last)
    """
    code, out, err = run(tmp_path, "if slot == 1: os.kill(os.getpid(), signal.SIGKILL)", main, "call")
    assert code == 1 and out.count("went on") == 2, err
    assert "RanksFailedError" in err and "the result is lost: slot 0 was to hand it over" in err, err
    assert "FileNotFoundError" not in err, err


def test_a_rank_ends_when_its_store_is_gone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time, signal\n"
        "from datetime import timedelta\n"
        "import torch\n"
        "from torch.distributed import TCPStore\n"
        "from lightning_ntp.comm import runtime\n"
        "from lightning_ntp.plan import Topology\n"
        "read, write = os.pipe()\n"
        "server = os.fork()\n"
        "if server == 0:\n"
        "    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "    os.write(write, str(store.port).encode())\n"
        "    os.close(write)\n"
        "    time.sleep(60)\n"
        "port = int(os.read(read, 9))\n"
        "runtime.start(('127.0.0.1', port), 0, Topology.start((1,)), 'gloo', timedelta(seconds=20),"
        " torch.device('cpu'))\n"
        "os.kill(server, signal.SIGKILL)\n"
        "time.sleep(20)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 75
    assert "slot 0: the job's store at 127.0.0.1:" in done.stderr and "cannot be reached any more" in done.stderr


def test_an_exit_is_seen_before_the_process_can_be_reaped() -> None:
    child = os.fork()
    if child == 0:
        memory = bytearray(300 << 20)
        for place in range(0, len(memory), 4096):
            memory[place] = 1
        time.sleep(60)
        os._exit(0)
    watch = ExitWatch()
    watch.add(7, child)
    deadline = time.monotonic() + 20
    while int(Path(f"/proc/{child}/statm").read_text().split()[1]) * 4096 < 300 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watch.exiting() == {}
    killed = time.monotonic()
    os.kill(child, signal.SIGKILL)
    while not watch.exiting():
        assert time.monotonic() < killed + 10
    seen = time.monotonic() - killed
    assert watch.exiting() == {7: "SIGKILL"}
    os.waitpid(child, 0)
    assert seen < time.monotonic() - killed
    assert watch.exiting() == {7: ""}  # gone; whoever has its number now is not looked at
    watch.close()


@pytest.mark.chaos
def test_ranks_that_all_wait_for_each_other_end_the_job_with_their_stacks(tmp_path: Path) -> None:
    main = """\
    from lightning_ntp.launch import progress
    def fail(slot):
        groups = [dist.new_group([0, 1]), dist.new_group([0, 2]), dist.new_group([1, 2])]
        progress.current().begin(progress.Tag.STEP)
        dist.all_reduce(torch.ones(1), group=groups[(0, 2, 1)[slot]])
    if is_rank(): work()
    """
    code, out, err = run(tmp_path, "pass", main, options=", heartbeat=timedelta(seconds=1)")
    assert code == 1 and out == "", err
    assert "The job cannot go on: all 3 ranks wait for each other for 10 s (in a training step)" in err, err
    stacks = re.findall(r"slot \d: stack: (\S+\.txt)", err)
    assert len(stacks) == 3 and all("all_reduce" in Path(stack).read_text() for stack in stacks), err
    assert "died" not in err and "Traceback" not in err, err
