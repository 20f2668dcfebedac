"""When ranks fail: one traceback, the right exit code, and nobody left waiting."""

import time
from pathlib import Path

from tests.launch.scripts import run, write

SHORT = "failure_grace=timedelta(seconds=0.5), kill_grace=timedelta(seconds=0.5)"


def test_exception_in_all_ranks_is_printed_once(tmp_path: Path) -> None:
    write(tmp_path, "def f():\n    raise ValueError(f'no good in {slot}')\nf()\n", ranks=3)
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: no good in ") == 1
    assert done.stderr.endswith("(raised by all 3 ranks)\n")
    # As python itself would print it: no frame of the launcher.
    assert done.stderr.count("File ") == 2 and f'File "{tmp_path}/script.py", line 8, in f' in done.stderr


def test_exception_in_one_rank_ends_the_others_and_is_the_cause(tmp_path: Path) -> None:
    body = """
    if slot == 1:
        raise KeyError("mine")
    time.sleep(0.2)
    if slot == 2:
        raise RuntimeError("gloo: Connection closed by peer")
    time.sleep(60)
    """
    write(tmp_path, body, ranks=3, options=SHORT)
    started = time.monotonic()
    done = run("script.py", cwd=tmp_path)
    assert time.monotonic() - started < 20
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and "KeyError: 'mine'" in done.stderr
    assert "raised by slot 1 of 3; slot 2 of 3 failed as a consequence: RuntimeError: gloo" in done.stderr


def test_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    body = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60 if slot else 0.3)
    sys.exit(3)
    """
    write(tmp_path, body, options=SHORT)
    done = run("script.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "exit code 3\n(in slot 0 of 2)\n")


def test_killed_rank_is_the_cause_although_its_peer_complains_first(tmp_path: Path) -> None:
    body = """
    import signal
    if slot == 0:
        raise RuntimeError("Connection reset by peer")
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    write(tmp_path, body, options="failure_grace=timedelta(seconds=5)")
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 128 + 9
    assert done.stderr.startswith("killed by SIGKILL\n(in slot 1 of 2; slot 0 of 2 failed as a consequence")


def test_exit_codes_of_the_script_are_the_jobs(tmp_path: Path) -> None:
    write(tmp_path, "sys.exit(int(sys.argv[1]))")
    assert run("script.py", "0", cwd=tmp_path).returncode == 0
    assert run("script.py", "7", cwd=tmp_path).returncode == 7


def test_users_excepthook_is_called(tmp_path: Path) -> None:
    write(tmp_path, "sys.excepthook = lambda *a: print('hooked', a[0].__name__, flush=True)\n1 / 0", ranks=1)
    done = run("script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "hooked ZeroDivisionError\n")


def test_syntax_error_in_a_module_and_a_missing_module_are_reported_once(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def (:\n")
    write(tmp_path, "import bad")
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("SyntaxError") == 1


def test_reported_exception_that_the_script_catches_is_no_failure(tmp_path: Path) -> None:
    body = """
    from lightning_ntp.launch.report import report
    try:
        raise MemoryError("too big")
    except MemoryError as error:
        report(error)
    time.sleep(1.0)
    print("went on", flush=True)
    """
    write(tmp_path, body, options=SHORT)
    done = run("script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "went on\n" * 2)


def test_job_directory_is_removed(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    write(tmp_path, "1 / 0")
    run("script.py", cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")})
    assert list((tmp_path / "tmp").iterdir()) == []
