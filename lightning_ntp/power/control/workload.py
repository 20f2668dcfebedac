"""How much longer a replica computes at a smaller degree, before anything is measured.

Every block (attention, MLP, output layer) ends with a sum over the replica, so each block takes as long as its largest
share: 32 heads at degree 7 are 5 heads on some index, not 4.57. Averages would promise too much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ntp.plan.layout import LayoutFamily, UnitSpace


@dataclass(frozen=True)
class Block:
    """One kind of block of the model.

    Args:
        name: For people.
        space: What its work is dealt out in (query heads, columns, vocabulary rows), or None if every index does all
            of it (norms, routers).
        flops: Floating-point operations of all such blocks together per sample. Any unit will do, as only ratios
            count.

    Raises:
        ValueError: If ``flops`` is not above 0.
    """

    name: str
    space: UnitSpace | None
    flops: float

    def __post_init__(self) -> None:
        if not 0 < self.flops < float("inf"):
            raise ValueError(f"block {self.name!r} has {self.flops!r} FLOPs: give a number above 0, or leave it out")

    def largest_share(self, family: LayoutFamily, degree: int) -> float:
        """The part of its work that the busiest index does, 0 to 1.

        Raises:
            ValueError: If ``family`` has no layout of ``degree`` for it.
        """
        if self.space is None:
            return 1.0
        layout = family.layout(self.space, degree)
        return max(len(units) for units in layout.owned.values()) / layout.count


def relative_compute_time(family: LayoutFamily, blocks: Iterable[Block], degree: int) -> float:
    """Compute time per step at ``degree`` over that at the full degree, at equal clocks and equal samples; at least 1.

    Args:
        family: The layouts of the job.
        blocks: What the model consists of.
        degree: Of the replica.

    Raises:
        ValueError: If there are no blocks, or there is no layout of ``degree``.
    """
    blocks = tuple(blocks)
    if not blocks:
        raise ValueError("a model without blocks has no compute time: name its blocks and their FLOPs")
    now = sum(block.flops * block.largest_share(family, degree) for block in blocks)
    return now / sum(block.flops * block.largest_share(family, family.full_degree) for block in blocks)
