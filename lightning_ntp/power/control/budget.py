"""Who may lend power to whom: limits whose sum stays within a budget, and writes that keep it at every moment.

Powers are given in watts and reckoned in whole milliwatts, the unit of NVML, so that sums are exact.

The idea of giving a lost GPU's power to the survivors of its replica is from "Nonuniform Tensor Parallelism"
(arXiv 2504.06095); that a lost GPU's share is lent only once its draw is known is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

Lending = Literal["replica", "node"]
"""Who gets what a lost GPU no longer draws: survivors of its replica, or everybody on its node."""


class BudgetError(ValueError):
    """Bounds or a budget that contradict each other."""


@dataclass(frozen=True)
class GpuBounds:
    """What may be done to one GPU.

    Args:
        gpu: Its UUID.
        replica: Where it works at launch.
        node: The machine it is in.
        start_w: The power limit found at the start, watts: the operator's.
        minimum_w: The lowest limit that the hardware takes.
        maximum_w: The highest limit that the hardware takes.
        ceiling_w: The highest limit that it may be given. By default the operator's: the hardware's maximum is for
            whoever asks for it.
        start_clock_mhz: The upper end of the locked graphics clocks at the start; None if they were not locked.
        max_clock_mhz: The highest graphics clock of the hardware, if known.

    Raises:
        BudgetError: If the numbers are not in order.
    """

    gpu: str
    replica: int
    node: str
    start_w: float
    minimum_w: float
    maximum_w: float
    ceiling_w: float | None = None
    start_clock_mhz: int | None = None
    max_clock_mhz: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.minimum_w <= self.start_w <= self.maximum_w < float("inf"):
            raise BudgetError(
                f"{self.gpu}: the limit at start, {self.start_w:g} W, is not between the hardware's minimum and"
                f" maximum, {self.minimum_w:g} W and {self.maximum_w:g} W"
            )
        if self.ceiling_w is not None and not self.minimum_w <= self.ceiling_w <= self.maximum_w:
            raise BudgetError(
                f"{self.gpu}: the ceiling, {self.ceiling_w:g} W, is not between the hardware's minimum and maximum,"
                f" {self.minimum_w:g} W and {self.maximum_w:g} W: choose one in between"
            )
        locked, top = self.start_clock_mhz, self.max_clock_mhz
        if locked is not None and (locked <= 0 or top is not None and locked > top):
            raise BudgetError(f"{self.gpu}: clocks locked at {locked} MHz do not fit a maximum of {top} MHz")

    @property
    def top_w(self) -> float:
        """The highest limit that it may be given, watts."""
        return self.start_w if self.ceiling_w is None else self.ceiling_w


@dataclass(frozen=True)
class Domain:
    """GPUs that share a power budget: those of a node or of a job.

    Args:
        gpus: All of them, working or not.
        budget_w: What their limits may add up to, watts; the sum of the limits at start by default. If it is below
            that, everybody's share shrinks alike; what it is above belongs to nobody and is there for every wish.
        lend: Who gets what a lost GPU no longer draws.
        lost_draw_w: What a GPU that does not work and whose draw cannot be read is believed to draw, watts. None
            believes nothing: the power of such a GPU is not lent.

    Raises:
        BudgetError: If a GPU is named twice, there is none, or the budget is below the sum of their minimums.
    """

    gpus: tuple[GpuBounds, ...]
    budget_w: float | None = None
    lend: Lending = "replica"
    lost_draw_w: float | None = None

    def __post_init__(self) -> None:
        if not self.gpus or len({each.gpu for each in self.gpus}) < len(self.gpus):
            raise BudgetError(f"a domain needs GPUs, each named once, got {[each.gpu for each in self.gpus]}")
        if self.lend not in get_args(Lending):
            raise BudgetError(f"lend={self.lend!r} is none of {list(get_args(Lending))}")
        if self.lost_draw_w is not None and not self.lost_draw_w >= 0:
            raise BudgetError(f"lost_draw_w={self.lost_draw_w!r} is no draw: give watts of at least 0, or None")
        least = sum(each.minimum_w for each in self.gpus)
        if self.budget_w is not None and not self.budget_w >= least:
            raise BudgetError(f"a budget of {self.budget_w:g} W is below the sum of the lowest limits, {least:g} W")

    @cached_property
    def by_gpu(self) -> Mapping[str, GpuBounds]:
        return {each.gpu: each for each in self.gpus}

    @cached_property
    def total_w(self) -> float:
        """The budget, watts."""
        if self.budget_w is not None:
            return self.budget_w
        return sum(_milliwatts(each.start_w) for each in self.gpus) / 1000

    @cached_property
    def shares_w(self) -> Mapping[str, float]:
        """What every GPU has of the budget by itself, watts: its limit at start, or less if the budget is too small."""
        start = {each.gpu: _milliwatts(each.start_w) for each in self.gpus}
        least = {each.gpu: _milliwatts(each.minimum_w) for each in self.gpus}
        room, wanted = _milliwatts(self.total_w) - sum(least.values()), sum(start.values()) - sum(least.values())
        if room >= wanted:
            return {gpu: value / 1000 for gpu, value in start.items()}
        return {gpu: (least[gpu] + (start[gpu] - least[gpu]) * room // wanted) / 1000 for gpu in start}

    def held_w(self, gpu: str, draw_w: float | None) -> float:
        """What a GPU that does not work holds of the budget, watts.

        Args:
            gpu: The GPU.
            draw_w: Its draw as it was read; None if it is not known, then its whole share is held, unless
                ``lost_draw_w`` says otherwise.
        """
        draw = self.lost_draw_w if draw_w is None else draw_w
        share = self.shares_w[gpu]
        return share if draw is None else min(share, max(0.0, draw))


def allocate(
    domain: Domain, wishes_w: Mapping[str, float], away_w: Mapping[str, float | None] | None = None
) -> dict[str, float]:
    """Limits for the GPUs that work, in watts: wishes as far as they are covered.

    Everybody gets a wish up to the GPU's own share. Beyond it, wishes are met from what others leave: GPUs that do not
    work, and fellows that wish for less. If that is too little, those that want least are satisfied first and the
    others get the same amount each (max-min fair), because the slowest GPU sets a replica's pace.

    The sum of the limits and of what GPUs that do not work hold never exceeds the budget.

    Args:
        domain: Who shares what.
        wishes_w: GPU -> watts; a GPU that is not named wishes for its own share. Wishes outside of a GPU's minimum
            and ceiling are cut.
        away_w: GPU -> its draw as it was read, or None, for those that do not work. They get no limit.

    Raises:
        BudgetError: If a GPU is not in the domain.
    """
    away = {} if away_w is None else away_w
    unknown = sorted({*wishes_w, *away} - domain.by_gpu.keys())
    if unknown:
        raise BudgetError(f"{', '.join(unknown)}: not in the domain of {len(domain.gpus)} GPUs")
    share = {gpu: _milliwatts(watts) for gpu, watts in domain.shares_w.items()}
    surplus = max(0, _milliwatts(domain.total_w) - sum(share.values())) if domain.budget_w is not None else 0
    spare: dict[int | str, int] = defaultdict(int)
    grants: dict[str, int] = {}
    wants: dict[int | str, dict[str, int]] = defaultdict(dict)
    for each in domain.gpus:
        pool: int | str = each.replica if domain.lend == "replica" else each.node
        if each.gpu in away:
            # rounded up, so that what is lent is not a milliwatt too much
            held = min(share[each.gpu], _milliwatts(domain.held_w(each.gpu, away[each.gpu])) + 1)
            spare[pool] += share[each.gpu] - held
            continue
        wish = wishes_w.get(each.gpu, share[each.gpu] / 1000)
        wish_mw = _milliwatts(min(max(wish, each.minimum_w), each.top_w))
        grants[each.gpu] = min(wish_mw, share[each.gpu])
        wants[pool][each.gpu] = wish_mw - grants[each.gpu]
        spare[pool] += share[each.gpu] - grants[each.gpu]
    for name, extras in wants.items():
        for gpu, extra in _fill(extras, spare[name]).items():
            grants[gpu] += extra
            extras[gpu] -= extra
    if surplus:
        left = {gpu: extra for extras in wants.values() for gpu, extra in extras.items()}
        for gpu, extra in _fill(left, surplus).items():
            grants[gpu] += extra
    return {gpu: grant / 1000 for gpu, grant in grants.items()}


@dataclass(frozen=True)
class Write:
    """One limit to write, watts."""

    gpu: str
    before_w: float
    after_w: float


def next_write(
    present_w: Mapping[str, float],
    wanted_w: Mapping[str, float],
    budget_w: float,
    held_w: float = 0.0,
    refused: Collection[str] = (),
) -> Write | None:
    """The next limit to write, given what the limits are now: whoever is to get less first, the largest cut first.

    A raise goes only as far as what is free at that moment. So a write that failed costs those who wait for it a part
    of their raise, and the budget nothing: call it again with what was read back.

    Args:
        present_w: GPU -> its limit now, for all GPUs that work.
        wanted_w: GPU -> the limit that it shall get.
        budget_w: What the sum must not exceed.
        held_w: What GPUs that do not work hold of it.
        refused: GPUs that cannot be written.
    """
    now = {gpu: _milliwatts(watts) for gpu, watts in present_w.items()}
    change = {
        gpu: _milliwatts(watts) - now[gpu] for gpu, watts in wanted_w.items() if gpu in now and gpu not in refused
    }
    lowest = min(change, key=lambda gpu: (change[gpu], gpu), default=None)
    if lowest is not None and change[lowest] < 0:
        return _write(lowest, now[lowest], change[lowest])
    free = _milliwatts(budget_w) - sum(now.values()) - _milliwatts(held_w)
    for gpu in sorted(change, key=lambda gpu: (change[gpu], gpu)):
        step = min(change[gpu], free)
        if step > 0:
            return _write(gpu, now[gpu], step)
    return None


def ordered(
    before_w: Mapping[str, float], after_w: Mapping[str, float], budget_w: float, held_w: float = 0.0
) -> tuple[Write, ...]:
    """All writes from ``before_w`` to ``after_w`` in an order in which the sum never exceeds the budget in between.

    If the sum is above the budget to begin with, it only falls until it is not. See :func:`next_write`.
    """
    now, writes = dict(before_w), []
    while (write := next_write(now, after_w, budget_w, held_w)) is not None:
        writes.append(write)
        now[write.gpu] = write.after_w
    return tuple(writes)


def _write(gpu: str, now: int, change: int) -> Write:
    return Write(gpu, now / 1000, (now + change) / 1000)


def _milliwatts(watts: float) -> int:
    return round(watts * 1000)


def _fill(wants: Mapping[str, int], room: int) -> dict[str, int]:
    """Max-min fair: everybody gets what he wants up to one level, which uses ``room`` up if it is too small."""
    given: dict[str, int] = {}
    rest = len(wants)
    for gpu in sorted(wants, key=lambda gpu: (wants[gpu], gpu)):
        given[gpu] = min(wants[gpu], max(0, room) // rest)
        room -= given[gpu]
        rest -= 1
    return given
