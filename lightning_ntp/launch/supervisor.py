"""The supervisor: owns the ranks of a job from start to end, and trains nothing itself."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_ntp.launch import hydra, jobs
from lightning_ntp.launch.call import Call, read_result, save_call
from lightning_ntp.launch.channel import Message
from lightning_ntp.launch.console import say
from lightning_ntp.launch.deaths import LOOK_SECONDS, Deaths
from lightning_ntp.launch.device_watch import DeviceWatch
from lightning_ntp.launch.ending import Ending
from lightning_ntp.launch.environment import RankIdentity
from lightning_ntp.launch.heartbeat import Heartbeat
from lightning_ntp.launch.hosting import host_store
from lightning_ntp.launch.newcomers import REFUSED, Newcomers
from lightning_ntp.launch.outcome import Failure, Outcome, exit_code, failure_of, find_cause
from lightning_ntp.launch.program import Program
from lightning_ntp.launch.relay import SignalRelay
from lightning_ntp.launch.report import Report, read_report, report_path
from lightning_ntp.launch.restarts import MayRestart, Restarts
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
        max_restarts: how often each slot is started again when its rank has died and the others go on.
        restart_backoff: before the first restart of a slot; doubled for each further one, up to a minute.
        may_restart: asked before each restart, in a thread, whether the slot's device is fit for it: False, or a text
            that says why not, forbids it, and it is asked again after the backoff. A demand of a person's is not asked
            for (``lightning-ntp restart``).
        spares: so many more processes start as newcomers, in slots of their own, and wait for a place.
        watch: watches the devices: says whose rank is to end, and whose may start again.

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
        max_restarts: int = 0,
        restart_backoff: timedelta = timedelta(seconds=1),
        may_restart: MayRestart | None = None,
        spares: int = 0,
        watch: DeviceWatch | None = None,
    ) -> None:
        if not isinstance(spares, int) or isinstance(spares, bool) or spares < 0:
            raise ValueError(f"spares={spares!r}: give how many processes wait for a loss, 0 for none.")
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
        self.ranks = ranks + spares
        self._members = ranks
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
        self._device_watch = watch
        self._restarts = Restarts(max_restarts, restart_backoff, _all_allow(watch, may_restart))
        self._newcomers = Newcomers(Path())
        self._former_codes: dict[int, int] = {}
        """How the last member ended, of the slots in which a newcomer runs."""
        self._left: set[int] = set()
        """Slots whose last member has left in good order, and the others went on."""
        self._finished = False
        """A rank is through with the script: nobody can join any more."""
        self._shown: set[tuple[int, str]] = set()

    def run(self) -> Outcome:
        """Start the ranks, wait until all have ended, and say how it went. Prints nothing.

        Raises:
            RuntimeError: there is no script to re-run, or a Hydra multirun would have to be.
            TypeError: the call cannot be pickled.
        """
        watch = self._device_watch
        if watch is not None:
            watch.check(self.ranks)
        job_dir = Path(tempfile.mkdtemp(prefix=f"{jobs.PREFIX}{self.job}-"))
        try:
            with self._relay:
                server = self._start_server(job_dir)
                try:
                    if watch is not None:  # after the server: it may be forked, and threads do not survive that
                        watch.begin(job_dir)
                    self._start_ranks(server, job_dir)
                    self._watch(server, job_dir)
                finally:
                    server.end()
            return self._outcome(job_dir)
        finally:
            if watch is not None:
                watch.close()
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
        self._store_host, self._store_port = host, int(port)
        self._newcomers = Newcomers(job_dir)
        self._deaths = Deaths(
            self.store, self._uids, lambda slot, how: self._cause_of_death(slot, how, job_dir), self._newcomers
        )
        if self._heartbeat_limit is not None:
            self._heartbeat = Heartbeat(job_dir, self._heartbeat_limit, self._deaths, self.job)
        for slot in range(self._members):
            self._start(server, job_dir, slot)
        for slot in range(self._members, self.ranks):
            # as if it had left in good order before
            self._codes[slot] = 0
            self._left.add(slot)
            self._start_newcomer(server, job_dir, slot)

    def _start(self, server: ServerProcess, job_dir: Path, slot: int, joins: bool = False) -> None:
        uid = f"{self.job}.{self._incarnations}"
        self._incarnations += 1
        self._uids[slot] = uid
        identity = RankIdentity(slot, self.ranks, uid, self.job, self._store_host, self._store_port, job_dir, joins)
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
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self._members)))
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
            self._look_for_joined()
            self._end_if_watch_fails()
            if recovers and not self._told_to_end:
                self._deaths.look()
                if self._device_watch is not None:
                    for slot, why in self._device_watch.condemned().items():
                        self._deaths.kill(slot, why)
                    for slot, why in self._device_watch.leaving().items():
                        if slot in self._newcomers:  # or a sick spare would take the place of the next who dies
                            self._deaths.kill(slot, why)
            for message in server.channel.receive() if ready else []:
                self._hear(message, job_dir)
            if server.channel.closed:
                self._server_lost(server)
                return
            now = time.monotonic()
            if recovers and not ready and now < next_look:
                continue
            next_look = now + _TICK
            if recovers:
                self._deaths.end_dismissed()
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
            if recovers:
                self._start_again(server, job_dir, now)

    def _hear(self, message: Message, job_dir: Path) -> None:
        now = time.monotonic()
        if message["did"] == "started":
            self.pids[message["slot"]] = message["pid"]
            jobs.restart_demand(job_dir, message["slot"]).unlink(missing_ok=True)
            self._publish(job_dir)
            self._deaths.started(message["slot"], message["pid"])
            if self._device_watch is not None:
                self._device_watch.started(message["slot"])
        elif message["did"] == "signalled":
            self._relay.reached_ranks(message["signum"])
        elif message["did"] == "ended":
            slot, code = message["slot"], message["code"]
            self._look_for_joined()
            self._look_for_report(slot, job_dir)
            if self._device_watch is not None:
                self._device_watch.ended(slot)
            if slot in self._newcomers:
                self._newcomer_ended(slot, code, now)
            else:
                self._member_ended(slot, code, now, job_dir)
            self._publish(job_dir)

    def _member_ended(self, slot: int, code: int, now: float, job_dir: Path) -> None:
        self._codes[slot] = code
        report = self._reports.get(slot)
        failure = failure_of(slot, code, now, report)
        if (failure is None or report is None or report.alone) and not self._told_to_end:
            self._deaths.ended(slot, "exit code 0" if failure is None else failure.summary.removeprefix("killed by "))
        comes_back = False
        if slot in self._deaths.slots:
            if failure is not None:
                self._died.append(failure)
            code = 0  # the others go on
            comes_back = not jobs.leave_reason(job_dir, slot).exists()
        elif failure is not None:
            # A rank that ends because it was told to has not failed.
            if not (self._told_to_end and (report is None or report.echo)):
                self._failures.append(failure)
        elif self._deaths.left_early(slot):
            self._left.add(slot)
            comes_back = self._deaths.was_released(slot) or self._was_sent_away(slot)
        else:
            self._finished = True
        self._ending.ended(slot, code, now)
        if comes_back and self._goes_on:
            self._restarts.gone(slot, now)

    def _was_sent_away(self, slot: int) -> bool:
        return self._device_watch is not None and self._device_watch.sent_away(slot)

    def _newcomer_ended(self, slot: int, code: int, now: float) -> None:
        """Nobody needs it: the job is as if it had never been started."""
        failure = failure_of(slot, code, now, self._reports.get(slot))
        why = self._deaths.why_killed(slot) or ("exit code 0" if failure is None else failure.summary)
        self._deaths.ended(slot, why.removeprefix("killed by "))
        self._newcomers.discard(slot)
        self._codes[slot] = self._former_codes.pop(slot)
        self._ending.came_to_nothing(slot)
        if not self._goes_on:
            return
        who = f"slot {slot} (pid {self.pids[slot]})" if slot in self.pids else f"slot {slot}"
        if code == REFUSED:
            why = f"the job does not take it; it is not started again unless `lightning-ntp restart {slot}` demands it"
        say(f"{who} has ended before it had joined: {why}")
        if code not in (0, REFUSED):
            self._restarts.gone(slot, now)

    def _look_for_joined(self) -> None:
        for slot in self._newcomers.joined():
            if self._deaths.pid(slot) is None:
                continue  # it was seen to die before it was seen to have joined, and said to have died as a newcomer
            self._newcomers.discard(slot)
            self._ending.joined(slot)
            del self._former_codes[slot]
            self._left.discard(slot)
            self._deaths.slots.discard(slot)
            self._died = [failure for failure in self._died if failure.slot != slot]

    @property
    def _goes_on(self) -> bool:
        """Somebody is at work whom a newcomer could join."""
        return not (self._told_to_end or self._ending.begun or self._finished)

    def _start_again(self, server: ServerProcess, job_dir: Path, now: float) -> None:
        """Start newcomers: those that are due, and those that a person has demanded."""
        for slot in [slot for slot in self._codes if jobs.restart_demand(job_dir, slot).exists()]:
            jobs.restart_demand(job_dir, slot).unlink(missing_ok=True)
            if self._goes_on:
                self._restarts.demanded(slot)
                if self._device_watch is not None:
                    self._device_watch.pardon(slot)
                say(f"slot {slot} is started again, on demand")
                self._start_newcomer(server, job_dir, slot)
            else:
                say(f"slot {slot} is not started again: the job is ending")
        for slot in self._restarts.due(now) if self._goes_on else []:
            self._start_newcomer(server, job_dir, slot)

    def _start_newcomer(self, server: ServerProcess, job_dir: Path, slot: int) -> None:
        self._former_codes[slot] = self._codes.pop(slot)
        self.pids.pop(slot, None)
        self._reports.pop(slot, None)
        self._deaths.replaced(slot)
        if self._heartbeat is not None:
            self._heartbeat.forget(slot)
        for path in (report_path(job_dir, slot), jobs.leave_reason(job_dir, slot)):
            path.unlink(missing_ok=True)
        self._start(server, job_dir, slot, joins=True)
        self._newcomers.add(slot, self._uids[slot])
        self._ending.came(slot)

    def _publish(self, job_dir: Path) -> None:
        """Tell commands in other terminals who runs. They can do without it."""
        living = {slot: pid for slot, pid in self.pids.items() if slot not in self._codes}
        with contextlib.suppress(OSError):
            jobs.publish(job_dir, self.job, self.ranks, living)

    def _end_if_stuck(self, why: str, now: float) -> None:
        if why:
            self._failures.append(Failure(-1, f"The job cannot go on: {why}", 1, float("-inf"), signature="stuck"))
            self._ending.give_up(now)

    def _end_if_watch_fails(self) -> None:
        if self._device_watch is None or self._told_to_end or self._failures:
            return
        if why := self._device_watch.failed():
            self._failures.append(Failure(-1, f"The job ends: {why}", 1, float("-inf"), signature="watch"))
            self._ending.give_up(time.monotonic())

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
            self._show(report, slot)

    def _show(self, report: Report, slot: int) -> None:
        who = f"slot {slot} alone, which leaves the job for it"
        if slot in self._newcomers:
            if (slot, report.signature) in self._shown or not self._goes_on:
                return  # the attempt before has come to the same, or nobody wants to know any more
            self._shown.add((slot, report.signature))
            who = f"slot {slot}, which has not joined the job yet"
        with contextlib.suppress(OSError):  # nobody reads any more
            print(f"{report.text.rstrip()}\n(raised by {who})", file=sys.stderr, flush=True)

    def _server_lost(self, server: ServerProcess) -> None:
        code = server.end()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        text = f"The fork server, parent of all ranks, {how}; the ranks ended with it. The job cannot go on."
        self._failures.append(Failure(-1, text, 1, float("-inf"), signature="server"))

    def _outcome(self, job_dir: Path) -> Outcome:
        survivors = self._codes.keys() - self._deaths.slots - self._left
        if not survivors or self._failures and all(failure.echo for failure in self._failures):
            self._failures += self._died  # nobody was left to go on, or nobody could
        for signum, _ in self._relay.due(float("inf")):  # all ranks ended of it before it was this loop's turn
            self._ending.stop(signum, time.monotonic())
        stop = self._ending.stop_signal
        if self._codes and self._left.issuperset(self._codes) and not self._failures and stop is None:
            text = "All ranks have left as they were told to, and nobody is there to finish the job."
            self._failures.append(Failure(-1, text, 1, float("-inf"), signature="deserted"))
        cause = find_cause(self._failures)
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


def _all_allow(watch: DeviceWatch | None, may_restart: MayRestart | None) -> MayRestart | None:
    """Asks the watch first, then the user."""
    if watch is None:
        return may_restart
    return lambda slot: watch.unfit(slot) or (may_restart(slot) if may_restart is not None else True)


def _refuse_fork_after_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA is already initialised in this process, so ranks forked from it could not use it. Restart the"
            " kernel and start the job before anything touches the GPU: no .cuda(), no torch.cuda call except"
            " is_available() and device_count()."
        )
