"""What moves from whom to whom between two layouts, as data.

An exchange knows nothing of torch: offsets and lengths count elements along the cut dimension, in the local
coordinates of the sender and of the receiver. Another floor moves the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from lightning_ntp.plan.layout import Layout


class Run(NamedTuple):
    """A contiguous piece: ``length`` elements from ``source`` in the sender to ``target`` in the receiver."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Move:
    """All pieces that go from one holder to another; ``sender == receiver`` means they stay on that rank."""

    sender: int
    receiver: int
    runs: tuple[Run, ...]

    @cached_property
    def length(self) -> int:
        """Elements along the cut dimension."""
        return sum(run.length for run in self.runs)


@dataclass(frozen=True)
class Exchange:
    """A plan of moves, sorted by receiver, then sender.

    Holders are tensor-parallel indices inside one replica, or any other integers the caller chose.
    """

    moves: tuple[Move, ...]

    @cached_property
    def traveling(self) -> tuple[Move, ...]:
        """The moves that go over the wire."""
        return tuple(m for m in self.moves if m.sender != m.receiver)

    @cached_property
    def elements(self) -> int:
        """Elements along the cut dimension that go over the wire."""
        return sum(m.length for m in self.traveling)

    @cached_property
    def inverse(self) -> Exchange:
        """The way back: every piece returns to where it came from."""
        turned = [
            Move(m.receiver, m.sender, tuple(Run(r.target, r.source, r.length) for r in m.runs)) for m in self.moves
        ]
        return Exchange(tuple(sorted(turned, key=lambda m: (m.receiver, m.sender))))

    def sent_by(self, holder: int) -> tuple[Move, ...]:
        return tuple(m for m in self.traveling if m.sender == holder)

    def received_by(self, holder: int) -> tuple[Move, ...]:
        return tuple(m for m in self.traveling if m.receiver == holder)

    def placed_at(self, holder: int) -> tuple[Move, ...]:
        """All moves that end at ``holder``, those from itself included, in order of the sender."""
        return tuple(m for m in self.moves if m.receiver == holder)


def copy_exchange(before: Sequence[Layout], after: Sequence[Layout], unit_sizes: Sequence[int]) -> Exchange:
    """Every unit of ``after`` comes from one holder of ``before``: the receiver itself, else an owner.

    Among several possible senders the one that has sent least so far is taken, so that the load spreads.

    Args:
        before: The layouts of the segments now.
        after: The layouts of the segments afterwards.
        unit_sizes: Elements along the cut dimension per unit, for every segment.

    Raises:
        ValueError: If a unit has no holder in ``before``, or a segment's layouts count different units.
    """
    return _cached(tuple(before), tuple(after), tuple(unit_sizes), False)


def reduce_exchange(before: Sequence[Layout], after: Sequence[Layout], unit_sizes: Sequence[int]) -> Exchange:
    """Every holder of a unit in ``before`` sends its part to every holder of ``after``, which sums them.

    Args and errors are those of :func:`copy_exchange`.
    """
    return _cached(tuple(before), tuple(after), tuple(unit_sizes), True)


@lru_cache(maxsize=4096)
def _cached(
    before: tuple[Layout, ...], after: tuple[Layout, ...], unit_sizes: tuple[int, ...], everyone: bool
) -> Exchange:
    pieces = Pieces()
    sent: dict[int, int] = {}
    old_base: dict[int, int] = {}
    new_base: dict[int, int] = {}
    for old, new, size in zip(before, after, unit_sizes, strict=True):
        if old.count != new.count:
            raise ValueError(f"layouts of {old.count} and {new.count} units cannot exchange: they cut different things")
        places, owners, alone = old.positions, old.owners, not old.overlapping
        for receiver in new.indices:
            base, units, place = new_base.get(receiver, 0), new.owned[receiver], 0
            while place < len(units):
                unit = units[place]
                senders = owners[unit]
                if not senders:
                    raise ValueError(f"unit {unit} has no holder: it cannot be sent to {receiver}")
                if not everyone:
                    senders = (receiver if receiver in senders else least_loaded(senders, sent),)
                # where every unit has one owner, a stretch that lies alike on both sides is one piece
                length = stretch(old.owned[senders[0]], places[senders[0]][unit], units, place) if alone else 1
                for sender in senders:
                    source = old_base.get(sender, 0) + places[sender][unit] * size
                    pieces.add(sender, receiver, source, base + place * size, length * size)
                    sent[sender] = sent.get(sender, 0) + (sender != receiver) * length * size
                place += length
        for index, units in old.owned.items():
            old_base[index] = old_base.get(index, 0) + len(units) * size
        for index, units in new.owned.items():
            new_base[index] = new_base.get(index, 0) + len(units) * size
    return pieces.exchange()


class Pieces:
    """Collects what moves, in order of the place at the receiver, and joins pieces that touch on both sides."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int], list[list[int]]] = {}

    def add(self, sender: int, receiver: int, source: int, target: int, length: int) -> None:
        """Add ``length`` elements from ``source`` in the sender to ``target`` in the receiver."""
        runs = self._runs.get((receiver, sender))
        if runs is None:
            self._runs[receiver, sender] = [[source, target, length]]
            return
        last = runs[-1]
        if last[0] + last[2] == source and last[1] + last[2] == target:
            last[2] += length
        else:
            runs.append([source, target, length])

    def exchange(self) -> Exchange:
        """Everything added so far, as an exchange."""
        return Exchange(
            tuple(
                Move(sender, receiver, tuple(Run(*run) for run in runs))
                for (receiver, sender), runs in sorted(self._runs.items())
            )
        )


def stretch(one: Sequence[int], start: int, other: Sequence[int], begin: int) -> int:
    """How many units from ``start`` in one holding equal those from ``begin`` in the other."""
    length, limit = 0, min(len(one) - start, len(other) - begin)
    while length < limit and one[start + length] == other[begin + length]:
        length += 1
    return length


def least_loaded(senders: Sequence[int], sent: Mapping[int, int]) -> int:
    """The sender that has sent least so far; of equals the lowest, so that every rank names the same one."""
    return senders[0] if len(senders) == 1 else min(senders, key=lambda s: (sent.get(s, 0), s))
