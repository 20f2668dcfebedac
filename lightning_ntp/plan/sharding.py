"""How one parameter is cut: segments of units inside one dimension, and its gradient class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_ntp.plan.layout import Layout, LayoutFamily, UnitSpace, require_count

GradientClass = Literal["full", "partial"]
"""What the local gradient of a copy is, where a unit has several owners.

``full``: the copy is used outside sharded regions on replicated activations, so its gradient is already
whole and copies are never summed. ``partial``: it is used inside a sharded region, so the gradient is the
sum over its owners.
"""


@dataclass(frozen=True)
class Segment:
    """A run of units inside one tensor dimension.

    Args:
        space: What the segment is counted in.
        unit_size: Elements of the dimension per unit.

    Raises:
        ValueError: If ``unit_size`` is no integer of at least 1.
    """

    space: UnitSpace
    unit_size: int

    def __post_init__(self) -> None:
        require_count("the unit size of a segment", self.unit_size)

    @property
    def size(self) -> int:
        """Elements of the dimension, unsharded."""
        return self.space.count * self.unit_size


@dataclass(frozen=True)
class Sharding:
    """How a parameter lies on the indices of a replica.

    Args:
        dim: The dimension that is cut, or None if every index holds the whole parameter.
        segments: The segments of that dimension in order (a packed QKV weight has three). Empty if ``dim``
            is None.
        gradient: The gradient class of units with several owners.

    Raises:
        ValueError: If there are segments without a dimension or the reverse, or no such gradient class.
    """

    dim: int | None
    segments: tuple[Segment, ...] = ()
    gradient: GradientClass = "partial"

    def __post_init__(self) -> None:
        if (self.dim is None) == bool(self.segments):
            raise ValueError(f"a sharding has segments exactly if it has a dimension, got {self}")
        if self.gradient not in get_args(GradientClass):
            raise ValueError(f"gradient={self.gradient!r} is none of {list(get_args(GradientClass))}")

    @property
    def replicated(self) -> bool:
        return self.dim is None

    @property
    def size(self) -> int:
        """Elements of the cut dimension, unsharded."""
        return sum(segment.size for segment in self.segments)

    def layouts(self, family: LayoutFamily, degree: int) -> tuple[Layout, ...]:
        """The compute layout of every segment at ``degree``; for a replicated parameter one unit on all."""
        if self.replicated:
            return (Layout(1, {index: (0,) for index in family.indices(degree)}),)
        return tuple(family.layout(segment.space, degree) for segment in self.segments)

    def whole_layouts(self) -> tuple[Layout, ...]:
        """The unsharded layout of every segment, at index 0."""
        if self.replicated:
            return (Layout.whole(1),)
        return tuple(Layout.whole(segment.space.count) for segment in self.segments)

    @property
    def unit_sizes(self) -> tuple[int, ...]:
        """Elements along the cut dimension per unit, for every segment; 1 if replicated."""
        return (1,) if self.replicated else tuple(segment.unit_size for segment in self.segments)

    def local_size(self, layouts: tuple[Layout, ...], index: int) -> int:
        """Elements along the cut dimension that ``index`` holds under ``layouts``."""
        return sum(len(lay.owned.get(index, ())) * size for lay, size in zip(layouts, self.unit_sizes, strict=True))
