"""Slots, replicas and degrees: who is alive, under which tensor-parallel index.

A topology is a value; a membership change makes a new one. Nothing else in the package may keep a degree,
a rank or a world size beyond a generation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import SupportsIndex

from lightning_ntp.plan.layout import LayoutFamily


class TopologyError(ValueError):
    """The sizes asked for do not fit together."""


@dataclass(frozen=True)
class Relabel:
    """The member of ``slot`` takes another index: it fetches the units of ``new`` and its own are dealt out."""

    slot: int
    old: int
    new: int


@dataclass(frozen=True)
class Topology:
    """The live members of a job.

    Args:
        full_degree: The largest degree a replica can have.
        dropped: The agreed list of dropped indices, as far as some replica has used it.
        replicas: For every replica the live slots by tensor-parallel index. A replica that is gone is empty.
    """

    full_degree: int
    dropped: tuple[int, ...]
    replicas: tuple[Mapping[int, int], ...]

    @staticmethod
    def start(degrees: Sequence[int], full_degree: int | None = None) -> Topology:
        """The topology at launch: slots are counted through replica 0's indices, then replica 1's, and so on.

        Args:
            degrees: The degree of every replica, for example ``(4, 3)`` for seven slots.
            full_degree: The largest degree of the job; the largest of ``degrees`` by default.

        Raises:
            TopologyError: If there is no replica, a degree is not an integer of at least 1, or one is above the
                full degree.
        """
        degrees = as_degrees(degrees)
        full = max(degrees) if full_degree is None else as_size("full_degree", full_degree)
        if full < max(degrees):
            raise TopologyError(f"degrees={degrees}: {max(degrees)} is above the full degree {full}")
        dropped = tuple(range(full - 1, min(degrees) - 1, -1))
        replicas, slot = [], 0
        for degree in degrees:
            replicas.append({index: slot + index for index in range(degree)})
            slot += degree
        return Topology(full, dropped, tuple(replicas))

    @cached_property
    def family(self) -> LayoutFamily:
        return LayoutFamily(self.full_degree, self.dropped)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The degree of every replica, 0 for one that is gone."""
        return tuple(len(replica) for replica in self.replicas)

    @cached_property
    def live_replicas(self) -> tuple[int, ...]:
        return tuple(r for r, degree in enumerate(self.degrees) if degree)

    @cached_property
    def live_degrees(self) -> tuple[int, ...]:
        return tuple(degree for degree in self.degrees if degree)

    @cached_property
    def sync_indices(self) -> tuple[int, ...]:
        """The indices every live replica has: where gradients are all-reduced."""
        return self.family.indices(min(self.live_degrees))

    @cached_property
    def uniform(self) -> bool:
        return len(set(self.live_degrees)) == 1

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The live slots, ascending; a slot's rank is its position here."""
        return tuple(sorted(slot for replica in self.replicas for slot in replica.values()))

    @property
    def world_size(self) -> int:
        return len(self.slots)

    def rank(self, slot: int) -> int:
        """The rank of a live slot: dense over the live slots, so the lowest live slot is rank 0.

        Raises:
            TopologyError: If the slot is not alive.
        """
        self.place(slot)
        return self._ranks[slot]

    def place(self, slot: int) -> tuple[int, int]:
        """The (replica, index) of a live slot.

        Raises:
            TopologyError: If the slot is not alive.
        """
        if slot not in self._places:
            raise TopologyError(f"slot {slot} is not alive; live slots are {list(self.slots)}")
        return self._places[slot]

    def tensor_parallel_slots(self, replica: int) -> tuple[int, ...]:
        """The slots of a replica in order of their index."""
        members = self.replicas[replica]
        return tuple(members[index] for index in sorted(members))

    def data_parallel_slots(self, index: int) -> tuple[int, ...]:
        """The slots of equal index over the live replicas that have it, in order of the replica."""
        return tuple(self.replicas[r][index] for r in self.live_replicas if index in self.replicas[r])

    def lose(self, slots: Iterable[int]) -> tuple[Topology, tuple[Relabel, ...]]:
        """The topology after losing ``slots``, and which members change their index for it.

        The first loss appends its own index to the list of dropped indices: it moves exactly the lost units
        and relabels nobody. A later loss at another index relabels the member of the listed index: it moves
        less than ``(2 - 1/(d - 1)) N/d + 3`` of N units when the degree was d (:func:`plan_reshard` says why).

        Raises:
            TopologyError: If a slot is not alive or nobody is left.
        """
        lost = set(slots)
        for slot in sorted(lost):
            self.place(slot)
        # replicas that go whole first: they need no layout any more, so they must not fix which index is dropped
        topology = self._with(tuple({} if lost.issuperset(m.values()) else m for m in self.replicas))
        if not topology.slots:
            raise TopologyError(f"no slot is left after losing {sorted(lost)}")
        relabels: dict[int, Relabel] = {}
        for slot in sorted(lost.intersection(topology.slots)):
            topology = topology._lose_one(slot, relabels)
        return topology, tuple(r for s, r in sorted(relabels.items()) if s in topology._places)

    def _lose_one(self, slot: int, relabels: dict[int, Relabel]) -> Topology:
        replica, index = self.place(slot)
        members = dict(self.replicas[replica])
        step = self.full_degree - len(members)
        dropped = self.dropped if step < len(self.dropped) else (*self.dropped, index)
        listed = dropped[step]
        heir = members.pop(listed)
        if listed != index:
            members[index] = heir
            first = relabels.get(heir)
            relabels[heir] = Relabel(heir, first.old if first else listed, index)
        replicas = tuple(members if r == replica else m for r, m in enumerate(self.replicas))
        return replace(self, dropped=dropped, replicas=replicas)

    def join(self, replica: int, slot: int) -> Topology:
        """The topology after ``slot`` joins ``replica`` at the index that was dropped last.

        Raises:
            TopologyError: If there is no such replica, it is at its full degree, or the slot is alive already.
        """
        if replica not in range(len(self.replicas)):
            raise TopologyError(f"replica {replica!r} does not exist: there are {len(self.replicas)}, counted from 0")
        members = dict(self.replicas[replica])
        if slot in self._places:
            raise TopologyError(f"slot {slot} is alive already, in replica {self.place(slot)[0]}")
        if len(members) == self.full_degree:
            raise TopologyError(f"replica {replica} is at its full degree {self.full_degree} already")
        index = self.family.drop_order[self.full_degree - len(members) - 1]
        members[index] = slot
        return self._with(tuple(members if r == replica else m for r, m in enumerate(self.replicas)))

    def grow(self, joins: Mapping[int, int]) -> Topology:
        """The topology after several slots have joined.

        Args:
            joins: Slot -> replica.

        Raises:
            TopologyError: If a slot is alive, or a replica has no place for it.
        """
        topology = self
        for slot, replica in sorted(joins.items()):
            topology = topology.join(replica, slot)
        return topology

    def settled(self, start: Topology) -> Topology:
        """The same members at the indices that they had at launch, as far as their replicas have these now.

        Args:
            start: The topology at launch.
        """
        replicas: list[Mapping[int, int]] = []
        for replica, members in enumerate(self.replicas):
            homes = {
                i: slot for i, slot in start.replicas[replica].items() if i in members and slot in members.values()
            }
            others = {i: slot for i, slot in members.items() if slot not in homes.values()}
            # who has none stays where it is, unless that is somebody's home
            homes |= {i: slot for i, slot in others.items() if i not in homes}
            left = [slot for slot in others.values() if slot not in homes.values()]
            homes |= dict(zip(sorted(members.keys() - homes.keys()), left, strict=True))
            replicas.append(homes)
        return self._with(tuple(replicas))

    def alone(self, slot: int, replica: int) -> Topology:
        """A job of the same shape in which ``slot``, in ``replica``, is all that there is."""
        members = {self.family.indices(1)[0]: slot}
        return self._with(tuple(members if r == replica else {} for r in range(len(self.replicas))))

    def _with(self, replicas: tuple[Mapping[int, int], ...]) -> Topology:
        """The same job with these replicas: the list of dropped indices is fixed exactly as far as one of them uses it.

        What nobody uses is free again, so the first loss after a repair is cheap again; and what a replica that
        comes back at a low degree uses is fixed from then on.
        """
        used = max((self.full_degree - len(m) for m in replicas if m), default=0)
        return replace(self, dropped=self.family.drop_order[:used], replicas=replicas)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {slot: (r, index) for r, members in enumerate(self.replicas) for index, slot in members.items()}

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {slot: rank for rank, slot in enumerate(self.slots)}


def resolve_degrees(
    devices: int,
    nodes: int,
    tensor_parallel_size: int | str = "auto",
    data_parallel_size: int | str = "auto",
    degrees: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The degree of every replica from what the user gave.

    ``"auto"``: the tensor-parallel size is the number of devices per node when there are several nodes; on one
    node there are two replicas when the device count is even and at least 4, else one.

    Args:
        devices: Devices per node.
        nodes: Number of nodes.
        tensor_parallel_size: Degree of every replica, or ``"auto"``.
        data_parallel_size: Number of replicas, or ``"auto"``.
        degrees: The degree of every replica; excludes the other two.

    Raises:
        TopologyError: If a size is not an integer of at least 1, or the sizes do not multiply to the devices.
    """
    devices, nodes = as_size("devices", devices), as_size("nodes", nodes)
    total = devices * nodes
    there_are = f"there are {total} devices ({devices} per node x {nodes} nodes)"
    tp = None if _is_auto(tensor_parallel_size) else as_size("tensor_parallel_size", tensor_parallel_size, "'auto' or ")
    dp = None if _is_auto(data_parallel_size) else as_size("data_parallel_size", data_parallel_size, "'auto' or ")
    if degrees is not None:
        if tp is not None or dp is not None:
            raise TopologyError(
                "degrees names the degree of every replica; leave tensor_parallel_size and data_parallel_size at"
                f" 'auto' (got degrees={degrees!r}, tensor_parallel_size={tensor_parallel_size!r},"
                f" data_parallel_size={data_parallel_size!r})"
            )
        chosen = as_degrees(degrees)
        if sum(chosen) != total:
            raise TopologyError(
                f"degrees={chosen} need {sum(chosen)} devices but {there_are}: set devices={sum(chosen)} on one node"
                " or other degrees"
            )
        return chosen
    if tp is None and dp is None:
        if nodes > 1:
            tp = devices
        else:
            dp = 2 if devices >= 4 and devices % 2 == 0 else 1
    if tp is None:
        assert dp is not None
        if total % dp:
            raise TopologyError(
                f"data_parallel_size={dp} does not divide the devices: {there_are}; for replicas of different"
                " degrees use degrees=(...)"
            )
        tp = total // dp
    if dp is None:
        if total % tp:
            raise TopologyError(
                f"tensor_parallel_size={tp} does not divide the devices: {there_are}; for replicas of different"
                " degrees use degrees=(...)"
            )
        dp = total // tp
    if tp * dp != total:
        raise TopologyError(
            f"tensor_parallel_size={tp} x data_parallel_size={dp} is {tp * dp} but {there_are}; for replicas of"
            " different degrees use degrees=(...)"
        )
    return (tp,) * dp


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def as_degrees(degrees: object) -> tuple[int, ...]:
    """The degrees that the user gave.

    Raises:
        TopologyError: If it is no list of integers of at least 1.
    """
    if isinstance(degrees, str | bytes) or not isinstance(degrees, Iterable):
        raise TopologyError(f"degrees={degrees!r} must name the degree of every replica, for example (4, 3)")
    given = tuple(degrees)
    if not given:
        raise TopologyError("degrees is empty: name the tensor-parallel degree of at least one replica")
    return tuple(as_size(f"degrees={given}: element {k}", degree) for k, degree in enumerate(given))


def as_size(name: str, value: object, or_else: str = "") -> int:
    """A size that the user gave, as an integer: whole floats and NumPy's integers are taken too.

    Args:
        name: How the user calls it; opens the error.
        value: What was given.
        or_else: What else would be allowed, for the error, for example ``"'auto' or "``.

    Raises:
        TopologyError: If it is not an integer of at least 1.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # YAML and arithmetic give 4.0
    if isinstance(value, SupportsIndex) and not type(value).__name__.startswith("bool"):
        value = operator.index(value)  # NumPy's integers, but not its bool, which was one too before NumPy 2.4
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TopologyError(f"{name}={value!r} is not {or_else}an integer of at least 1")
    return value
