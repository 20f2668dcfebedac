"""Where a tensor-parallel module looks up its place in the replica, at every call.

Modules never keep a degree, an index or a process group: they ask this object, which the membership code
changes when the topology does.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_ntp.plan import Layout, LayoutFamily, UnitSpace


class TensorParallelContext:
    """The tensor-parallel place of this rank: family of layouts, degree, index and the group of its replica.

    Args:
        family: The job's layouts.
        degree: The live degree of this rank's replica.
        index: This rank's tensor-parallel index.
        group: The process group of the replica for forward and backward, members in order of their index.
            None while the degree is 1.

    Raises:
        ValueError: If ``index`` is not live at ``degree``.
    """

    def __init__(
        self, family: LayoutFamily, degree: int = 1, index: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        self.update(family, degree, index, group)

    def update(self, family: LayoutFamily, degree: int, index: int, group: dist.ProcessGroup | None) -> None:
        """Take another place. Parameters must be cut anew before the next forward."""
        if index not in family.indices(degree):
            raise ValueError(f"index {index} is not live at degree {degree}: {family.indices(degree)}")
        self.family, self.degree, self.index, self.group = family, degree, index, group

    @property
    def indices(self) -> tuple[int, ...]:
        """The live indices of this replica, ascending; position equals the rank in ``group``."""
        return self.family.indices(self.degree)

    def layout(self, space: UnitSpace) -> Layout:
        """The layout of ``space`` at the live degree."""
        return self.family.layout(space, self.degree)

    def units(self, space: UnitSpace) -> tuple[int, ...]:
        """The units of ``space`` this rank holds, in local order."""
        return self.layout(space).owned[self.index]

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelContext:
        return self  # a copied module (an EMA, say) lives in the same replica
