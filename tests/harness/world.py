"""The pytest side of a world: start runs, collect outcomes, tell what happened when something went wrong."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from lightning_ntp.launch.deaths import LOOK_SECONDS
from lightning_ntp.launch.exits import ExitWatch
from lightning_ntp.launch.obituary import announce_death
from tests.harness.rank import DUMP_SIGNAL
from tests.harness.wire import receive, send

_ROOT = Path(__file__).resolve().parents[2]
_SERVER_START_SECONDS = 120.0
_OUTPUT_SHOWN = 6000
_incarnations = count()


@dataclass
class Outcome:
    """What became of one rank in one run."""

    slot: int
    pid: int
    state: str = "running"
    """``returned``, ``raised``, ``died`` (without an answer) or ``running`` (until the harness killed it)."""
    value: Any = None
    error: str = ""
    """The rank's formatted traceback if it raised."""
    exception: BaseException | None = None
    exit_code: int | None = None
    """Of a rank that died: its exit code, negative for a signal."""
    seconds: float = 0.0
    output: str = ""
    """What the rank wrote to stdout and stderr in this run."""
    stacks: str = ""
    """All its threads' stacks at the time-out, if it was still running."""


class RankError(AssertionError):
    """A rank raised, died or did not finish: ``first`` failed first, ``outcomes`` has every rank's side."""

    def __init__(self, message: str, first: Outcome, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.first = first
        self.outcomes = outcomes


@dataclass
class _Process:
    pid: int
    sock: socket.socket
    directory: Path
    usable: bool = True
    dirty: bool = False
    """Its last run left something behind that could not be undone."""
    output_read: int = field(default=0)

    def new_output(self) -> str:
        """What was written since the last call."""
        with open(self.directory / "output", "rb") as file:
            file.seek(self.output_read)
            data = file.read()
        self.output_read += len(data)
        return data.decode(errors="replace")

    def kill(self, number: int) -> None:
        """Send a signal to the rank and all that it started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Crew:
    """The fork server and the processes that worlds borrow. Nothing of it outlives :meth:`close` or pytest's death."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="lightning-ntp-world-"))
        self.open_run: Run | None = None
        """A run that has not been waited for: worlds of one crew share processes, so there is at most one."""
        self._numbers = count()
        self._ranks: list[_Process] = []
        self._hosts: list[_Process] = []
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        # torch asks the name server who 127.0.0.1 is for each connection to a store; a lost packet costs 5 s otherwise.
        environment["RES_OPTIONS"] = "timeout:1 attempts:1"
        environment.pop("PYTEST_CURRENT_TEST", None)
        self._log = open(self.directory / "server", "wb")  # noqa: SIM115
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.server", str(theirs.fileno()), str(os.getpid())],
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._control = ours
        self._control.settimeout(_SERVER_START_SECONDS)
        try:
            receive(self._control)
            self._hosts = self._fork("store", 1)
        except (EOFError, TimeoutError) as error:
            self.close()
            raise RuntimeError(f"the fork server did not start: {self.server_log}") from error

    @property
    def server_pid(self) -> int:
        """Process that all ranks are forked from."""
        return self._server.pid

    @property
    def server_log(self) -> str:
        """What the fork server has printed."""
        return (self.directory / "server").read_text(errors="replace")

    def take(self, n: int, fresh: bool = False) -> list[_Process]:
        """``n`` idle ranks, started where missing; ``fresh`` ones have never run anything."""
        missing = [i for i in range(n) if fresh or i >= len(self._ranks) or not self._ranks[i].usable]
        self._ranks.extend([_Process(0, self._control, self.directory, usable=False)] * (n - len(self._ranks)))
        for i in missing:
            if self._ranks[i].usable:
                self.discard(self._ranks[i])
        for i, process in zip(missing, self._fork("rank", len(missing)), strict=True):
            self._ranks[i] = process
        return self._ranks[:n]

    def discard(self, process: _Process) -> int | None:
        """Kill a rank; returns its exit code if it had died before."""
        if not process.usable:
            return None
        process.usable = False
        code = self._exit_code(process.pid, 0.0)
        process.kill(signal.SIGKILL)
        if code is None:
            code = self._exit_code(process.pid, 10.0)
        process.sock.close()
        shutil.rmtree(process.directory, ignore_errors=True)
        return code

    def died(self, process: _Process) -> int | None:
        """Reap a rank that closed its socket, and whatever it started."""
        code = self._exit_code(process.pid, 10.0)
        process.usable = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.sock.close()
        return code

    def new_store(self) -> int:
        """Port of a new, empty TCPStore."""
        send(self._hosts[0].sock, "new")
        return int(receive(self._hosts[0].sock))

    def close(self) -> None:
        """Kill all ranks and the server, remove all files."""
        with contextlib.suppress(OSError, EOFError):
            for process in self._ranks:
                self.discard(process)
        for process in (*self._ranks, *self._hosts):
            process.sock.close()
        self._control.close()
        self._server.kill()
        self._server.wait()
        self._log.close()
        if sys.exc_info()[0] is None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _fork(self, kind: str, n: int) -> list[_Process]:
        if not n:
            return []
        directories = [self.directory / f"{kind}-{next(self._numbers)}" for _ in range(n)]
        for directory in directories:
            directory.mkdir()
            (directory / "output").touch()  # the rank may be asked about before it has opened them
            (directory / "stacks").touch()
        send(self._control, {"kind": "fork", "roles": [{"kind": kind, "directory": str(d)} for d in directories]})
        pids = receive(self._control)
        _, fds, _, _ = socket.recv_fds(self._control, 1, n)
        return [
            _Process(pid, socket.socket(fileno=fd), directory)
            for pid, fd, directory in zip(pids, fds, directories, strict=True)
        ]

    def _exit_code(self, pid: int, timeout: float) -> int | None:
        send(self._control, {"kind": "exit_code", "pid": pid, "timeout": timeout})
        code = receive(self._control)
        return None if code is None else int(code)


class World:
    """``n`` processes with the environment of launched ranks, each in its slot.

    Args:
        crew: where the processes come from.
        n: how many ranks.
        fresh: use processes that have run nothing before.
    """

    def __init__(self, crew: Crew, n: int, fresh: bool = False) -> None:
        self.crew = crew
        self.size = n
        self._fresh = fresh

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` in every rank and return the results by slot.

        Args:
            fn: a function at module level (or a static one of a class there); it finds its slot in
                ``LIGHTNING_NTP_SLOT``.
            timeout: seconds until all ranks must have returned.
            env: more environment variables for this run.

        Raises:
            RankError: with the traceback of the first rank that failed, and the others' stacks where they hung.
        """
        return self.start(fn, *args, env=env, **kwargs).results(timeout)

    def start(self, fn: Callable[..., Any], *args: Any, env: dict[str, str] | None = None, **kwargs: Any) -> Run:
        """Like :meth:`run`, but return at once: for tests that kill or stop ranks meanwhile."""
        if self.crew.open_run is not None:
            raise RuntimeError("another run is still open on these processes: wait for it, or use a crew of your own")
        processes = self.crew.take(self.size, self._fresh)
        return Run(self.crew, processes, fn, args, kwargs, env or {})


class Run:
    """One call of a function in every rank of a world."""

    def __init__(
        self,
        crew: Crew,
        processes: list[_Process],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        env: dict[str, str],
    ) -> None:
        if isinstance(fn, partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        if "<" in fn.__qualname__ or fn.__module__ == "__main__":
            raise ValueError(f"{fn.__qualname__} cannot be found by name in another process: move it to module level")
        self.crew = crew
        self.job = uuid.uuid4().hex[:12]
        self.directory = crew.directory / f"run-{self.job}"
        """Working directory of all ranks; removed after the run."""
        self.directory.mkdir()
        self.outcomes = [Outcome(slot, process.pid) for slot, process in enumerate(processes)]
        self._processes = processes
        self._started = time.monotonic()
        self._finished = False
        self._deaths: _Deaths | None = None
        self._keep = False
        self._uids: list[str] = []
        arguments = pickle.dumps((args, kwargs))
        self.port = crew.new_store()
        """Port of this run's TCPStore on 127.0.0.1."""
        crew.open_run = self
        for slot, process in enumerate(processes):
            process.new_output()
            task = {
                "slot": slot,
                "module": fn.__module__,
                "file": fn.__code__.co_filename,
                "qualname": fn.__qualname__,
                "arguments": arguments,
                "sys_path": sys.path,
                "cwd": str(self.directory),
                "env": {**self._identity(slot), **env},
            }
            with contextlib.suppress(BrokenPipeError):  # then its outcome is "died"
                send(process.sock, task)

    def kill(self, slot: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank alone (not to its children)."""
        os.kill(self._processes[slot].pid, number)

    def survive(self, timeout: float = 60.0, grace: float = 5.0, keep: bool = False) -> list[Outcome]:
        """Like :meth:`wait`, for jobs that recover: deaths are announced to the survivors as a supervisor does it.

        A rank that dies does not shorten the time of the others; one that raises does.

        Args:
            keep: Processes that have returned are used again, although others have died: a test of their leaks.
        """
        self._keep = keep
        self._deaths = _Deaths(self.port, {o.slot: uid for o, uid in zip(self.outcomes, self._uids, strict=True)})
        for outcome in self.outcomes:
            self._deaths.watch.add(outcome.slot, outcome.pid)
        try:
            return self.wait(timeout, grace)
        finally:
            self._deaths.watch.close()

    def wait(self, timeout: float = 60.0, grace: float = 5.0) -> list[Outcome]:
        """Wait until every rank has answered or died and return what became of each; never raises for a rank.

        Args:
            timeout: seconds from the start of the run; ranks still running then are dumped and killed.
            grace: seconds that the others get after the first rank has failed (they usually hang in a collective).
        """
        if self._finished:
            return self.outcomes
        deadline = self._started + timeout
        try:
            open_slots = set(range(len(self._processes)))
            while open_slots and (left := deadline - time.monotonic()) > 0:
                sockets = {self._processes[slot].sock: slot for slot in open_slots}
                pause = left if self._deaths is None else min(left, LOOK_SECONDS)
                ready = select.select(list(sockets), [], [], pause)[0]
                if self._deaths is not None:
                    self._deaths.look()
                for sock in ready:
                    slot = sockets[sock]
                    open_slots.discard(slot)
                    if not self._collect(slot) and not (self._deaths and self.outcomes[slot].state == "died"):
                        deadline = min(deadline, time.monotonic() + grace)
            self._dump(open_slots)
        finally:
            self._finish()
        return self.outcomes

    def abandon(self) -> None:
        """Kill all ranks that have not answered. For a test that failed before it could wait."""
        if not self._finished:
            self._finish()

    def results(self, timeout: float = 60.0, grace: float = 5.0) -> list[Any]:
        """Results by slot. Raises :class:`RankError` unless every rank has returned."""
        outcomes = self.wait(timeout, grace)
        failed = [o for o in outcomes if o.state != "returned"]
        if not failed:
            return [o.value for o in outcomes]
        # Who raised or died comes first: a rank still running has mostly waited for that one.
        first = min(failed, key=lambda o: (o.state == "running", o.seconds))
        raise RankError(_report(first, outcomes, timeout), first, outcomes) from first.exception

    def _identity(self, slot: int) -> dict[str, str]:
        self._uids.append(f"{self.job}-{next(_incarnations)}")
        return {
            "LIGHTNING_NTP_STORE": f"127.0.0.1:{self.port}",
            "LIGHTNING_NTP_SLOT": str(slot),
            "LIGHTNING_NTP_UID": self._uids[slot],
            "LIGHTNING_NTP_JOB": self.job,
            "RANK": str(slot),
            "LOCAL_RANK": str(slot),
            "WORLD_SIZE": str(len(self.outcomes)),
            "LOCAL_WORLD_SIZE": str(len(self.outcomes)),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }

    def _collect(self, slot: int) -> bool:
        """Take a rank's answer; False if it failed."""
        outcome, process = self.outcomes[slot], self._processes[slot]
        outcome.seconds = time.monotonic() - self._started
        try:
            answer = receive(process.sock)
        except EOFError:
            outcome.state = "died"
            outcome.exit_code = self.crew.died(process)
            return False
        outcome.state = answer["state"]
        if answer["state"] == "returned":
            outcome.value = pickle.loads(answer["value"])
        else:
            outcome.error = answer["error"]
            outcome.exception = pickle.loads(answer["exception"])
        if answer["unclean"]:
            outcome.output += "".join(f"[harness] not clean after the run: {what}\n" for what in answer["unclean"])
            process.dirty = True
        return answer["state"] == "returned"

    def _dump(self, slots: set[int]) -> None:
        for slot in slots:
            self.kill(slot, DUMP_SIGNAL)
        for slot in slots:
            outcome, file = self.outcomes[slot], self._processes[slot].directory / "stacks"
            outcome.seconds = time.monotonic() - self._started
            outcome.stacks = _settled(file) or "(no stacks: the process is stopped, or in an uninterruptible call)"

    def _finish(self) -> None:
        failed = any(o.state != "returned" for o in self.outcomes)
        for outcome, process in zip(self.outcomes, self._processes, strict=True):
            with contextlib.suppress(OSError):
                outcome.output += process.new_output()
            # After a failure no process of this world is trusted to be clean.
            trusted = outcome.state == "returned" if self._keep else not failed
            if (process.dirty or not trusted) and process.usable:
                self.crew.discard(process)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.crew.open_run = None
        self._finished = True


class _Deaths:
    """Tells the survivors of deaths."""

    def __init__(self, port: int, uids: dict[int, str]) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._uids = uids
        self._told: set[int] = set()
        self.watch = ExitWatch()

    def look(self) -> None:
        for slot, how in self.watch.exiting().items():
            if slot not in self._told:
                self._told.add(slot)
                announce_death(self._store, self._uids[slot], slot, how or "killed")


def _settled(file: Path, timeout: float = 2.0) -> str:
    """Text of a file that another process is writing, once it has stopped growing."""
    deadline, size = time.monotonic() + timeout, -1
    while time.monotonic() < deadline:
        now = file.stat().st_size
        if now and now == size:
            break
        size = now
        time.sleep(0.05)
    return file.read_text(errors="replace")


def _report(first: Outcome, outcomes: list[Outcome], timeout: float) -> str:
    def lines() -> Iterator[str]:
        if first.state == "raised":
            yield f"rank in slot {first.slot} raised:\n\n{first.error}"
        elif first.state == "died":
            yield f"rank in slot {first.slot} died without an answer, exit code {first.exit_code}"
        else:
            running = [o.slot for o in outcomes if o.state == "running"]
            yield f"time-out after {timeout:g} s: the ranks in slots {running} did not return"
        for o in outcomes:
            yield f"--- slot {o.slot} (pid {o.pid}): {o.state} after {o.seconds:.1f} s"
            if o.state == "raised" and o is not first:
                yield o.error if o.error.splitlines()[-1:] != first.error.splitlines()[-1:] else "(the same error)"
            if o.stacks:
                yield o.stacks
            if o.output:
                yield f"output:\n{o.output[-_OUTPUT_SHOWN:]}"

    return "\n".join(lines())
