"""No process outlives the job, whoever is killed."""

import os
import signal
from pathlib import Path

from tests.launch.scripts import alive, parent_of, running, wait_for, wait_until_gone, write

#: Ranks and a child of each, that would go on for a minute.
BODY = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
open(f"child-{child.pid}", "w").close()
open(f"rank-{os.getpid()}", "w").close()
time.sleep(60)
"""


def _pids(directory: Path, pattern: str, count: int) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in wait_for(directory, pattern, count)]


def test_kill_minus_nine_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    for options in ("", "cold=True"):
        write(tmp_path, BODY, options=options)
        with running("script.py", cwd=tmp_path) as supervisor:
            ranks, children = _pids(tmp_path, "rank-*", 2), _pids(tmp_path, "child-*", 2)
            server = parent_of(ranks[0])
            assert parent_of(server) == supervisor.pid
            supervisor.kill()
            assert wait_until_gone([server, *ranks, *children]) == []
        for path in tmp_path.glob("*-*"):
            path.unlink()


def test_kill_minus_nine_of_the_supervisor_while_the_server_imports_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, BODY, before="import torch\nopen(f'supervisor-{os.getpid()}', 'w').close()\n")
    with running("script.py", cwd=tmp_path) as supervisor:
        wait_for(tmp_path, "supervisor-*", 1)
        children: list[int] = []
        while not children:
            text = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text()
            children = [int(pid) for pid in text.split()]
        supervisor.kill()
        assert wait_until_gone(children, 3.0) == []
    assert not list(tmp_path.glob("rank-*"))


def test_kill_minus_nine_of_the_server_ends_the_job_with_a_clear_message(tmp_path: Path) -> None:
    write(tmp_path, BODY)
    with running("script.py", cwd=tmp_path) as supervisor:
        ranks = _pids(tmp_path, "rank-*", 2)
        children = _pids(tmp_path, "child-*", 2)
        os.kill(parent_of(ranks[0]), signal.SIGKILL)
        assert wait_until_gone(ranks) == []
        # A rank's own children are beyond reach once both their parents are gone.
        for child in children:
            os.kill(child, signal.SIGKILL)
        _, stderr = supervisor.communicate(timeout=20)
        assert supervisor.returncode == 1
        assert "fork server" in stderr and "killed by signal 9" in stderr


def test_killed_rank_leaves_no_children_and_no_peer(tmp_path: Path) -> None:
    write(tmp_path, BODY, options="failure_grace=timedelta(seconds=0.3), kill_grace=timedelta(seconds=0.3)")
    with running("script.py", cwd=tmp_path) as supervisor:
        ranks, children = _pids(tmp_path, "rank-*", 2), _pids(tmp_path, "child-*", 2)
        server = parent_of(ranks[0])
        os.kill(ranks[0], signal.SIGKILL)
        _, stderr = supervisor.communicate(timeout=20)
        assert supervisor.returncode == 128 + 9
        assert "killed by SIGKILL" in stderr
        assert wait_until_gone([server, *ranks, *children]) == []


def test_daemon_that_a_rank_leaves_on_purpose_lives_on(tmp_path: Path) -> None:
    body = """
    import subprocess
    daemon = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    open(f"daemon-{daemon.pid}", "w").close()
    """
    write(tmp_path, body)
    with running("script.py", cwd=tmp_path) as supervisor:
        supervisor.communicate(timeout=20)
        assert supervisor.returncode == 0
    daemons = _pids(tmp_path, "daemon-*", 2)
    assert all(alive(daemon) for daemon in daemons)
    for daemon in daemons:
        os.kill(daemon, signal.SIGKILL)
    assert wait_until_gone(daemons) == []
