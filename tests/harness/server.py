"""The fork server: imports torch and Lightning once, computes nothing, starts no thread, forks ranks on request."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
from typing import Any

from tests.harness.wire import die_with_parent, receive, send

# Heavy imports that every rank needs. The package's own modules may be broken while someone works on them: then the
# rank that needs them fails with the real traceback, so an error here is not one.
_PRELOAD = ("torch", "lightning.pytorch", "torchmetrics", "pytest", "tensorboard.compat")
_PRELOAD_QUIETLY = ("lightning_ntp", "lightning_ntp.lightning.strategy", "tests.models", "tests.reference")


def main(control_fd: int, parent: int) -> None:
    """Serve ``fork`` and ``exit_code`` requests until the other end (pytest) is gone."""
    die_with_parent(parent)
    # Ctrl-C is for pytest, which then closes the socket in its own time.
    os.setpgid(0, 0)
    for name in _PRELOAD + _PRELOAD_QUIETLY:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(
            f"the fork server has {threads} threads after its imports, so a fork could copy a held lock;"
            " find the import that starts a thread and keep it out of the preloaded modules"
        )
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=control_fd)
    send(control, "ready")
    while True:
        try:
            request = receive(control)
        except EOFError:
            os._exit(0)  # the ranks follow by PDEATHSIG
        if request["kind"] == "fork":
            pids, ends = _fork(control, request["roles"])
            send(control, pids)
            socket.send_fds(control, [b"f"], [end.fileno() for end in ends])
            for end in ends:
                end.close()
        else:
            send(control, _exit_code(request["pid"], request["timeout"]))


def _fork(control: socket.socket, roles: list[dict[str, Any]]) -> tuple[list[int], list[socket.socket]]:
    pids: list[int] = []
    ends: list[socket.socket] = []
    server = os.getpid()
    for role in roles:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent(server)
                control.close()
                for end in (ours, *ends):
                    end.close()
                from tests.harness import rank

                serve = rank.serve_store if role["kind"] == "store" else rank.serve
                serve(theirs, role["directory"])
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        theirs.close()
        pids.append(pid)
        ends.append(ours)
    return pids, ends


def _exit_code(pid: int, timeout: float) -> int | None:
    """Exit code of a child (negative: the signal), None if it still lives after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(int(sys.argv[1]), int(sys.argv[2]))
