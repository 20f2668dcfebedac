"""The one runtime of a rank: its part in the membership, its current generation and its lane.

A script may call ``fit`` and then ``test`` with another ``Trainer``: both work on the same process groups.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ntp.comm import backends, background
from lightning_ntp.comm.construction import Construction
from lightning_ntp.comm.generation import Generation
from lightning_ntp.comm.interruptible import InterruptibleGroup
from lightning_ntp.comm.interruption import Interrupted, Life
from lightning_ntp.comm.lane import Lane, make_lane
from lightning_ntp.comm.membership import Agreement, Membership
from lightning_ntp.comm.reaper import Reaper
from lightning_ntp.comm.store import StoreGuard, StoreLostError
from lightning_ntp.launch import progress
from lightning_ntp.launch.environment import JOB_DIR, UID
from lightning_ntp.launch.obituary import expect_deaths
from lightning_ntp.plan import Entry, Join, Roster, Topology
from lightning_ntp.plan.membership import Departure

_LAST_SECONDS = 11.0
"""For threads in C++ to come back at the end: a peer that has left no address is waited for 10 s. One that has, and
never connects, 50 s (torch 2.13), which is waited for by nobody: this process is long gone then."""
_TICK = 0.005
"""Seconds between looks at the store, beside the work."""
_SPARE_CONNECTIONS = 2
"""To the store: for the next generation, and for the one after if a peer dies while that is built."""


@dataclass(frozen=True)
class Recovery:
    """How a rank came into a new generation. All survivors of one generation get the same, but for :attr:`seconds`."""

    before: Topology
    """Of the generation that is over."""
    after: Topology
    """The new generation's."""
    lost: tuple[int, ...]
    """Slots of :attr:`before` that are gone; empty after a retry."""
    records: Mapping[int, dict[str, Any]]
    """What every survivor brought, by slot."""
    seconds: Mapping[str, float]
    """By phase: ``detect`` (the supervisor's notice to this rank's interruption; only for deaths), ``agree``,
    ``rebuild``. Repeated attempts are added up."""
    departures: tuple[Departure, ...]
    """How members went, from the start of the job."""
    attempts: int
    """Rounds it took: more than one if somebody died meanwhile."""


class Preparation:
    """A generation that is being built, and what is done beside the training meanwhile.

    Args:
        runtime: The rank's runtime.
        name: Of the new generation.
        after: The topology to come.
        slots: Who takes part: the members of now and of then.
        life: Ends it before its time.
        work: See :meth:`Runtime.prepare`.
        joins: Who joins; it comes to nothing if one of them is gone.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        after: Topology,
        slots: Sequence[int],
        life: Life,
        work: Callable[[dist.ProcessGroup], None],
        joins: Sequence[Join],
    ) -> None:
        self.joins = joins
        self._runtime, self.name, self._after, self._work = runtime, name, after, work
        self._slots, self._life, self._present = slots, life, runtime.generation
        self._dropped = False
        self._built: Generation | None = None
        self._ready = False
        self._group: InterruptibleGroup | None = None
        self._construction = Construction(self._run, runtime.membership.changed)

    def wait(self) -> None:
        """Wait until this rank's part is done.

        Raises:
            Interrupted: If the membership changes first.
            RuntimeError: If something else went wrong.
        """
        life = self._life
        if self._ready:
            return
        try:
            done = self._construction.wait(lambda: life.interrupted)
        except RuntimeError as error:
            if isinstance(error, Interrupted):
                raise
            raise life.explain(error) from error
        if done is None:
            raise Interrupted(f"a planned change was interrupted: {life.reason}")
        self._ready = True

    def take(self) -> Generation | None:
        """What was built; None for a rank that is no member of it."""
        built, self._built = self._built, None
        return built

    @property
    def group(self) -> InterruptibleGroup:
        """All who take part, once :meth:`wait` has returned."""
        assert self._group is not None
        return self._group

    def drop(self) -> list[Any]:
        """Let go of everything that is not taken, and return it for the reaper."""
        self._dropped = True
        self._construction.abandon()
        left = [] if self._group is None else [self._group.release()]
        self._group = None
        built = self.take()
        return [*left, built] if built is not None else left

    def _run(self) -> bool:
        runtime, present = self._runtime, self._present
        with progress.current().beside():
            self._wait_for_newcomers()
            self._group = present.make_group(f"{self.name}/travel", self._slots, self._life)
            if runtime.slot in self._after.slots:
                generation = runtime._generation(self.name, self._after, self._life.number)
                try:
                    generation.connect()
                except BaseException:
                    generation.release()
                    raise
                self._built = generation
                if self._dropped:
                    runtime._reaper.take(self.drop())
                    return False
            self._work(self._group)
        return True

    def _wait_for_newcomers(self) -> None:
        """Until all who join are ready to connect: they have to make room first."""
        missing = {join.slot for join in self.joins}
        while missing:
            missing = {slot for slot in missing if self._runtime.membership.find(_ready(self.name, slot)) is None}
            if self._dropped or self._life.interrupted:
                raise Interrupted(f"a planned change was interrupted: {self._life.reason}")
            time.sleep(_TICK if missing else 0.0)


class Runtime:
    """What a rank keeps across trainer calls.

    Attributes:
        generation: The current generation.
        lane: Runs gradient communication beside the backward pass.
    """

    def __init__(
        self,
        store: tuple[str, int],
        slot: int,
        uid: str,
        topology: Topology,
        backend: str,
        timeout: timedelta,
        device: torch.device,
        with_copies: bool = False,
        joins: bool = False,
    ) -> None:
        self.with_copies = with_copies
        self.joining = joins
        """Whether this process waits to become a member of a running job; alone until then."""
        self.slot, self.uid, self.backend, self.timeout, self.device = slot, uid, backend, timeout, device
        self.launched = topology
        self._pid = os.getpid()
        self._seconds: dict[str, float] = {}
        self._changes = 0
        self.farewell = ""
        """Why this rank leaves, if not because its work is done: what the others are told when it closes."""
        self.may_start: Callable[[str], None] = lambda group: None
        """Called before every collective, on any group; raises where none may start."""
        self.repeat: Callable[[str, Callable[[], Any]], Any] = lambda what, collective: collective()
        """Runs a named collective; once more if a membership change interrupts it, where that is possible."""
        backends.prepare_environment(backend)
        self._guard = StoreGuard(*store, timeout, f"lightning_ntp, slot {slot}")
        self._reaper = Reaper()
        self._current: Generation | None = None
        self.membership = Membership(self._guard, slot, uid, topology, self._abort)
        self.lane: Lane = make_lane(device)
        try:
            if joins:
                self._begin_alone()
            else:
                self._enter({})
        except BaseException:
            self.close()
            raise

    @property
    def generation(self) -> Generation:
        assert self._current is not None
        return self._current

    @property
    def interrupted(self) -> bool:
        """Whether the current generation is over: nothing collective works until :meth:`recover`. Costs nothing."""
        return self.generation.life.interrupted

    def serves(self, topology: Topology, backend: str, device: torch.device, with_copies: bool) -> bool:
        """Whether this is the runtime of a job that was launched so."""
        same = self.launched == topology and self.backend == backend and self.device == device
        return same and self.with_copies == with_copies

    def change(self, topology: Topology) -> None:
        """Enter a generation of other degrees, with the same slots. Collective over its members.

        Raises:
            RuntimeError: If it does not have the slots that are alive.
        """
        roster = self.membership.roster
        if topology.slots != roster.slots:
            raise RuntimeError(
                f"degrees {topology.degrees} need the slots {list(topology.slots)}, but the job has"
                f" {list(roster.slots)}: a trainer in the same script must use the same ranks"
            )
        self._leave_generation()
        self._changes += 1
        self.membership.rebase(topology)
        self.launched = topology
        while not self._build(f"{roster.commit}.{self._changes}", topology, roster.commit):
            self._enter({})

    def announce_recoverable(self) -> None:
        """From now on a rank that dies interrupts the others instead of ending the job: they call :meth:`recover`."""
        if self.membership.recoverable:  # asked in every step
            return
        self.membership.announce_recoverable()
        self._guard.stock(_SPARE_CONNECTIONS)

    def recover(self, record: dict[str, Any]) -> Recovery:
        """Enter the next generation with whoever lives. Collective over them; goes on by itself if more die meanwhile.

        Called after :class:`~lightning_ntp.comm.interruption.Interrupted`; without a reason it gives a new generation
        with the same members. Nothing is moved here. The lane may be another one afterwards.

        Args:
            record: What the other survivors shall know of this rank; must survive JSON.

        Raises:
            JobLost: If this rank was declared dead, a member does not join in time, or collectives fail again and
                again although nobody dies.
        """
        before, life = self.generation.topology, self.generation.life
        if not life.interrupted:
            life.interrupt("a recovery was asked for")
            self._abort(life)
        self._seconds = {}
        self._leave_generation()
        agreement, attempts = self._enter(record)
        after = self.generation.topology
        lost = tuple(slot for slot in before.slots if slot not in after.slots)
        # of a slot the last one: whoever was there before it is another matter
        deaths = {d.slot: d.at for d in agreement.roster.departures if d.kind == "dead" and d.slot in lost}
        first = min(deaths.values(), default=0.0)
        if 0 < first < life.interrupted_at:
            self._seconds["detect"] = life.interrupted_at - first
        return Recovery(
            before, after, lost, agreement.records, dict(self._seconds), agreement.roster.departures, attempts
        )

    def close(self, reason: str = "", others_go_on: bool = False) -> None:
        """Leave the job in good order.

        Args:
            reason: Why, if not because the work is done.
            others_go_on: The others are in the middle of something, and go on without this rank.
        """
        if self._pid != os.getpid():
            return  # a forked child, which is no rank
        progress.current().leave()
        self._guard.close()  # a store that is lost now is no news
        with suppress(StoreLostError):
            self.membership.leave(reason or self.farewell, others_go_on)
        self._leave_generation(reset=False)
        self.lane.close()
        self.membership.close()
        self._reaper.close()
        background.join_all(_LAST_SECONDS)
        self._guard.join()

    def _enter(self, record: dict[str, Any]) -> tuple[Agreement, int]:
        """Agree and build until both succeed."""
        attempts = 0
        while True:
            attempts += 1
            begun = time.monotonic()
            agreement = self.membership.agree(record, self.timeout)
            agreed = time.monotonic()
            roster = agreement.roster
            built = self._build(str(roster.commit), roster.topology, roster.commit)
            for phase, seconds in (("agree", agreed - begun), ("rebuild", time.monotonic() - agreed)):
                self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
            if built:
                return agreement, attempts

    def _build(self, name: str, topology: Topology, commit: int) -> bool:
        """Build and install a generation. False if the membership has changed meanwhile, or a group failed to build."""
        membership = self.membership
        generation = self._generation(name, topology, commit)

        def connect() -> Generation:
            try:
                generation.connect()
            except BaseException:
                generation.release()
                raise
            return generation

        try:
            built = Construction(connect, membership.changed).wait(lambda: membership.roster.change > commit)
        except RuntimeError as error:
            if not membership.recoverable:
                raise
            membership.retry(commit, str(error))
            return False
        if built is None or membership.roster.change > commit:
            self._reaper.take([generation])
            return False
        self._install(generation)
        return True

    def _generation(self, name: str, topology: Topology, commit: int) -> Generation:
        membership = self.membership
        return Generation(
            name,
            topology,
            self.slot,
            Life(commit, membership.explain, lambda group: self.may_start(group)),
            self._guard,
            self.backend,
            self.timeout,
            self.device,
            membership.changed,
            self.with_copies,
        )

    def _install(self, generation: Generation) -> None:
        generation.install()
        self._current = generation
        if self.membership.recoverable:
            self._guard.stock(_SPARE_CONNECTIONS)
        self.membership.watch(generation.life)

    # ---- planned changes --------------------------------------------------------------------------------------

    def prepare(
        self, after: Topology, work: Callable[[dist.ProcessGroup], None], joins: Sequence[Join] = ()
    ) -> Preparation:
        """Begin to build the generation of ``after`` beside the present one, which goes on. All members call it alike,
        and who joins calls :meth:`prepare_to_join`.

        Args:
            after: The topology to come.
            work: Called in a thread beside the training with a group, which nobody else uses, of all who are members
                now or then.
            joins: Who joins.
        """
        present = self.generation
        # one that was dropped has left its addresses in the store
        present.preparations += 1
        name = f"{present.name}.planned.{present.preparations}"
        slots, life = sorted({*present.topology.slots, *after.slots}), present.life
        if joins:
            # it may end alone, and the present generation goes on
            life = Life(life.number, partial(self.membership.explain_arrival, joins))
            self.membership.watch_arrival(life, joins)
        return Preparation(self, name, after, slots, life, work, joins)

    def prepare_to_join(
        self, name: str, number: int, before: Topology, after: Topology, work: Callable[[dist.ProcessGroup], None]
    ) -> Preparation:
        """As :meth:`prepare`, in a newcomer.

        Args:
            name: Of the generation to come, as the members call it.
            number: Of the members' present generation.
            before: Its topology.
            after: The topology to come.
            work: As in :meth:`prepare`.
        """
        life = Life(number, self.membership.explain_to_newcomer)
        self.membership.watch(life)
        self.membership.post(_ready(name, self.slot), "")
        return Preparation(self, name, after, sorted({*before.slots, *after.slots}), life, work, ())

    def let_go(self, prepared: Preparation) -> None:
        """Drop what :meth:`prepare` has built and nobody has taken."""
        self._reaper.take(prepared.drop())

    def switch(self, prepared: Preparation, change: Entry) -> Roster | None:
        """Agree that the prepared generation begins, at a moment when no collective is under way.

        Collective over all who take part; :meth:`enter` follows.

        Args:
            prepared: What :meth:`prepare` has begun.
            change: Who leaves or joins; its round is the number of the present generation.

        Returns:
            The roster of the new generation. None if it has come to nothing: all members must recover.

        Raises:
            JobLost: If a member does not come in time.
        """
        return self.membership.switch(change, prepared.name, self.timeout)

    def enter(self, prepared: Preparation, roster: Roster) -> None:
        """Leave the present generation for the prepared one. Local.

        Args:
            prepared: Agreed on by :meth:`switch`.
            roster: What that has returned.
        """
        generation = prepared.take()
        if generation is None:  # this rank is the one that leaves
            return
        generation.number = generation.life.number = roster.commit
        self._leave_generation()
        self.joining = False
        self._install(generation)

    def _begin_alone(self) -> None:
        """A newcomer is alone until it is a member: its collectives have nobody else in them."""
        launched = self.launched
        home = launched.place(self.slot)[0] if self.slot in launched.slots else 0  # a spare has none yet
        generation = self._generation(f"alone.{self.uid}", launched.alone(self.slot, home), 0)
        generation.connect()
        generation.install()
        self._current = generation
        self.membership.recoverable = True
        expect_deaths()

    def _leave_generation(self, reset: bool = True) -> None:
        generation = self._current
        if generation is None or generation.life.retired:
            return
        if reset:
            self.lane = self.lane.reset()
        generation.uninstall()
        if generation.life.interrupted and self.device.type == "cuda":
            backends.check_device(self.device)
        self._reaper.take(generation.release())

    def _abort(self, life: Life) -> None:
        """Wake whoever waits below Python, here and at the peers."""
        generation = self._current
        if generation is None or generation.life is not life:
            return
        groups = generation.plain_groups()

        def close() -> None:
            backends.abort(self.backend, groups)
            self._reaper.take(groups)  # these may be the last references

        # closing takes 10 ms a group; the membership thread must go on reading
        background.run("ntp-abort", close)


def _ready(name: str, slot: int) -> str:
    """Where a newcomer says that it is about to connect to the members for a planned change."""
    return f"ready/{name}/{slot}"


_current: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process, if it is a rank that has started."""
    return _current


def start(
    store: tuple[str, int],
    slot: int,
    topology: Topology,
    backend: str,
    timeout: timedelta,
    device: torch.device,
    uid: str | None = None,
    with_copies: bool = False,
    joins: bool = False,
) -> Runtime:
    """Start the runtime, or return the one that serves already. Collective over all slots of ``topology``.

    Args:
        store: Host and port of the supervisor's store.
        slot: This rank's slot.
        topology: The members at launch.
        backend: Process group backend.
        timeout: For every collective and for reaching the store.
        device: This rank's device.
        uid: This process's unique id; from the environment by default.
        with_copies: Whether generations have a group for neighbours' copies.
        joins: Whether this process joins a running job: it is alone until then, and nobody waits for it.

    Raises:
        RuntimeError: If process groups exist that were not made here.
        torch.distributed.DistNetworkError: If the store cannot be reached in time.
    """
    global _current
    if _current is not None and _current.serves(topology, backend, device, with_copies):
        return _current
    if _current is not None:
        _current.with_copies = with_copies
        _current.change(topology)
        return _current
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialized already, by someone else: lightning_ntp builds its own process groups,"
            " since they change when a rank is lost; remove the call of init_process_group"
        )
    job_dir = os.environ.get(JOB_DIR)
    progress.start(slot, Path(job_dir) if job_dir else None)
    uid = uid or os.environ.get(UID) or uuid.uuid4().hex
    _current = Runtime(store, slot, uid, topology, backend, timeout, device, with_copies, joins)
    # Runs at the interpreter's exit, and also where a forked rank leaves without that (atexit does not).
    Finalize(None, shutdown, exitpriority=100)
    return _current


def shutdown(reason: str = "", others_go_on: bool = False) -> None:
    """Leave the job and end the runtime of this process, if there is one.

    Args:
        reason: Why, if not because the work is done: what the others are told.
        others_go_on: See :meth:`Runtime.close`.
    """
    global _current
    runtime, _current = _current, None
    if runtime is not None:
        runtime.close(reason, others_go_on)
