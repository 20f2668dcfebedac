"""The training loader draws the samples of this replica's share.

A loader asks its batch sampler for the indices of the next batch in the main process, with workers some batches ahead.
It gets them as they are dealt, so workers fetch what this replica computes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from typing_extensions import override

from lightning_ntp.lightning.dealt_batches import is_plain, let_deal
from lightning_ntp.lightning.shared_batches import GlobalBatches
from lightning_ntp.plan.dealing import Counts, deal, shareholders


class ShareDealer:
    """Deals by the shares of the replicas.

    Args:
        sampler: Of the loader.
        batch_size: Of the loader.
        counts_at: Gives the counts of an epoch's batch; None if shares are equal.
    """

    def __init__(
        self, sampler: DistributedSampler[Any], batch_size: int, counts_at: Callable[[int, int], Counts | None]
    ) -> None:
        self.sampler, self.counts_at = sampler, counts_at
        self.batches = GlobalBatches(sampler, batch_size)

    def draw(self, plain: Iterator[list[int]]) -> Drawing:
        """One pass over an epoch."""
        return Drawing(plain, self)


class Drawing(Iterator[list[int]]):
    """One pass over the batches of an epoch.

    Args:
        plain: Gives the batches of the launch. Begins with the first draw, and so does this.
        dealer: Whose pass.

    Attributes:
        drawn: How many batches it has given.
        order: The epoch by which their samples are shuffled; -1 before the first draw. In the first epoch of a resumed
            fit workers draw before Lightning has told the sampler its epoch.
    """

    def __init__(self, plain: Iterator[list[int]], dealer: ShareDealer) -> None:
        self._plain, self._dealer = plain, dealer
        self.drawn, self.order = 0, -1

    @override
    def __next__(self) -> list[int]:
        dealer, number = self._dealer, self.drawn
        if self.order < 0:
            self.order = dealer.sampler.epoch
        batch = next(self._plain)
        self.drawn += 1
        counts = dealer.counts_at(dealer.sampler.epoch, number)
        if counts is None:
            return batch
        whole = dealer.batches.batch(number, self.order)
        # a replica without a share was gone when they were asked for; should it be back, its own batch is as good
        return deal(whole, counts, shareholders(counts, len(whole))).get(dealer.sampler.rank, batch)


def deal_by_shares(loader: object, counts_at: Callable[[int, int], Counts | None]) -> BatchSampler | None:
    """Let a training loader draw by the shares, from its next pass on.

    Returns:
        Its batch sampler; None if it is no loader of the kind whose batches can be dealt.
    """
    if not isinstance(loader, DataLoader) or type(loader.sampler) is not DistributedSampler:
        return None
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or not is_plain(batches) or batches.sampler is not loader.sampler:
        return None
    let_deal(batches, ShareDealer(loader.sampler, batches.batch_size, counts_at))
    return batches
