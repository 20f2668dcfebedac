"""Turn a freshly forked child of the fork server into something that looks like ``python script.py``."""

from __future__ import annotations

import builtins
import contextlib
import io
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from lightning_ntp.launch.call import run_call_in_rank, run_saved_call
from lightning_ntp.launch.program import Program
from lightning_ntp.launch.report import report, user_traceback


@dataclass(frozen=True)
class Start:
    """The order to start one rank."""

    slot: int
    environment: dict[str, str]
    """All of the rank's environment."""
    arguments: list[str]
    """Appended to the command line."""


def run(program: Program, start: Start) -> NoReturn:
    """Run ``program`` as a rank and leave through the interpreter's own exit.

    Leaving by SystemExit from the main thread gives what a script gets: non-daemon threads joined, atexit handlers
    run, stdio flushed. (multiprocessing's children skip the middle one.)
    """
    _take_environment(start.environment)
    _reseed()
    _set_threads()
    with contextlib.suppress(OSError):  # a directory that is gone is for the script to complain about
        os.chdir(program.cwd)
    multiprocessing.process.ORIGINAL_DIR = program.cwd  # type: ignore[attr-defined]
    sys.argv = [*program.argv, *start.arguments]
    sys.orig_argv = [*program.cold_command, *start.arguments]
    if program.entry != "call":
        sys.path[0] = program.path0
    raise SystemExit(_report_errors(lambda: _enter(program)))


def run_forked_call(call: Callable[[], Any], start: Start) -> NoReturn:
    """Run ``call`` in a rank forked from the calling process, and leave without the caller's atexit handlers."""
    code: Any = 1
    try:
        _take_environment(start.environment)
        _set_threads()
        # Children, finalizers and after-fork hooks of the caller's multiprocessing are not this process's own.
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]
        try:
            code = _report_errors(lambda: run_call_in_rank(call))
        except SystemExit as exit_:
            code = exit_.code
        threading._shutdown()  # type: ignore[attr-defined]
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    finally:
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


def _report_errors(body: Callable[[], None]) -> int:
    """Exit status of ``body``; its exceptions go to the supervisor, or else where Python would print them."""
    error: BaseException | None = None
    try:
        body()
    except KeyboardInterrupt:
        # The terminal sent it to all ranks: a traceback each would say nothing.
        return 128 + signal.SIGINT
    except Exception as caught:
        error = caught
    # Outside the except block: what runs at exit must not see an exception being handled.
    if error is None:
        return 0
    reported = report(error)
    # A hook of the user's is called in any case: it may do more than print. torch puts one that only prints.
    if not reported or getattr(sys.excepthook, "__module__", "sys").partition(".")[0] not in ("sys", "torch"):
        sys.excepthook(type(error), error, user_traceback(error.__traceback__))
    return 1


def _enter(program: Program) -> None:
    if program.entry == "call":
        run_saved_call(Path(program.target))
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    # multiprocessing made this alias when it was imported, in the fork server.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    if program.entry == "module":
        # What CPython itself calls for -m: it fills the current __main__.
        runpy._run_module_as_main(program.target, alter_argv=True)  # type: ignore[attr-defined]
        return
    main.__file__ = program.target
    main.__loader__ = SourceFileLoader("__main__", program.target)
    main.__dict__["__cached__"] = None
    with io.open_code(program.target) as file:
        code = compile(file.read(), program.target, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _take_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _reseed() -> None:
    """Forked siblings share the state of every generator; a fresh process takes it from the operating system."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        # Not torch.seed(): that would also queue a seed for CUDA, which a fresh process does not have.
        sys.modules["torch"].default_generator.seed()


def _set_threads() -> None:
    """torch read ``OMP_NUM_THREADS`` at its import; the forked thread pool must learn the number again."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdigit() and int(threads) > 0:
        sys.modules["torch"].set_num_threads(int(threads))
