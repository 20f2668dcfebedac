"""Who belongs to a job: a pure function of its membership log.

The log is a gap-free list of entries. Every rank folds the same prefix to the same :class:`Roster`, so nothing about
membership is ever negotiated: an entry is in the log or it is not.

A *round* collects one join record from every member. It is named after the position of the last entry that changed who
must join (:attr:`Roster.change`), and it is over when a ``commit`` entry for it is in the log. A change in between
starts another round, and a commit for the old one then counts for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal

from lightning_ntp.plan.topology import Topology, TopologyError

Kind = Literal["dead", "left", "standby", "retry", "commit", "switch"]


@dataclass(frozen=True)
class Join:
    """Where a process that stands by is to work."""

    slot: int
    uid: str
    replica: int


@dataclass(frozen=True)
class Entry:
    """One line of the membership log."""

    kind: Kind
    slot: int = -1
    """``dead``, ``left``, ``standby``: whose. ``switch``: who leaves with it; -1 if nobody does."""
    uid: str = ""
    """Of the process in that slot; a ``dead`` entry for an earlier incarnation changes nothing."""
    reason: str = ""
    """For people: "SIGKILL", "finished", the error behind a retry."""
    round: int = 0
    """``commit``: the round that everybody has joined. ``retry``: the commit of the generation that failed. ``left``:
    the commit of the generation that ends with it; 0 if nobody waits for who leaves. ``switch``: the commit of the
    generation in which everybody is ready for the next one."""
    at: float = 0.0
    """``time.monotonic()`` of the writer, in seconds: comparable on one machine."""
    nonce: str = ""
    """Makes equal entries of two writers different, so that a writer knows its own."""
    joins: tuple[Join, ...] = ()
    """``switch``: who joins with it."""
    settles: bool = False
    """``switch``: whether all go back to their places of the launch; nobody leaves or joins."""

    def encode(self) -> str:
        """The entry as one line of JSON."""
        return json.dumps({k: v for k, v in asdict(self).items() if v != _DEFAULTS[k]}, sort_keys=True)

    @staticmethod
    def decode(text: str | bytes) -> Entry:
        """The inverse of :meth:`encode`."""
        fields = json.loads(text)
        fields["joins"] = tuple(Join(**join) for join in fields.get("joins", ()))
        return Entry(**fields)


_DEFAULTS = asdict(Entry("dead"))
_DEFAULTS["kind"] = ""


@dataclass(frozen=True)
class Departure:
    """How a member went."""

    slot: int
    uid: str
    kind: Kind
    """``dead`` or ``left``."""
    reason: str
    at: float


@dataclass(frozen=True)
class Roster:
    """The members of a job after some prefix of its log."""

    start: Topology
    """The topology at launch: it says which replica a slot belongs to."""
    topology: Topology
    """Of the newest commit: the slots of the current generation, dead ones included."""
    members: Mapping[int, str]
    """Live slots and the uids of their processes; the uid is empty for the process that was there at launch."""
    standby: Mapping[int, str] = field(default_factory=dict)
    """Slots whose new process waits to join."""
    position: int = 0
    """Number of entries seen."""
    change: int = 0
    """Position of the newest entry that changed who must join a round: the name of the round."""
    broken: int = -1
    """Position of the newest entry that ends the current generation's collectives."""
    commit: int = -1
    """Position of the newest valid commit, which names the generation; -1 before the first."""
    departures: tuple[Departure, ...] = ()
    """All members that went, in order."""
    retries: tuple[Entry, ...] = ()
    """Retries since a member last went: generations that failed although everybody lived."""
    deserted: int = -1
    """Position of the newest entry by which somebody who waited to join was gone."""

    @staticmethod
    def launch(topology: Topology) -> Roster:
        """The roster before the first entry: all slots are members, and round 0 is open."""
        return Roster(topology, topology, dict.fromkeys(topology.slots, ""))

    @property
    def settled(self) -> bool:
        """Whether the current generation is what the log asks for."""
        return self.commit > self.change

    @property
    def interrupted(self) -> bool:
        """Whether collectives of the current generation must end."""
        return self.broken > self.commit

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Live slots, ascending."""
        return tuple(sorted(self.members))

    def departed_since(self, count: int) -> tuple[Departure, ...]:
        """The departures after the first ``count``."""
        return self.departures[count:]

    def apply(self, entry: Entry) -> Roster:
        """The roster after one more entry. Entries that make no sense here change nothing but the position."""
        here = self.position + 1
        seen = replace(self, position=here)
        if entry.kind in ("dead", "left"):
            return self._without(entry, seen)
        if entry.kind == "standby":
            if entry.slot in self.members:
                return seen
            return replace(seen, standby={**self.standby, entry.slot: entry.uid})
        if entry.kind == "retry":
            # Every survivor may ask; the first one is enough.
            if entry.round != self.commit or self.commit < 0 or self.interrupted:
                return seen
            # who was about to join and is gone has cost the generation, whose members are healthy
            retries = self.retries if self.deserted > self.commit else (*self.retries, entry)
            return replace(seen, change=here, broken=here, retries=retries)
        if entry.kind == "switch":
            return self._switched(entry, seen)
        if entry.kind == "commit":
            if entry.round != self.change or self.settled or not self.members:
                return seen
            return replace(seen, commit=here, topology=self._next_topology())
        return seen

    def _without(self, entry: Entry, seen: Roster) -> Roster:
        if self.standby.get(entry.slot) == entry.uid and entry.slot in self.standby:
            waiting = {slot: uid for slot, uid in self.standby.items() if slot != entry.slot}
            return replace(seen, standby=waiting, deserted=seen.position)
        if entry.slot not in self.members or self.members[entry.slot] not in ("", entry.uid):
            return seen
        return replace(
            seen,
            members={slot: uid for slot, uid in self.members.items() if slot != entry.slot},
            change=seen.position,
            # who leaves at the end has finished its collectives; nobody needs to be woken
            broken=seen.position if entry.kind == "dead" or entry.round else self.broken,
            departures=(*self.departures, Departure(entry.slot, entry.uid, entry.kind, entry.reason, entry.at)),
            retries=(),
        )

    def _switched(self, entry: Entry, seen: Roster) -> Roster:
        """A planned change, which interrupts nobody: all members had said that they are ready for it.

        Void if anything has changed since: then the members are those of before, and recover together.
        """
        if entry.round != self.commit or not self.settled:
            return seen
        if entry.settles:
            return replace(seen, commit=seen.position, topology=self.topology.settled(self.start))
        if entry.joins:
            return self._joined(entry.joins, seen)
        uid = self.members.get(entry.slot)
        if uid is None or uid not in ("", entry.uid):
            return seen
        return replace(
            seen,
            members={slot: each for slot, each in self.members.items() if slot != entry.slot},
            commit=seen.position,
            topology=self.topology.lose([entry.slot])[0],
            departures=(*self.departures, Departure(entry.slot, entry.uid, "left", entry.reason, entry.at)),
        )

    def _joined(self, joins: Sequence[Join], seen: Roster) -> Roster:
        if not self.stand_by(joins):
            return seen
        new = {join.slot: join.uid for join in joins}
        try:
            topology = self.topology.grow({join.slot: join.replica for join in joins})
        except TopologyError:  # somebody else has the place
            return seen
        return replace(
            seen,
            members={**self.members, **new},
            standby={slot: uid for slot, uid in self.standby.items() if slot not in new},
            commit=seen.position,
            topology=topology,
        )

    def stand_by(self, joins: Iterable[Join]) -> bool:
        """Whether these processes all wait to join."""
        return all(self.standby.get(join.slot) == join.uid for join in joins)

    def _next_topology(self) -> Topology:
        gone = [slot for slot in self.topology.slots if slot not in self.members]
        return self.topology.lose(gone)[0] if gone else self.topology


def fold(start: Topology, entries: Iterable[Entry]) -> Roster:
    """The roster after ``entries``."""
    roster = Roster.launch(start)
    for entry in entries:
        roster = roster.apply(entry)
    return roster
