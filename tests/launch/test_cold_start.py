"""A process that is watched, or started in an odd way, starts its ranks in new interpreters; or says why not."""

import sys
from pathlib import Path

import pytest

from lightning_ntp.launch.observed import observed_reason
from lightning_ntp.launch.origin import Origin
from tests.launch.scripts import HEAD, LAUNCH, run, write


def test_coverage_is_measured_in_cold_ranks(tmp_path: Path) -> None:
    write(tmp_path, "if slot == 1:\n    only_in_rank_one = 1\n")
    done = run("-m", "coverage", "run", "--data-file=.coverage", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert run("-m", "coverage", "combine", "--append", "--data-file=.coverage", cwd=tmp_path).returncode == 0
    report = run("-m", "coverage", "report", "-m", "--data-file=.coverage", cwd=tmp_path)
    assert "script.py" in report.stdout and "100%" in report.stdout, report.stdout


def test_interpreter_flags_reach_cold_ranks(tmp_path: Path) -> None:
    write(tmp_path, "print(sys.flags.optimize, sys.flags.dev_mode, flush=True)", ranks=1)
    assert run("-O", "-X", "dev", "script.py", cwd=tmp_path).stdout == "1 True\n"


def test_unbuffered_output_stays_warm_and_unbuffered(tmp_path: Path) -> None:
    write(tmp_path, "sys.stdout.write(f'{sys.stdout.write_through} {__import__(\"gc\").get_freeze_count() > 0}\\n')")
    assert run("-u", "script.py", cwd=tmp_path).stdout == "True True\n" * 2


def test_python_c_starts_cold(tmp_path: Path) -> None:
    code = HEAD + LAUNCH.format(ranks=2, options="") + "print('rank', slot, flush=True)"
    done = run("-c", code, cwd=tmp_path)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["0", "1", "rank", "rank"]), done.stderr


def test_cold_by_option(tmp_path: Path) -> None:
    body = "print(sys.argv, __import__('gc').get_freeze_count(), flush=True)"
    write(tmp_path, body, ranks=1, options="cold=True")
    assert run("script.py", "x", cwd=tmp_path).stdout == "['script.py', 'x'] 0\n"


def test_cold_ranks_hand_over_their_traceback_too(tmp_path: Path) -> None:
    before = "from lightning_ntp.launch.report import install_excepthook; install_excepthook()\n"
    write(tmp_path, "raise ValueError('cold')", before=before, options="cold=True")
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: cold") == 1
    assert "(raised by all 2 ranks)" in done.stderr


def test_program_from_stdin_is_refused_with_the_way_out(tmp_path: Path) -> None:
    done = run("-", cwd=tmp_path, stdin=HEAD + "run_script(2)")
    assert done.returncode == 1
    assert "ntp_notebook" in done.stderr and "stdin" in done.stderr


def test_server_with_a_second_thread_execs_instead_of_forking(tmp_path: Path) -> None:
    # sitecustomize runs in the server too; its thread may hold any lock at the moment of a fork.
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
    )
    write(tmp_path, "print(__import__('gc').get_freeze_count(), flush=True)", ranks=1)
    assert run("script.py", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}).stdout == "0\n"


def test_tracing_profiling_and_debuggers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COVERAGE_RUN"):
        monkeypatch.delenv(name, raising=False)
    watched_already = sys.gettrace() is not None or sys.getprofile() is not None
    assert watched_already or observed_reason() is None
    monkeypatch.setenv("PYDEVD_USE_CYTHON", "YES")
    assert "debugger" in (observed_reason() or "")
    monkeypatch.setenv("COVERAGE_RUN", "true")
    assert "coverage" in (observed_reason() or "")


@pytest.mark.parametrize(
    ("argv", "kind", "target", "arguments", "flags"),
    [
        (["a.py", "-x", "y"], "script", "a.py", ("-x", "y"), ()),
        (["-u", "-m", "p.q", "-m", "z"], "module", "p.q", ("-m", "z"), ("-u",)),
        (["-W", "error", "a.py"], "script", "a.py", (), ("-W", "error")),
        (["-Werror", "-X", "dev", "a.py"], "script", "a.py", (), ("-Werror", "-X", "dev")),
        (["-c", "print()", "a"], "code", "print()", ("a",), ()),
        (["-mp.q", "a"], "code", "", ("a",), ("-mp.q",)),
        (["-"], "interactive", "", (), ()),
        ([], "interactive", "", (), ()),
        (["-i"], "interactive", "", (), ("-i",)),
    ],
)
def test_command_line_is_split_as_python_does(
    argv: list[str], kind: str, target: str, arguments: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    origin = Origin.parse(argv, "/somewhere")
    assert (origin.kind, origin.target, origin.arguments, origin.flags) == (kind, target, arguments, flags)
