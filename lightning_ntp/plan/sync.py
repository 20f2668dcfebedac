"""How the gradient of one parameter is brought together: exchange, all-reduce, exchange.

The sync layout is that of the smallest live degree d*. Inside a replica of a larger degree, extra units
first travel to the indices of the sync layout; then ranks of equal index all-reduce across replicas; then
the results travel back. In a uniform world the first and the last part vanish, except that units with
several ``partial`` owners are summed over their owners once, after the all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from lightning_ntp.plan.exchange import Exchange, copy_exchange, reduce_exchange
from lightning_ntp.plan.layout import Layout, LayoutFamily
from lightning_ntp.plan.sharding import Sharding


@dataclass(frozen=True)
class SyncPlan:
    """The three parts for one parameter in one replica.

    Args:
        compute: Layouts of the segments in which the replica computes.
        reduced: Layouts in which the all-reduce across replicas runs; only sync indices hold anything.
        before: Moves inside the replica before the all-reduce, summed into ``reduced`` (of a ``full`` unit one
            copy arrives, so the sum is that copy); None if each sync index already has what it reduces.
        after: Moves inside the replica after the all-reduce; None if nothing travels.
        sum_after: Whether ``after`` sums what arrives (over the owners of a ``partial`` unit, in order of
            their index) or copies it.
    """

    compute: tuple[Layout, ...]
    reduced: tuple[Layout, ...]
    before: Exchange | None
    after: Exchange | None
    sum_after: bool


def plan_sync(sharding: Sharding, family: LayoutFamily, degrees: Iterable[int], degree: int, turn: int = 0) -> SyncPlan:
    """Plan the gradient sync of a parameter.

    Args:
        sharding: How the parameter is cut.
        family: The job's layouts.
        degrees: The degrees of all live replicas (a replica that is gone has none: leave out its 0).
        degree: The degree of the replica that asks; one of ``degrees``.
        turn: A number of the parameter, the same on all ranks; spreads the primaries of replicated
            ``partial`` parameters over the sync indices.

    Raises:
        ValueError: If ``degree`` is none of ``degrees``, or one is not between 1 and the full degree.
    """
    live = tuple(degrees)
    if degree not in live:
        raise ValueError(f"no live replica has degree {degree}; theirs are {sorted(set(live))}")
    smallest, largest = min(live), max(live)
    if not 1 <= smallest <= largest <= family.full_degree:
        raise ValueError(f"live degrees {sorted(set(live))} are not between 1 and the full degree {family.full_degree}")
    turn = turn % smallest if sharding.replicated and sharding.gradient == "partial" else 0
    return _plan(sharding, family, smallest, smallest == largest, degree, turn)


@lru_cache(maxsize=4096)
def _plan(sharding: Sharding, family: LayoutFamily, smallest: int, uniform: bool, degree: int, turn: int) -> SyncPlan:
    sizes = sharding.unit_sizes
    compute = sharding.layouts(family, degree)
    shared = [layout.overlapping for layout in compute]
    whole = sharding.gradient == "full"  # copies are never summed
    if uniform:
        if whole or not any(shared):
            return SyncPlan(compute, compute, None, None, False)
        return SyncPlan(compute, compute, None, reduce_exchange(compute, compute, sizes), True)
    sync = sharding.layouts(family, smallest)
    if whole:
        if degree == smallest:
            return SyncPlan(compute, sync, None, None, False)
        # of a cut parameter the extra indices hold units that no sync index has; of a replicated one nothing travels
        there, back = copy_exchange(compute, sync, sizes), copy_exchange(sync, compute, sizes)
        return SyncPlan(compute, sync, there if there.traveling else None, back if back.traveling else None, False)
    if sharding.replicated:
        reduced: tuple[Layout, ...] = (Layout(1, {i: () for i in sync[0].indices} | {sync[0].indices[turn]: (0,)}),)
    else:
        reduced = tuple(layout.primaries for layout in sync)
    before = reduce_exchange(compute, reduced, sizes)
    if not before.traveling and compute == reduced:
        return SyncPlan(compute, reduced, None, None, False)
    return SyncPlan(compute, reduced, before, before.inverse, False)
