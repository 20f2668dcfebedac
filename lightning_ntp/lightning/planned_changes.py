"""What changes in a fit as planned: who leaves, who joins, who goes back to its place, who takes how many samples."""

from __future__ import annotations

from typing import Any

from lightning_ntp.lightning.arrivals.fit import Arrivals
from lightning_ntp.lightning.arrivals.members import Joining
from lightning_ntp.lightning.draining import Draining
from lightning_ntp.lightning.relayout import Relayout
from lightning_ntp.lightning.sample_shares import SampleShares
from lightning_ntp.lightning.steps.transaction import Transaction
from lightning_ntp.lightning.stopping import StopTogether


class PlannedChanges:
    """The planned changes of one fit: announced in the vote of a step; those of the layout are prepared beside the next
    one, and made at its end.

    Args:
        draining: Who leaves.
        relayout: Who goes back.
        arrivals: Who joins.
        shares: Who takes how many samples.
    """

    def __init__(self, draining: Draining, relayout: Relayout, arrivals: Arrivals, shares: SampleShares) -> None:
        self.draining, self.relayout, self.joining = draining, relayout, arrivals.joining
        self.shares = shares

    def install(self, transaction: Transaction, vote: StopTogether) -> None:
        """From now on steps announce and make them."""
        each: list[Draining | Joining | Relayout | SampleShares] = [
            self.draining,
            self.joining,
            self.relayout,
            self.shares,
        ]
        vote.riders += each
        transaction.on_commit += [change.step_done for change in each]
        transaction.on_gradients = self._change

    def _change(self, result: Any) -> None:
        self.draining.change()
        self.relayout.change()
        self.joining.change(result)

    def may_drain(self, slot: int, reason: str) -> bool:
        """Whether a slot will leave as planned; from now on it does."""
        try:
            self.draining.request(slot, reason)
        except ValueError:
            return False
        return True

    def forget(self) -> None:
        """Training ends: nothing is begun any more."""
        self.draining.forget()
        self.joining.forget()
