"""A rank's part in the membership of its job: it follows the log, and agrees with the others on the next generation."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from lightning_ntp.comm.interruption import Interrupted, JobLost, Life
from lightning_ntp.comm.store import StoreGuard, StoreLostError
from lightning_ntp.launch import progress
from lightning_ntp.launch.log import (
    FINISHED,
    RECOVERABLE,
    Log,
    dismissed_key,
    entry_key,
    left_key,
    released_key,
)
from lightning_ntp.launch.obituary import expect_deaths
from lightning_ntp.plan import Entry, Join, Roster, Topology

_FOREVER = timedelta(hours=1)
_ECHO_SECONDS = 10.0
"""For an entry of our own to come back through the log."""
_PATIENCE_SECONDS = 3.0
"""A peer's connection closes before the log says that it died; by then the log has long said so."""
_VERDICT_SECONDS = 2.0
"""For the other ranks of a replica to raise the same: they are in the same step, and wait for each other in it."""
_MAX_RETRIES = 3
RAISED = "raised "
"""How the reason of who leaves with an exception begins."""
_RETRY_WINDOW_SECONDS = 120.0


@dataclass(frozen=True)
class Agreement:
    """What a round has agreed on."""

    roster: Roster
    """At the commit: its topology has the members, its commit names the generation."""
    records: dict[int, dict[str, Any]]
    """What every member brought, by slot."""


class Membership:
    """Follows the membership log in a thread of its own.

    Args:
        guard: Reaches the store.
        slot, uid: This rank's.
        start: The topology at launch.
        on_interrupt: Called in the following thread when the current generation is over.
    """

    def __init__(
        self, guard: StoreGuard, slot: int, uid: str, start: Topology, on_interrupt: Callable[[Life], None]
    ) -> None:
        self.slot, self.uid = slot, uid
        self.roster = Roster.launch(start)
        self.recoverable = False
        self.changed = threading.Condition()
        """Notified whenever the roster has changed."""
        self._guard = guard
        self._store = guard.client()
        self._log = Log(self._store)
        self._lock = threading.Lock()
        self._on_interrupt = on_interrupt
        self._life: Life | None = None
        self._arrival: tuple[Life, Sequence[Join]] | None = None
        self._left = False
        self._followed = guard.client()
        self._thread = threading.Thread(target=self._follow, name="ntp-membership", daemon=True)
        self._thread.start()

    # ---- the log ----------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        """Write into the log. From any thread."""
        with self._lock:
            self._guard.call(self._log.append, entry)

    def announce_recoverable(self) -> None:
        """Tell the supervisor that this rank goes on without a member that dies. It takes all of them to say so."""
        if self.recoverable:  # a newcomer is, from the start
            return
        self.recoverable = True
        expect_deaths()
        with self._lock:
            if self._guard.call(self._store.add, f"{RECOVERABLE}/count", 1) >= len(self.roster.start.slots):
                self._guard.call(self._store.set, RECOVERABLE, "1")

    def leave(self, reason: str, others_go_on: bool = False) -> None:
        """Tell everybody that this process goes in good order.

        Args:
            reason: Why, for the others.
            others_go_on: The others are in the middle of something: they are interrupted, and recover without it.
        """
        if self._left:
            return
        self._left = True
        with self._lock:
            self._guard.call(self._store.set, left_key(self.uid), (others_go_on and reason) or FINISHED)
        broken = self.roster.commit if others_go_on else 0
        self.append(Entry("left", self.slot, self.uid, reason, round=broken, at=time.monotonic()))

    def announce_released(self, reason: str) -> None:
        """Tell the supervisor that this process leaves healthy, so that it may be started again. Before it leaves."""
        self.post(released_key(self.uid), reason)

    def close(self) -> None:
        """End the thread. After :meth:`leave`, whose entry wakes it."""
        self._thread.join(5.0)

    def watch(self, life: Life) -> None:
        """Interrupt ``life`` when its generation is over; at once, if it is already."""
        with self.changed:
            self._life, self._arrival = life, None
            over = self.roster.broken > life.number
        if over:
            self._interrupt()

    def watch_arrival(self, life: Life, joins: Sequence[Join]) -> None:
        """Interrupt ``life`` when the current generation is over, or when one of those who are to join is gone."""
        with self.changed:
            self._arrival = life, joins
            present = self._life
            if present is not None and present.interrupted:
                life.interrupt(present.reason)
        self._end_arrival()

    def rebase(self, topology: Topology) -> None:
        """Give the live slots other places. Every member must do so between the same two rounds."""
        with self.changed:
            self.roster = replace(self.roster, start=topology, topology=topology)

    def why_over(self) -> str:
        """Why the current generation is over, for people."""
        with self.changed:
            return describe_end(self.roster)

    # ---- errors of collectives --------------------------------------------------------------------------------

    def explain(self, life: Life, error: RuntimeError) -> RuntimeError:
        """The error to raise when a collective failed: waits for the log to say who died.

        If nobody died and nobody left, a new generation is asked for, with the same members.
        """
        if not self.recoverable:
            return error

        def left() -> bool:
            return self.roster.broken <= life.number < self.roster.change

        with self.changed:
            self._wait_for(lambda: life.interrupted or life.retired or left(), _PATIENCE_SECONDS)
        if not (life.interrupted or life.retired):
            if left():  # whoever leaves in the middle has raised, and so shall we
                return error
            self.retry(life.number, str(error))
            with self.changed:
                self._wait_for(lambda: life.interrupted or life.retired, _ECHO_SECONDS)
        return Interrupted(f"a collective was interrupted: {life.reason or error}")

    def explain_arrival(self, joins: Sequence[Join], life: Life, error: RuntimeError) -> Interrupted:
        """As :meth:`explain`, for what only prepares for newcomers: if nobody is gone, it is they who are at fault."""
        with self.changed:
            self._wait_for(lambda: life.interrupted, _PATIENCE_SECONDS)
        if not life.interrupted:
            self.dismiss(joins, str(error))
            with self.changed:
                self._wait_for(lambda: life.interrupted, _ECHO_SECONDS)
        return Interrupted(f"a planned change was interrupted: {life.reason or error}")

    def explain_to_newcomer(self, life: Life, error: RuntimeError) -> RuntimeError:
        """As :meth:`explain`, in a process that is no member yet: it has nobody to ask for another generation."""
        with self.changed:
            self._wait_for(lambda: life.interrupted, _PATIENCE_SECONDS)
        return Interrupted(f"a planned change was interrupted: {life.reason}") if life.interrupted else error

    def dismiss(self, joins: Sequence[Join], why: str) -> None:
        """Do not let these processes in, which stand by: they are no members from here on, and end."""
        reason = why.splitlines()[0][:200] if why else "it did not come"
        for join in joins:
            self.post(dismissed_key(join.uid), reason)
            self.append(Entry("left", join.slot, join.uid, reason, at=time.monotonic()))

    def retry(self, generation: int, why: str) -> None:
        """Ask for a new generation with the same members."""
        reason = why.splitlines()[0][:200] if why else "asked for"
        self.append(Entry("retry", self.slot, self.uid, reason, round=generation, at=time.monotonic()))

    def stands_alone(self, signature: str, mates: Iterable[int]) -> bool:
        """Whose fault an exception is: that of this rank alone, or that of the program?

        The ranks of a replica run one program on one batch, so a mistake in it shows on all of them, and soon. A second
        rank that raises what one was given up for shows the same: a full disk, say, that every new rank 0 meets.

        Args:
            signature: Equal for what is raised at one place.
            mates: The live slots of this rank's replica.

        Returns:
            True if the others shall go on without this rank.
        """
        name = hashlib.sha1(signature.encode()).hexdigest()
        others = [slot for slot in mates if slot != self.slot]
        if not (self.recoverable and others):
            return False
        round_, deadline = self.roster.commit, time.monotonic() + _VERDICT_SECONDS
        with self._lock:
            self._guard.call(self._store.set, f"raised/{round_}/{self.slot}", name)
        keys = [f"raised/{round_}/{slot}" for slot in others]
        while time.monotonic() < deadline:
            with self._lock:
                if self._guard.call(self._store.check, keys):
                    if all(self._guard.call(self._store.get, key).decode() == name for key in keys):
                        return False
                    break
            time.sleep(0.02)
        with self._lock:
            return self._guard.call(self._store.add, f"given-up/{name}", 1) == 1

    # ---- notes ------------------------------------------------------------------------------------------------

    def post(self, key: str, content: str | bytes) -> None:
        """Leave a note for all ranks."""
        with self._lock:
            self._guard.call(self._store.set, key, content)

    def read(self, key: str) -> bytes:
        """A note of which this rank knows from elsewhere that it was posted."""
        with self._lock:
            return self._guard.call(self._store.get, key)

    def find(self, key: str) -> bytes | None:
        """A note, if it was posted."""
        with self._lock:
            there = self._guard.call(self._store.check, [key])
            return self._guard.call(self._store.get, key) if there else None

    def remove(self, key: str) -> None:
        """Take a note away, if it is there."""
        with self._lock:
            self._guard.call(self._store.delete_key, key)

    def count(self, key: str) -> int:
        """Add one to a number that all ranks share, and return it."""
        with self._lock:
            return self._guard.call(self._store.add, key, 1)

    # ---- planned changes --------------------------------------------------------------------------------------

    def switch(self, change: Entry, name: str, patience: timedelta) -> Roster | None:
        """Say that this rank is ready for the generation after a planned change, and wait for all others to be.

        Collective over the members, who leaves and who joins included. Interrupts nobody.

        Args:
            change: The ``switch`` entry that makes it.
            name: The same on all of them, and of no other change.
            patience: How long the others may take.

        Returns:
            The roster that begins with it; None if it has come to nothing, so that all recover: the membership has
            changed meanwhile, or a newcomer is gone.

        Raises:
            JobLost: If a member does not come in time.
        """
        before, joins = change.round, change.joins
        with self._lock:
            count = self._guard.call(self._store.add, f"switch/{name}", 1)
        if count >= len(self.roster.members) + len(joins):
            self.append(replace(change, at=time.monotonic()))

        def over() -> bool:
            roster = self.roster
            return max(roster.commit, roster.change) > before or not roster.stand_by(joins)

        with self.changed:
            if not progress.current().wait_for(self.changed, over, patience.total_seconds()):
                raise JobLost(f"not all ranks were ready for a planned change within {patience.total_seconds():g} s")
            roster = self.roster
        if roster.commit <= before:
            return None
        here = all(roster.members.get(join.slot) == join.uid for join in joins)
        return roster if here and change.slot not in roster.members else None

    # ---- joining ----------------------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """Tell the members that this process waits to join them."""
        self.append(Entry("standby", self.slot, self.uid, at=time.monotonic()))

    @property
    def is_member(self) -> bool:
        """Whether this process belongs to the job; a newcomer does not yet."""
        return self.roster.members.get(self.slot) in ("", self.uid)

    # ---- agreement --------------------------------------------------------------------------------------------

    def agree(self, record: dict[str, Any], limit: timedelta) -> Agreement:
        """Join rounds until one is committed. Collective over all members, however many die meanwhile.

        Args:
            record: What the others shall know of this rank; must survive JSON.
            limit: How long the others may take to join.

        Raises:
            JobLost: If this rank was declared dead, a member never joins, or generations keep failing.
        """
        joined: int | None = None
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            with self.changed:
                if joined is not None:
                    left = max(0.0, deadline - time.monotonic())
                    self._wait_for(lambda j=joined: self.roster.change != j or self.roster.settled, left)  # type: ignore[misc]
                roster = self.roster
            self._check(roster)
            if roster.settled and joined == roster.change:
                return Agreement(roster, self._records(joined, roster))
            if roster.settled:  # nothing is wrong, but we are asked to agree anew
                self.retry(roster.commit, str(record.get("why", "")))
                with self.changed:
                    self._wait_for(lambda r=roster: self.roster.change != r.change, _ECHO_SECONDS)  # type: ignore[misc]
            elif joined != roster.change:
                joined = roster.change
                self._join(joined, roster, record)
            if time.monotonic() > deadline:
                raise JobLost(f"slots {self._missing(roster)} did not join within {limit.total_seconds():g} s")

    def _check(self, roster: Roster) -> None:
        if roster.members.get(self.slot, "-") not in ("", self.uid):
            gone = [d for d in roster.departures if d.slot == self.slot]
            why = gone[-1].reason if gone else "unknown"
            raise JobLost(f"slot {self.slot} has been declared gone ({why}); the others go on without it")
        # what a rank raises alone counts as its death: who leaves with an exception has ended the job
        for departure in roster.departures:
            if departure.kind == "left" and departure.reason.startswith(RAISED):
                raise JobLost(f"slot {departure.slot} has raised what is told of it, and the job ends with that")
        recent = [entry for entry in roster.retries if entry.at > time.monotonic() - _RETRY_WINDOW_SECONDS]
        if len(recent) > _MAX_RETRIES:
            raise JobLost(
                f"collectives failed {len(recent)} times within {_RETRY_WINDOW_SECONDS:g} s although no rank has died;"
                f" the last time in slot {recent[-1].slot}: {recent[-1].reason}"
            )

    def _join(self, round_: int, roster: Roster, record: dict[str, Any]) -> None:
        with self._lock:
            self._guard.call(self._store.set, f"join/{round_}/{self.slot}", json.dumps(record))
            count = self._guard.call(self._store.add, f"join/{round_}/count", 1)
        if count >= len(roster.members):
            self.append(Entry("commit", self.slot, self.uid, round=round_, at=time.monotonic()))

    def _records(self, round_: int, roster: Roster) -> dict[int, dict[str, Any]]:
        keys = [f"join/{round_}/{slot}" for slot in roster.slots]
        with self._lock:
            values = self._guard.call(self._store.multi_get, keys)
        return {slot: json.loads(value) for slot, value in zip(roster.slots, values, strict=True)}

    def _wait_for(self, done: Callable[[], bool], seconds: float) -> None:
        progress.current().wait_for(self.changed, done, seconds)

    def _missing(self, roster: Roster) -> list[int]:
        with self._lock:
            return [
                slot
                for slot in roster.slots
                if not self._guard.call(self._store.check, [f"join/{roster.change}/{slot}"])
            ]

    # ---- following --------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while not self._apply(self._next(self.roster.position + 1)):
                pass
        except StoreLostError:
            return

    def _next(self, position: int) -> Entry:
        key = entry_key(position)
        while True:
            try:
                self._followed.wait([key], _FOREVER)
                break
            except RuntimeError as error:
                if "timeout" not in str(error).lower():
                    self._guard.lost(str(error))
        return Entry.decode(self._guard.call(self._followed.get, key))

    def _apply(self, entry: Entry) -> bool:
        """Take one entry in. True if it was our own farewell."""
        with self.changed:
            self.roster = self.roster.apply(entry)
            over = self._life is not None and self.roster.broken > self._life.number
            self.changed.notify_all()
        if over:
            self._interrupt()
        self._end_arrival()
        return entry.kind == "left" and entry.uid == self.uid

    def _interrupt(self) -> None:
        life = self._life
        if life is None or life.interrupted:
            return
        with self.changed:
            life.interrupt(describe_end(self.roster))
            self.changed.notify_all()
        self._on_interrupt(life)

    def _end_arrival(self) -> None:
        with self.changed:
            if self._arrival is None:
                return
            (arrival, joins), roster, present = self._arrival, self.roster, self._life
            joined = all(roster.members.get(join.slot) == join.uid for join in joins)
            if present is not None and present.interrupted:
                arrival.interrupt(present.reason)
            elif not joined and not roster.stand_by(joins):
                arrival.interrupt("a newcomer is gone")
            if arrival.interrupted or joined:
                self._arrival = None
            self.changed.notify_all()


def describe_end(roster: Roster) -> str:
    """Why the current generation is over, for people."""
    if roster.broken == roster.change and roster.retries:
        return f"slot {roster.retries[-1].slot} reported: {roster.retries[-1].reason}"
    gone = [d for d in roster.departures if d.slot in roster.topology.slots and d.slot not in roster.members]
    dead = [f"slot {d.slot} died ({d.reason})" for d in gone if d.kind == "dead"]
    return ", ".join(dead) or "the membership has changed"
