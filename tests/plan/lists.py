"""Tensors as Python lists: cut by layouts, moved by exchanges, summed over replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from lightning_ntp.plan import Exchange, Layout, LayoutFamily, Sharding, SyncPlan, plan_sync

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def spread(layouts: Sequence[Layout], unit_sizes: Sequence[int], index: int) -> list[int]:
    """The elements of the whole dimension that ``index`` holds, in their order there."""
    elements: list[int] = []
    start = 0
    for layout, size in zip(layouts, unit_sizes, strict=True):
        for unit in layout.owned.get(index, ()):
            elements += range(start + unit * size, start + (unit + 1) * size)
        start += layout.count * size
    return elements


def cut(layouts: Sequence[Layout], unit_sizes: Sequence[int]) -> dict[int, list[int]]:
    """What every index holds of a tensor whose elements are their own positions."""
    return {index: spread(layouts, unit_sizes, index) for index in layouts[0].indices}


def moved(exchange: Exchange, held: Mapping[int, Sequence[T]]) -> dict[int, list[list[T]]]:
    """Everything that arrives: for every receiver and every element the values in order of the sender."""
    arrived: dict[int, dict[int, list[T]]] = {}
    for move in exchange.moves:
        place = arrived.setdefault(move.receiver, {})
        for run in move.runs:
            assert run.length > 0 and run.source >= 0 and run.source + run.length <= len(held[move.sender])
            for k in range(run.length):
                place.setdefault(run.target + k, []).append(held[move.sender][run.source + k])
    for place in arrived.values():
        assert sorted(place) == list(range(len(place))), "a gap at the receiver"
    return {receiver: [place[k] for k in range(len(place))] for receiver, place in arrived.items()}


def copied(exchange: Exchange, held: Mapping[int, Sequence[T]]) -> dict[int, list[T]]:
    """What every receiver has after the exchange; every element must arrive exactly once."""
    arrived = moved(exchange, held)
    assert all(len(values) == 1 for elements in arrived.values() for values in elements)
    return {receiver: [values[0] for values in elements] for receiver, elements in arrived.items()}


def synced(
    sharding: Sharding,
    family: LayoutFamily,
    degrees: Sequence[int],
    local: Callable[[int, int, int], Number],
    turn: int = 0,
) -> list[tuple[SyncPlan, dict[int, list[Number]]]]:
    """Run a gradient sync over replicas of these degrees.

    Args:
        local: The gradient of (replica, index, element) before the sync.

    Returns:
        For every replica its plan and the result at every index.
    """
    plans = [plan_sync(sharding, family, degrees, degree, turn) for degree in degrees]
    sizes = sharding.unit_sizes
    reduced: list[dict[int, list[Number]]] = []
    for replica, plan in enumerate(plans):
        held = {
            index: [local(replica, index, e) for e in spread(plan.compute, sizes, index)]
            for index in plan.compute[0].indices
        }
        if plan.before is not None:
            held = {index: [sum_in_order(v) for v in values] for index, values in moved(plan.before, held).items()}
        reduced.append({index: held.get(index, []) for index in plan.reduced[0].indices})
        for index, values in reduced[-1].items():
            assert len(values) == len(spread(plan.reduced, sizes, index)), "a sync index reduces something else"
    for plan in plans:
        assert plan.reduced == plans[0].reduced, "replicas reduce different things"
    total = {
        index: [sum_in_order(column) for column in zip(*(r[index] for r in reduced), strict=True)]
        for index in reduced[0]
    }
    results = []
    for plan in plans:
        result = total
        if plan.after is not None:
            arrived = moved(plan.after, total)
            assert plan.sum_after or all(len(v) == 1 for values in arrived.values() for v in values)
            result = {index: [sum_in_order(v) for v in values] for index, values in arrived.items()}
        results.append((plan, result))
    return results


def sum_in_order(values: Iterable[Number]) -> Number:
    """A plain left-to-right sum (the built-in ``sum`` compensates rounding from Python 3.12 on)."""
    first, *rest = values
    for value in rest:
        first = first + value
    return first
