"""Start the fork server, as a new interpreter or as a fork of this process, and end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lightning_ntp.launch.channel import Channel
from lightning_ntp.launch.program import Program
from lightning_ntp.launch.rank import run_forked_call
from lightning_ntp.launch.server import BOOTSTRAP, STOP_SIGNALS, ForkServer

_END_TIMEOUT = 5.0
"""Seconds a server may take to end by itself."""


class ServerProcess:
    """A running fork server and the channel to it."""

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self.channel = channel
        self._code: int | None = None

    def kill(self) -> None:
        """End it and its ranks by force."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Tell it to end (it kills the ranks that still live), by force if it does not. Returns its exit code."""
        if self._code is None:
            if not self.channel.closed:
                self.channel.send({"do": "end"})
            deadline = time.monotonic() + _END_TIMEOUT
            while self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    self.kill()  # still importing, or stuck
                    deadline = float("inf")
                else:
                    time.sleep(0.01)
            self.channel.close()
        return self._code


def exec_server(program: Program, job_dir: Path, environment: dict[str, str]) -> ServerProcess:
    """Start a server in a new interpreter, which starts importing at once."""
    ours, theirs = socket.socketpair()
    package_root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, *program.flags, "-c", BOOTSTRAP, str(theirs.fileno()), str(os.getpid())]
    command += [program.path0, package_root]
    # A signal between exec and the server's first line would end it; blocked ones wait (the mask is inherited).
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(command, env=environment, cwd=program.cwd, pass_fds=[theirs.fileno()])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        theirs.close()
    process.returncode = 0  # ours to wait for: Popen's destructor would complain, or reap it
    channel = Channel(ours)
    channel.send({"program": program.to_message(), "job_dir": str(job_dir)})
    return ServerProcess(process.pid, channel)


def fork_server(call: Callable[[], Any], job_dir: Path) -> ServerProcess:
    """Fork a server out of this process; its ranks run ``call``, which needs no pickling."""
    ours, theirs = Channel.pair()
    sys.stdout.flush()  # else the children write it again
    sys.stderr.flush()
    parent = os.getpid()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, which every notebook has; the ranks start none of the caller's.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _serve_forked(call, job_dir, ours, theirs, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    theirs.close()
    return ServerProcess(pid, ours)


def _serve_forked(call: Callable[[], Any], job_dir: Path, ours: Channel, theirs: Channel, parent: int) -> NoReturn:
    try:
        ours.close()
        start = ForkServer(theirs, parent).serve(Program("call", ""), job_dir, [])
        if start is not None:
            run_forked_call(call, start)
        os._exit(0)
    except BaseException:  # nothing may unwind into the caller's code, which runs in the parent
        traceback.print_exc()
        os._exit(1)
