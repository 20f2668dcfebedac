"""The supervisor: owns the ranks of a job from start to end, and trains nothing itself."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_ntp.launch import hydra, jobs
from lightning_ntp.launch.call import Call, read_result, save_call
from lightning_ntp.launch.channel import Message
from lightning_ntp.launch.deaths import LOOK_SECONDS, Deaths
from lightning_ntp.launch.ending import Ending
from lightning_ntp.launch.environment import RankIdentity
from lightning_ntp.launch.heartbeat import Heartbeat
from lightning_ntp.launch.hosting import host_store
from lightning_ntp.launch.outcome import Failure, Outcome, RanksFailedError, exit_code, failure_of, find_cause
from lightning_ntp.launch.program import Program
from lightning_ntp.launch.relay import SignalRelay
from lightning_ntp.launch.report import Report, read_report
from lightning_ntp.launch.server_process import ServerProcess, exec_server, fork_server
from lightning_ntp.launch.stop import stop_mark

StartMethod = Literal["popen", "spawn", "fork"]

RESULT_LOST = "result lost"
"""Signature of the failure of a call whose ranks have all ended well but for the one that held the result."""

_TICK = 0.1
"""Seconds between looks at signals, reports and clocks."""


class Supervisor:
    """Runs a program, or a call, in ``ranks`` processes until all have ended.

    Args:
        ranks: how many processes, at least 1.
        start_method: ``"popen"``: every rank re-runs this script; ``"spawn"``: every rank gets ``call`` by pickle;
            ``"fork"``: ranks are forked out of this process and run ``call``.
        call: what to run, for the latter two.
        cold: start new interpreters instead of forking a warm one (``"popen"`` and ``"spawn"``).
        store_address: ``host:port`` of a TCPStore that somebody else hosts; ``None`` hosts one here.
        stop_grace: how long ranks may take to stop on SIGINT or SIGTERM before they are killed.
        failure_grace: how long the others may go on when one rank has failed, before they get SIGTERM.
        kill_grace: how long after that SIGTERM they get SIGKILL.
        heartbeat: a rank that recovers from deaths and shows no progress for so long, while others need it, is killed;
            ``None`` lets it hang.

    Raises:
        ValueError, TypeError: an argument is out of range.
        RuntimeError: CUDA is initialised, which forked processes cannot use (``"fork"``).
    """

    def __init__(
        self,
        ranks: int,
        start_method: StartMethod = "popen",
        call: Call | None = None,
        *,
        cold: bool = False,
        store_address: str | None = None,
        stop_grace: timedelta = timedelta(seconds=30),
        failure_grace: timedelta = timedelta(seconds=10),
        kill_grace: timedelta = timedelta(seconds=5),
        heartbeat: timedelta | None = None,
    ) -> None:
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ValueError(f"ranks={ranks!r}: give the number of processes to start, an integer of at least 1.")
        if start_method not in get_args(StartMethod):
            raise ValueError(f"start_method={start_method!r} is unknown; choose one of {get_args(StartMethod)}.")
        if (call is None) != (start_method == "popen"):
            raise TypeError(f'start_method={start_method!r}: "popen" re-runs the script, the others need a call.')
        for name, grace in (("stop_grace", stop_grace), ("failure_grace", failure_grace), ("kill_grace", kill_grace)):
            if grace < timedelta(0):
                raise ValueError(f"{name}={grace}: a time to wait cannot be negative.")
        if heartbeat is not None and heartbeat <= timedelta(0):
            raise ValueError(f"heartbeat={heartbeat}: give a time above 0, or None not to look for ranks that hang.")
        if start_method == "fork":
            _refuse_fork_after_cuda()
        self.ranks = ranks
        self.start_method: StartMethod = start_method
        self._call = call
        self._cold = cold
        self._store_address = store_address
        self._ending = Ending(ranks, stop_grace, failure_grace, kill_grace)
        self.job = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        self.store: Any = None
        """The TCPStore while :meth:`run` is running, if it is hosted here."""
        self.pids: dict[int, int] = {}
        """Slot -> process id of the ranks started so far."""
        self._relay = SignalRelay()
        self._codes: dict[int, int] = {}
        self._failures: list[Failure] = []
        self._reports: dict[int, Report] = {}
        self._incarnations = 0
        self._uids: dict[int, str] = {}
        self._deaths = Deaths(None, self._uids, lambda slot, how: None)
        self._died: list[Failure] = []
        self._heartbeat_limit = heartbeat
        self._heartbeat: Heartbeat | None = None

    def run(self) -> Outcome:
        """Start the ranks, wait until all have ended, and say how it went. Prints nothing.

        Raises:
            RuntimeError: there is no script to re-run, or a Hydra multirun would have to be.
            TypeError: the call cannot be pickled.
        """
        job_dir = Path(tempfile.mkdtemp(prefix=f"{jobs.PREFIX}{self.job}-"))
        try:
            with self._relay:
                server = self._start_server(job_dir)
                try:
                    self._start_ranks(server, job_dir)
                    self._watch(server, job_dir)
                finally:
                    server.end()
            return self._outcome(job_dir)
        finally:
            if self._heartbeat is not None:
                self._heartbeat.close()
            self._deaths.close()
            self.store = None
            shutil.rmtree(job_dir, ignore_errors=True)

    def kill(self, signum: int) -> None:
        """As if this process had received ``signum``: pass it on to the ranks."""
        self._relay.received(signum)

    def _start_server(self, job_dir: Path) -> ServerProcess:
        if self.start_method == "fork":
            assert self._call is not None
            return fork_server(self._call, job_dir)
        if self._call is None:
            program = Program.this_script(self._cold)
        else:
            save_call(self._call, job_dir / "call.pkl")
            program = Program.pickled_call(job_dir / "call.pkl", self._cold)
        # Made before a process exists, because a multirun raises.
        self._arguments = [hydra.overrides(slot) if self._call is None else [] for slot in range(self.ranks)]
        return exec_server(program, job_dir, self._base_environment())

    def _start_ranks(self, server: ServerProcess, job_dir: Path) -> None:
        # After the server: a fork of this process must not inherit the store's socket and thread.
        address = self._store_address or self._host_store()
        host, _, port = address.rpartition(":")
        self._deaths = Deaths(self.store, self._uids, lambda slot, how: self._cause_of_death(slot, how, job_dir))
        if self._heartbeat_limit is not None:
            self._heartbeat = Heartbeat(job_dir, self._heartbeat_limit, self._deaths, self.job)
        for slot in range(self.ranks):
            uid = f"{self.job}.{self._incarnations}"
            self._incarnations += 1
            self._uids[slot] = uid
            identity = RankIdentity(slot, self.ranks, uid, self.job, host, int(port), job_dir)
            environment = {**self._base_environment(), **identity.to_environ()}
            arguments = self._arguments[slot] if self.start_method == "popen" else []
            server.channel.send({"do": "start", "slot": slot, "environment": environment, "arguments": arguments})

    def _host_store(self) -> str:
        self.store = host_store()
        return f"127.0.0.1:{self.store.port}"

    def _base_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        # As many threads in all as there are cores; torch reads this when it is imported, in the server.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.ranks)))
        # A lost connection would be told in forty lines of C++; also read when torch is imported.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return environment

    def _watch(self, server: ServerProcess, job_dir: Path) -> None:
        with _short_collections():
            self._watch_ranks(server, job_dir)

    def _watch_ranks(self, server: ServerProcess, job_dir: Path) -> None:
        next_look = 0.0
        while len(self._codes) < self.ranks:
            recovers = self._deaths.expected
            ready, _, _ = select.select([server.channel], [], [], LOOK_SECONDS if recovers else _TICK)
            if recovers and not self._told_to_end:
                self._deaths.look()
            for message in server.channel.receive() if ready else []:
                self._hear(message, job_dir)
            if server.channel.closed:
                self._server_lost(server)
                return
            now = time.monotonic()
            if recovers and not ready and now < next_look:
                continue
            next_look = now + _TICK
            if recovers and self._heartbeat is not None and not self._told_to_end:
                self._end_if_stuck(self._heartbeat.look(), now)
            for slot in set(range(self.ranks)) - set(self._codes) - set(self._reports):
                self._look_for_report(slot, job_dir)
            for signum, to_ranks in self._relay.due(now):
                if not self.pids:
                    self._ending.stop(signum, now)
                    server.kill()  # none has started, and none shall
                    return
                if self._ending.stop_signal is None and to_ranks:
                    Path(stop_mark(job_dir)).touch()
                    server.channel.send({"do": "signal", "signum": signum})
                self._ending.stop(signum, now)
            due = self._ending.due(now)
            if due is not None:
                Path(stop_mark(job_dir)).touch()
                server.channel.send({"do": "signal", "signum": due})

    def _hear(self, message: Message, job_dir: Path) -> None:
        now = time.monotonic()
        if message["did"] == "started":
            self.pids[message["slot"]] = message["pid"]
            self._publish(job_dir)
            self._deaths.started(message["slot"], message["pid"])
        elif message["did"] == "signalled":
            self._relay.reached_ranks(message["signum"])
        elif message["did"] == "ended":
            slot, code = message["slot"], message["code"]
            self._codes[slot] = code
            self._publish(job_dir)
            self._look_for_report(slot, job_dir)
            report = self._reports.get(slot)
            failure = failure_of(slot, code, now, report)
            if failure is not None and (report is None or report.alone) and not self._told_to_end:
                self._deaths.ended(slot, failure.summary.removeprefix("killed by "))
            if slot in self._deaths.slots:
                if failure is not None:
                    self._died.append(failure)
                code = 0  # the others go on
            # A rank that ends because it was told to has not failed.
            elif failure is not None and not (self._told_to_end and (report is None or report.echo)):
                self._failures.append(failure)
            self._ending.ended(slot, code, now)

    def _publish(self, job_dir: Path) -> None:
        """Tell commands in other terminals who runs. They can do without it."""
        living = {slot: pid for slot, pid in self.pids.items() if slot not in self._codes}
        with contextlib.suppress(OSError):
            jobs.publish(job_dir, self.job, living)

    def _end_if_stuck(self, why: str, now: float) -> None:
        if why:
            self._failures.append(Failure(-1, f"The job cannot go on: {why}", 1, float("-inf"), signature="stuck"))
            self._ending.give_up(now)

    @property
    def _told_to_end(self) -> bool:
        return self._ending.pressed or self._ending.stop_signal is not None or self._relay.pending

    def _cause_of_death(self, slot: int, how: str, job_dir: Path) -> str | None:
        self._look_for_report(slot, job_dir)
        report = self._reports.get(slot)
        if report is None:
            return how
        return f"raised {report.summary[:200]}" if report.alone else None

    def _look_for_report(self, slot: int, job_dir: Path) -> None:
        report = read_report(job_dir, slot)
        if report is None:
            return
        known = self._reports.get(slot)
        self._reports[slot] = report
        if not report.alone:
            self._ending.raised(slot, time.monotonic())
        elif known is None or not known.alone:
            text = f"{report.text.rstrip()}\n(raised by slot {slot} alone, which leaves the job for it)\n"
            print(text, end="", file=sys.stderr, flush=True)

    def _server_lost(self, server: ServerProcess) -> None:
        code = server.end()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        text = f"The fork server, parent of all ranks, {how}; the ranks ended with it. The job cannot go on."
        self._failures.append(Failure(-1, text, 1, float("-inf"), signature="server"))

    def _outcome(self, job_dir: Path) -> Outcome:
        survivors = self._codes.keys() - self._deaths.slots
        if not survivors or self._failures and all(failure.echo for failure in self._failures):
            self._failures += self._died  # nobody was left to go on, or nobody could
        cause = find_cause(self._failures)
        for signum, _ in self._relay.due(float("inf")):  # all ranks ended of it before it was this loop's turn
            self._ending.stop(signum, time.monotonic())
        stop = self._ending.stop_signal
        forced = self._ending.forced or len(self._codes) < self.ranks
        result = None
        if self._call is not None and cause is None and any(self._codes[slot] == 0 for slot in survivors):
            try:
                result = read_result(job_dir)
            except FileNotFoundError:
                cause = self._result_lost() if stop is None else None
        code = exit_code({slot: self._codes[slot] for slot in survivors}, cause, stop, forced)
        return Outcome(self.ranks, code, dict(self._codes), tuple(self._failures), cause, stop, result)

    def _result_lost(self) -> Failure:
        slot = min(self._deaths.slots, default=0)
        text = (
            f"All work was done, but the result is lost: slot {slot} was to hand it over, and died when the others had"
            " ended already. What the ranks have written, checkpoints for instance, is whole."
        )
        self._failures.append(Failure(-1, text, 1, float("-inf"), signature=RESULT_LOST))
        return self._failures[-1]


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Keep Python's garbage collector away from what torch and Lightning have made.

    A full collection of that takes 0.2 s (measured; 0.7 s on a busy machine), in which no death would be noticed.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_script(ranks: int, **options: Any) -> int:
    """Re-run this script in ``ranks`` ranks, print the cause if they fail, and return the exit code to leave with.

    Args:
        options: keyword arguments of :class:`Supervisor`.
    """
    outcome = Supervisor(ranks, "popen", **options).run()
    if outcome.cause is not None:
        sys.stdout.flush()
        print(outcome.describe(), end="", file=sys.stderr, flush=True)
    return outcome.exit_code


def run_call(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    start_method: Literal["spawn", "fork"] = "spawn",
    **options: Any,
) -> Any:
    """Call ``function(*args)`` in ``ranks`` ranks and return what slot 0 returned.

    Args:
        options: keyword arguments of :class:`Supervisor`.

    Raises:
        RanksFailedError: it raised, or a rank died.
        KeyboardInterrupt, SystemExit: the job was stopped by a signal before it finished.
    """
    outcome = Supervisor(ranks, start_method, Call(function, args), **options).run()
    return result_of(outcome)


def result_of(outcome: Outcome) -> Any:
    """The result of a call, or the exception which says why there is none."""
    if outcome.exit_code == 0:
        return outcome.result
    if outcome.cause is None:
        if outcome.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(outcome.exit_code)
    raise RanksFailedError(outcome)


def _refuse_fork_after_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA is already initialised in this process, so ranks forked from it could not use it. Restart the"
            " kernel and start the job before anything touches the GPU: no .cuda(), no torch.cuda call except"
            " is_available() and device_count()."
        )
