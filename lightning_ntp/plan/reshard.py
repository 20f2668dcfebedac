"""What moves over the wire when the members of a job change: from one topology to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_ntp.plan.exchange import Exchange, Pieces, least_loaded, stretch
from lightning_ntp.plan.layout import Layout
from lightning_ntp.plan.sharding import Sharding
from lightning_ntp.plan.topology import Topology, TopologyError


def plan_reshard(before: Topology, after: Topology, sharding: Sharding, gone: Iterable[int] | None = None) -> Exchange:
    """Plan how the members of ``after`` come by what they hold, for one parameter (or its optimizer state).

    The holders of the exchange are slots. A slot whose local tensor stays as it is does not appear as a
    receiver. What a member still holds it keeps; the rest comes from its own replica if somebody there has
    it (usually one node), else from the other replicas in turn, so that the load spreads.

    How much travels, for N units and a replica that goes from degree d to d - 1: when the lost index is the
    one dropped, exactly its units, the lower bound. Otherwise the heir, the member of the dropped index,
    fetches the lost index's units, and the heir's own are dealt out, except those dealt to itself: in real
    numbers ``N/d + (N/d - N/(d (d - 1))) = (2 - 1/(d - 1)) N/d``. Units are whole: with L and H units at
    degree d on the lost index and the heir, and L' units on the lost index at degree d - 1, what travels is
    ``L + H - (L' - L)``. That is less than 3 units more: with f the fraction of N/d, L and H are at most
    ``1 - f`` above N/d, and where L is, L' is at most f below ``N/(d - 1)``, which adds up to ``3 - 2 f``;
    where L is f below, the sum stays under 2.

    Args:
        before: The topology in which the members hold something.
        after: The topology they change to, with the same full degree and number of replicas.
        sharding: How the parameter is cut.
        gone: The slots of ``before`` whose holdings are lost; by default those that are not in ``after``. Pass
            fewer if a leaving member can still send, more if a slot of ``after`` has a new member.

    Raises:
        TopologyError: If the topologies are of different jobs, or a unit has no holder left.
    """
    if before.full_degree != after.full_degree or len(before.replicas) != len(after.replicas):
        raise TopologyError(
            f"topologies of different jobs: full degree {before.full_degree} and {after.full_degree},"
            f" {len(before.replicas)} and {len(after.replicas)} replicas"
        )
    lost = set(before.slots) - set(after.slots) if gone is None else set(gone)
    sources = _Sources(before, sharding, lost)
    now = [sharding.layouts(after.family, degree) if degree else () for degree in after.degrees]
    pieces = Pieces()
    for slot in after.slots:
        replica, index = after.place(slot)
        needs = tuple(layout.owned[index] for layout in now[replica])
        if sources.holdings(slot) == needs:
            continue
        target = 0
        for segment, (units, size) in enumerate(zip(needs, sharding.unit_sizes, strict=True)):
            place = 0
            while place < len(units):
                # what stays is most of it, and lies alike on both sides: one piece instead of one per unit
                length = max(1, sources.kept(slot, segment, units, place))
                sender, source = sources.choose(slot, replica, segment, units[place])
                pieces.add(sender, slot, source, target, length * size)
                target += length * size
                place += length
    return pieces.exchange()


class _Sources:
    """Who still holds what, and how much each has been asked to send."""

    def __init__(self, before: Topology, sharding: Sharding, lost: set[int]) -> None:
        self._sizes = sharding.unit_sizes
        self._layouts: Sequence[tuple[Layout, ...]] = [
            sharding.layouts(before.family, degree) if degree else () for degree in before.degrees
        ]
        self._members = [{i: slot for i, slot in members.items() if slot not in lost} for members in before.replicas]
        self._places = {slot: (r, i) for r, members in enumerate(self._members) for i, slot in members.items()}
        self._sent: dict[int, int] = {}
        self._turn = 0

    def holdings(self, slot: int) -> tuple[tuple[int, ...], ...] | None:
        """The units a slot still holds in every segment; None if it holds nothing."""
        if slot not in self._places:
            return None
        replica, index = self._places[slot]
        return tuple(layout.owned[index] for layout in self._layouts[replica])

    def kept(self, slot: int, segment: int, units: Sequence[int], place: int) -> int:
        """How many of ``units`` from ``place`` on the slot holds itself, one behind the other."""
        if slot not in self._places:
            return 0
        replica, index = self._places[slot]
        layout = self._layouts[replica][segment]
        start = layout.positions[index].get(units[place])
        return 0 if start is None else stretch(layout.owned[index], start, units, place)

    def choose(self, receiver: int, replica: int, segment: int, unit: int) -> tuple[int, int]:
        """The slot that gives ``receiver`` a unit, and the element at which the unit starts there."""
        offset = self._offset(receiver, segment, unit)
        if offset is not None:
            return receiver, offset
        holders = self._holders(replica, segment, unit)
        for step in range(len(self._members)):
            if holders:
                break
            other = (self._turn + step) % len(self._members)
            holders = self._holders(other, segment, unit)
            if holders:
                self._turn = other + 1
        if not holders:
            raise TopologyError(
                f"unit {unit} of segment {segment} has no holder left: every copy was lost; restart from a checkpoint"
            )
        sender = least_loaded(holders, self._sent)
        self._sent[sender] = self._sent.get(sender, 0) + self._sizes[segment]
        offset = self._offset(sender, segment, unit)
        assert offset is not None
        return sender, offset

    def _holders(self, replica: int, segment: int, unit: int) -> list[int]:
        members = self._members[replica]
        if not members:
            return []
        return [members[index] for index in self._layouts[replica][segment].owners[unit] if index in members]

    def _offset(self, slot: int, segment: int, unit: int) -> int | None:
        """The element at which a unit starts in the slot's local tensor; None if the slot lacks it."""
        if slot not in self._places:
            return None
        replica, index = self._places[slot]
        layouts = self._layouts[replica]
        place = layouts[segment].positions[index].get(unit)
        if place is None:
            return None
        base = sum(len(layouts[k].owned[index]) * self._sizes[k] for k in range(segment))
        return base + place * self._sizes[segment]
