"""The fork server: a process that has imported much, computed nothing, and forks the ranks.

It is the ranks' parent: it reaps them and reports how they ended. It takes orders over a socket and dies, with all
ranks and their children, when the supervisor does. Ranks in turn ask the kernel to die with it.

Orders (JSON lines): ``{"do": "start", "slot", "environment", "arguments"}``, ``{"do": "signal", "signum"}``,
``{"do": "end"}``. News: ``{"did": "started", "slot", "pid", "cold"}``, ``{"did": "ended", "slot", "code"}``,
``{"did": "signalled", "signum"}`` (this process got a signal: so did the ranks, which are in the same process group).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from lightning_ntp.launch.channel import Channel, Message
from lightning_ntp.launch.lifeline import adopt_orphans, children_of, die_with_parent, kill_trees, live_on_after_parent
from lightning_ntp.launch.program import Program
from lightning_ntp.launch.rank import Start, run

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
_PARENT_CHECK = 1.0
"""Seconds between looks at the parent, in case something else holds the other end of the socket open."""

BOOTSTRAP = (
    "import sys; sys.path[:1] = [sys.argv[3]] if sys.path[0] == '' else sys.path[:1]; sys.path.append(sys.argv[4])\n"
    "from lightning_ntp.launch.server import main; sys.path.pop()\n"
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)
"""``python -c`` code with arguments: the socket's descriptor, the supervisor's pid, ``sys.path[0]`` of the ranks, and
this package's directory (used only if it is not on the path anyway)."""


def main(fd: int, parent_pid: int) -> NoReturn:
    """Entry point of an exec'ed server. In the ranks it goes on as the rank's program."""
    die_with_parent(parent_pid)
    channel = Channel.from_fd(fd)
    server = ForkServer(channel, parent_pid)
    first, orders = channel.receive_first()
    if first is None:
        os._exit(1)
    program = Program(**first["program"])
    if program.cold is None:
        _preload(program.preload)
    # From here on the loop watches the parent, and also ends the descendants of the ranks.
    live_on_after_parent()
    start = server.serve(program, Path(first["job_dir"]), orders)
    if start is None:
        os._exit(0)
    run(program, start)


class ForkServer:
    """Forks and reaps ranks until told to end. Creating it takes over SIGINT, SIGTERM and SIGCHLD."""

    def __init__(self, channel: Channel, parent_pid: int) -> None:
        self._channel = channel
        self._parent_pid = parent_pid
        self._ranks: dict[int, int] = {}  # pid -> slot
        self._left_on_purpose: set[int] = set()
        self._signals: list[int] = []
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._ignored = {s for s in STOP_SIGNALS if signal.getsignal(s) is signal.SIG_IGN}
        for signum in STOP_SIGNALS - self._ignored:
            signal.signal(signum, lambda number, _: self._signals.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler of Python's is what writes to the wake-up socket
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        # The supervisor blocked them so that none could hit this process before it was ready.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def serve(self, program: Program, job_dir: Path, orders: list[Message]) -> Start | None:
        """Serve until the end. Returns in two kinds of processes: here with ``None``, in each rank with its start."""
        adopt_orphans()
        gc.collect()
        gc.freeze()  # the ranks share these pages; a collection would copy them
        while True:
            for order in orders:
                if order["do"] == "start":
                    start = Start(order["slot"], order["environment"], order["arguments"])
                    if self._fork(program, start):
                        return start
                elif order["do"] == "signal":
                    self._pass_on(order["signum"])
                elif order["do"] == "end":
                    kill_trees(set(self._ranks))
                    return None
            self._reap()
            while self._signals:
                self._channel.send({"did": "signalled", "signum": self._signals.pop(0)})
            sources = [self._channel.fileno(), self._wake_read.fileno()]
            ready, _, _ = select.select(sources, [], [], _PARENT_CHECK)
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
            orders = self._channel.receive() if sources[0] in ready else []
            if self._channel.closed or os.getppid() != self._parent_pid:
                kill_trees(set(self._ranks))
                shutil.rmtree(job_dir, ignore_errors=True)
                with contextlib.suppress(OSError):  # its terminal may be gone too
                    print(
                        f"lightning_ntp: the launching process (pid {self._parent_pid}) is gone, and all ranks with it",
                        file=sys.stderr,
                        flush=True,
                    )
                return None

    def _fork(self, program: Program, start: Start) -> bool:
        """Fork one rank. Returns True in the rank, unless that went on to exec."""
        cold = program.cold or unsafe_to_fork()
        if not program.cold_command:
            cold = None
        server_pid = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            print(f"cannot start the rank in slot {start.slot}: {error}", file=sys.stderr, flush=True)
            self._channel.send({"did": "ended", "slot": start.slot, "code": os.EX_OSERR})  # the others may live
            return False
        if pid == 0:
            self._become_child(server_pid)
            if cold is not None:
                _exec(program, start)
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._ranks[pid] = start.slot
        self._channel.send({"did": "started", "slot": start.slot, "pid": pid, "cold": cold})
        return False

    def _become_child(self, server_pid: int) -> None:
        die_with_parent(server_pid)
        signal.set_wakeup_fd(-1)
        self._wake_read.close()
        self._wake_write.close()
        self._channel.close()
        self._ranks.clear()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for signum in STOP_SIGNALS - self._ignored:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _pass_on(self, signum: int) -> None:
        if signum == signal.SIGKILL:
            kill_trees(set(self._ranks))
            return
        for pid in self._ranks:  # not reaped yet, so the pid is still theirs
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            slot = self._ranks.pop(pid, None)
            if slot is not None:
                code = os.waitstatus_to_exitcode(status)
                self._end_orphans(code)
                self._channel.send({"did": "ended", "slot": slot, "code": code})

    def _end_orphans(self, code: int) -> None:
        """A killed rank could not end its DataLoader workers. What a rank leaves on purpose (a daemon) may stay."""
        orphans = children_of(os.getpid()) - self._ranks.keys() - self._left_on_purpose
        if code < 0:
            kill_trees(orphans)
        else:
            self._left_on_purpose |= orphans


def unsafe_to_fork() -> str | None:
    """Why a fork of this process would not be like a new one, or ``None``.

    A second Python thread may hold any lock at the moment of the fork. A driver's descriptor means an initialised
    device, which cannot be used in a forked child. Threads of native libraries (OpenBLAS) do not count: such libraries
    rebuild their pools after a fork.
    """
    if len(sys._current_frames()) > 1:
        return "the fork server has a second Python thread"
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith("/dev/nvidia"):
                    return f"the fork server has {target} open"
    return None


def _preload(modules: list[str]) -> None:
    for name in modules:
        # Importing is only a head start: what fails here fails again in the rank, if it needs it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _exec(program: Program, start: Start) -> NoReturn:
    try:
        os.chdir(program.cwd)
        command = [*program.cold_command, *start.arguments]
        os.execve(command[0], command, start.environment)
    except OSError as error:
        print(f"cannot start the rank in slot {start.slot}: {error}", file=sys.stderr, flush=True)
        os._exit(127)
