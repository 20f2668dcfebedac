"""A rank forked from the warm server cannot be told from ``python script.py``."""

import json
import textwrap
from pathlib import Path

from tests.launch.scripts import HEAD, run, wait_for, write

LOOK = """
import json, multiprocessing, multiprocessing.spawn, pickle, signal, threading
import __main__
class Mine: pass
seen = dict(
    name=__name__, file=__file__, spec=getattr(__spec__, "name", None), package=__package__, doc=__doc__,
    loader=type(__loader__).__name__, cached=__cached__, argv=sys.argv, path=sys.path, cwd=os.getcwd(),
    orig_argv=sys.orig_argv[1:],
    main=__main__ is sys.modules["__mp_main__"] and __main__.Mine is Mine,
    pickles=pickle.loads(pickle.dumps(Mine())).__class__.__module__,
    signals=[str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)],
    mask=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), wakeup=signal.set_wakeup_fd(-1),
    thread=threading.current_thread() is threading.main_thread(), threads=threading.active_count(),
    daemon=multiprocessing.current_process().daemon,
    spawn={k: v for k, v in multiprocessing.spawn.get_preparation_data("x").items() if "main" in k or "dir" in k},
    fds=sorted(f for f in os.listdir("/proc/self/fd") if int(f) > 2),
    gettrace=sys.gettrace() is None, user=os.environ.get("SET_BEFORE_LAUNCH"),
)
open(os.path.join(os.environ["OUT"], f"seen-{os.environ.get('LOCAL_RANK', 'plain')}"), "w").write(json.dumps(seen))
"""


def _compare(directory: Path, *command: str | Path) -> None:
    env = {"OUT": str(directory)}
    plain = run(*command, cwd=directory, env={**env, "PLAIN": "1"})
    assert plain.returncode == 0, plain.stderr
    launched = run(*command, cwd=directory, env=env)
    assert launched.returncode == 0, launched.stderr
    expected, *ranks = (json.loads(path.read_text()) for path in reversed(wait_for(directory, "seen-*", 3)))
    assert ranks == [expected, expected]


BEFORE = """
os.environ["SET_BEFORE_LAUNCH"] = "yes"
if "PLAIN" in os.environ:
    is_rank = lambda: True
    os.environ.update({
        "LIGHTNING_NTP_STORE": "h:1", "LIGHTNING_NTP_SLOT": "0", "LIGHTNING_NTP_UID": "u", "LIGHTNING_NTP_JOB": "j",
        "WORLD_SIZE": "1"})
"""


def test_rank_looks_like_a_script_without_main_guard(tmp_path: Path) -> None:
    write(tmp_path, LOOK, before=BEFORE)
    _compare(tmp_path, "script.py", "--flag", "a b")


def test_rank_looks_like_python_m(tmp_path: Path) -> None:
    package = tmp_path / "pkg" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "relative.py").write_text("value = 1\n")
    write(package, "from .relative import value\n" + LOOK, before=BEFORE)
    _compare(tmp_path, "-m", "pkg.inner.script", "-m", "--x=1")


def test_code_after_the_launch_runs_in_ranks_and_not_in_the_supervisor(tmp_path: Path) -> None:
    write(tmp_path, "print('rank', slot, flush=True)")
    done = run("script.py", cwd=tmp_path)
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "rank 0", "rank 1"])


def test_atexit_handlers_run_threads_are_joined_and_output_is_flushed(tmp_path: Path) -> None:
    body = """
    import atexit, threading
    atexit.register(lambda: sys.stdout.write(f"atexit {slot}\\n"))
    threading.Thread(target=lambda: (time.sleep(0.3), sys.stdout.write(f"thread {slot}\\n"))).start()
    """
    write(tmp_path, body)
    done = run("script.py", cwd=tmp_path)
    assert sorted(done.stdout.split("\n")) == ["", "atexit 0", "atexit 1", "thread 0", "thread 1"], done.stderr


def test_stdin_is_left_to_the_ranks(tmp_path: Path) -> None:
    write(tmp_path, "print('read', sys.stdin.readline().strip())", ranks=1)
    assert run("script.py", cwd=tmp_path, stdin="hello\n").stdout == "read hello\n"


def test_hydra_changes_the_directory_and_ranks_share_it(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("a: 1\nhydra:\n  job:\n    chdir: true\n")
    source = """
    import hydra
    @hydra.main(version_base=None, config_path="conf", config_name="config")
    def main(config):
        if not is_rank():
            sys.exit(run_script(2, store_address="127.0.0.1:9"))
        print("rank", os.getcwd(), config.a, os.path.abspath(sys.path[0]), flush=True)
    main()
    """
    (tmp_path / "script.py").write_text(HEAD + textwrap.dedent(source))
    done = run("script.py", "a=5", 'hydra.run.dir="out/run=1"', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = f"rank {tmp_path}/out/run=1 5 {tmp_path}"
    assert done.stdout.splitlines() == [line, line]


def test_hydra_multirun_is_refused_because_ranks_would_repeat_the_sweep(tmp_path: Path) -> None:
    source = """
    import hydra
    @hydra.main(version_base=None)
    def main(config):
        run_script(2, store_address="127.0.0.1:9")
    main()
    """
    (tmp_path / "script.py").write_text(HEAD + textwrap.dedent(source))
    done = run("script.py", "--multirun", "+a=1,2", cwd=tmp_path)
    assert done.returncode == 1
    assert "would repeat the whole sweep" in done.stderr


def test_dataloader_workers_started_by_spawn_work_in_ranks(tmp_path: Path) -> None:
    source = """\
import sys
import torch
from torch.utils.data import DataLoader, Dataset
from lightning_ntp.launch import is_rank, run_script

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index**2

if __name__ == "__main__":
    if not is_rank():
        sys.exit(run_script(1))
    loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    print([batch.tolist() for batch in loader])
"""
    (tmp_path / "script.py").write_text(source)
    done = run("script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[[0, 1], [4, 9]]\n"), done.stderr


def test_unseeded_ranks_draw_different_random_numbers_and_share_out_the_cores(tmp_path: Path) -> None:
    body = """
    import random
    print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.get_num_threads(),
          os.environ["OMP_NUM_THREADS"], flush=True)
    torch.rand(1000, 1000).pow(2).sum()  # an OpenMP region in a forked child
    """
    write(tmp_path, body, before="import numpy, torch\n")
    done = run("script.py", cwd=tmp_path, env={"OMP_NUM_THREADS": "3"})
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first[3:] == second[3:] == ["3", "3"], done.stderr
    assert not set(first[:3]) & set(second[:3])


def test_ranks_know_who_they_are(tmp_path: Path) -> None:
    body = """
    me = RankIdentity.from_environ()
    print(me.slot, me.world_size, me.uid, me.job, me.store_host, me.store_port,
          *(os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")),
          os.environ["OMP_NUM_THREADS"], flush=True)
    """
    write(tmp_path, body, ranks=2)
    done = run("script.py", cwd=tmp_path)
    rows = sorted(line.split() for line in done.stdout.splitlines())
    assert [row[0] for row in rows] == ["0", "1"], done.stderr
    assert rows[0][2] != rows[1][2] and rows[0][3] == rows[1][3]
    for slot, row in enumerate(rows):
        assert row[1] == "2"
        assert row[4:12] == ["127.0.0.1", "9", str(slot), str(slot), "2", "0", "127.0.0.1", "9"]


def test_module_of_the_scripts_directory_shadows_nothing_else(tmp_path: Path) -> None:
    # The fork server imports with the script's own sys.path[0], and adds nothing to the path of the ranks.
    (tmp_path / "json5000.py").write_text("here = True\n")
    write(tmp_path, "import json5000; print(json5000.here, '' in sys.path, flush=True)", ranks=1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run(tmp_path / "script.py", cwd=elsewhere).stdout == "True False\n"
