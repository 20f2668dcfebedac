"""A plain batch sampler whose batches may be dealt otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import BatchSampler
from typing_extensions import override


class Dealer(Protocol):
    """Deals the batches of a loader."""

    def draw(self, plain: Iterator[list[int]]) -> Iterator[list[int]]:
        """One pass over an epoch, given the plain one."""


class DealtBatches(BatchSampler):
    """torch forbids to give a loader another batch sampler, so the class of its own is changed in place.

    Without a dealer it is as plain as before, and so are its copies.
    """

    dealer: Dealer | None = None

    @override
    def __iter__(self) -> Iterator[list[int]]:
        plain = super().__iter__()
        return plain if self.dealer is None else self.dealer.draw(plain)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "dealer"}


def is_plain(batches: object) -> bool:
    """Whether it gives the samples of its sampler in turn, but for what a dealer of ours makes of them.

    Exactly these types: a subclass may deal as it likes.
    """
    return type(batches) in (BatchSampler, DealtBatches)


def let_deal(batches: BatchSampler, dealer: Dealer) -> None:
    """Give it a dealer. Passes that have begun go on without."""
    batches.__class__ = DealtBatches
    batches.__dict__["dealer"] = dealer


def let_be(batches: BatchSampler) -> None:
    """Make it a plain one again."""
    batches.__dict__.pop("dealer", None)
    batches.__class__ = BatchSampler
