"""Which tensor-parallel index holds which units: nested layouts for every degree.

The layout of the full degree is contiguous and balanced. The layout of degree d - 1 comes from that of
degree d by dealing the dropped index's units to the others, so an index's units at degree d are a prefix
of its units at degree d - 1. All replicas use layouts of one family; therefore any two degrees exchange
only tails, and a shrink moves exactly what was lost.

The idea of nonuniform layouts is from "Nonuniform Tensor Parallelism" (arXiv 2504.06095); the nested
construction, which makes any degree reachable from any other, is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache


def require_count(name: str, value: object) -> None:
    """Refuse what cannot count things: NaN, infinity and fractions, which compare oddly, and True.

    Raises:
        ValueError: If ``value`` is no integer of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass(frozen=True)
class UnitSpace:
    """What a sharded dimension is counted in.

    Args:
        count: Number of units, at least 1.
        shared_by: When the units are not dealt out themselves but follow another space (the key/value heads
            of grouped-query attention follow the query heads), the number of units of that other space. Unit
            ``u`` then serves the ``shared_by // count`` consecutive units of the other space which start at
            ``u * (shared_by // count)``, and every index holds the units its own consumers need.

    Raises:
        ValueError: If a count is no integer of at least 1, or ``shared_by`` is no multiple of ``count``.
    """

    count: int
    shared_by: int | None = None

    def __post_init__(self) -> None:
        require_count("the number of units", self.count)
        if self.shared_by is None:
            return
        require_count("the number of query heads", self.shared_by)
        if self.shared_by < self.count or self.shared_by % self.count:
            raise ValueError(
                f"{self.shared_by} query heads cannot share {self.count} key/value heads evenly: the number of"
                f" query heads must be a multiple of the number of key/value heads"
            )

    @property
    def dealt(self) -> int:
        """Number of units that are actually dealt out to the indices."""
        return self.count if self.shared_by is None else self.shared_by


@dataclass(frozen=True)
class Layout:
    """The units every index holds, in the order in which they lie in its local tensor.

    ``owned`` maps a tensor-parallel index to its units. Units may have several owners.
    """

    count: int
    owned: Mapping[int, tuple[int, ...]]

    @staticmethod
    def whole(count: int) -> Layout:
        """The unsharded layout: index 0 holds all units in their own order."""
        return Layout(count, {0: tuple(range(count))})

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The live indices, ascending."""
        return tuple(sorted(self.owned))

    @property
    def degree(self) -> int:
        return len(self.owned)

    @cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """For every unit the indices that hold it, ascending."""
        owners: list[tuple[int, ...]] = [()] * self.count
        for index in self.indices:
            alone = (index,)  # most units have one owner: they all share this tuple
            for unit in self.owned[index]:
                owners[unit] = owners[unit] + alone if owners[unit] else alone
        return tuple(owners)

    @cached_property
    def overlapping(self) -> bool:
        """Whether some unit has more than one owner."""
        return any(len(owners) > 1 for owners in self.owners)

    @cached_property
    def primaries(self) -> Layout:
        """The same units with one owner each: of several owners the one with the fewest units so far.

        A function of this layout alone, so that every replica names the same primary.
        """
        if not self.overlapping:
            return self
        load = {index: sum(1 for u in self.owned[index] if len(self.owners[u]) == 1) for index in self.indices}
        primary: dict[int, list[int]] = {index: [] for index in self.indices}
        chosen: dict[int, int] = {}
        for unit, owners in enumerate(self.owners):
            index = owners[0] if len(owners) == 1 else min(owners, key=lambda i: (load[i], i))
            if len(owners) > 1:
                load[index] += 1
            chosen[unit] = index
        for index in self.indices:  # keep each index's own order, so that what it keeps stays in place
            primary[index] = [u for u in self.owned[index] if chosen[u] == index]
        return Layout(self.count, {index: tuple(units) for index, units in primary.items()})

    @cached_property
    def positions(self) -> Mapping[int, Mapping[int, int]]:
        """For every index: unit -> its place in the local order."""
        return {index: {unit: k for k, unit in enumerate(units)} for index, units in self.owned.items()}

    @cached_property
    def _hash(self) -> int:
        return hash((self.count, tuple((i, self.owned[i]) for i in self.indices)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class LayoutFamily:
    """The nested layouts of one job: one for every degree from ``full_degree`` down to 1.

    Args:
        full_degree: The largest degree of the job.
        dropped: The agreed list of indices that are dropped, in order. It is fixed only as far as some
            replica has used it; beyond its end the highest remaining index is assumed to go next.

    Raises:
        ValueError: If the degree is no integer of at least 1, or ``dropped`` repeats an index or names one
            that does not exist.
    """

    full_degree: int
    dropped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_count("the full degree", self.full_degree)
        if len(set(self.dropped)) != len(self.dropped) or not set(self.dropped) <= set(range(self.full_degree)):
            raise ValueError(
                f"dropped indices must be different numbers below {self.full_degree}, got {list(self.dropped)}"
            )

    @cached_property
    def drop_order(self) -> tuple[int, ...]:
        """All indices in the order in which they would go."""
        rest = sorted(set(range(self.full_degree)) - set(self.dropped), reverse=True)
        return self.dropped + tuple(rest)

    def indices(self, degree: int) -> tuple[int, ...]:
        """The live indices at ``degree``, ascending."""
        self._check(degree)
        return tuple(sorted(self.drop_order[self.full_degree - degree :]))

    def layout(self, space: UnitSpace, degree: int) -> Layout:
        """The compute layout of ``space`` at ``degree``.

        Raises:
            ValueError: If the degree is not between 1 and the full degree, or the full degree is above the
                number of units (then some index would hold nothing).
        """
        self._check(degree)
        if space.dealt < self.full_degree:
            raise ValueError(
                f"tensor-parallel degree {self.full_degree} is above the number of units, {space.dealt}: an index"
                f" would hold nothing; use a degree of at most {space.dealt}"
            )
        return _layouts(space, self.full_degree, self.drop_order)[self.full_degree - degree]

    def _check(self, degree: int) -> None:
        if not 1 <= degree <= self.full_degree:
            raise ValueError(f"degree {degree} is not between 1 and the full degree {self.full_degree}")


@lru_cache(maxsize=1024)
def _layouts(space: UnitSpace, full_degree: int, drop_order: tuple[int, ...]) -> tuple[Layout, ...]:
    """All layouts of a space, from the full degree down to 1."""
    if space.shared_by is not None:
        ratio = space.shared_by // space.count
        consumers = _layouts(UnitSpace(space.shared_by), full_degree, drop_order)
        return tuple(
            # dict.fromkeys keeps the order of first need: the prefix property carries over
            Layout(space.count, {i: tuple(dict.fromkeys(u // ratio for u in us)) for i, us in layout.owned.items()})
            for layout in consumers
        )
    base, more = divmod(space.count, full_degree)
    owned: dict[int, tuple[int, ...]] = {}
    start = 0
    for index in range(full_degree):
        size = base + (index < more)
        owned[index] = tuple(range(start, start + size))
        start += size
    layouts = [Layout(space.count, dict(owned))]
    for index in drop_order[:-1]:
        owned = _deal(owned, index, space.count)
        layouts.append(Layout(space.count, owned))
    return tuple(layouts)


def _deal(owned: Mapping[int, tuple[int, ...]], dropped: int, count: int) -> dict[int, tuple[int, ...]]:
    """Deal the units of ``dropped`` to the other indices so that sizes stay within one unit of each other."""
    free = owned[dropped]
    rest = sorted(i for i in owned if i != dropped)
    base, more = divmod(count, len(rest))
    # at every degree the lowest indices hold the larger share, so no index ever shrinks and what stays never moves
    larger = set(rest[:more])
    dealt: dict[int, tuple[int, ...]] = {}
    start = 0
    for index in rest:
        take = base + (index in larger) - len(owned[index])
        dealt[index] = owned[index] + free[start : start + take]
        start += take
    return dealt
