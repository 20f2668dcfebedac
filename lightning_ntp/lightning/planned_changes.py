"""Whatever changes the layout of a fit as planned: who leaves, who joins, who goes back to its place."""

from __future__ import annotations

from typing import Any

from lightning_ntp.lightning.arrivals.fit import Arrivals
from lightning_ntp.lightning.arrivals.members import Joining
from lightning_ntp.lightning.draining import Draining
from lightning_ntp.lightning.relayout import Relayout
from lightning_ntp.lightning.steps.transaction import Transaction
from lightning_ntp.lightning.stopping import StopTogether


class PlannedChanges:
    """The planned changes of one fit: announced in the vote of a step, prepared beside the next, made at its end.

    Args:
        draining: Who leaves.
        relayout: Who goes back.
        arrivals: Who joins.
    """

    def __init__(self, draining: Draining, relayout: Relayout, arrivals: Arrivals) -> None:
        self.draining, self.relayout, self.joining = draining, relayout, arrivals.joining

    def install(self, transaction: Transaction, vote: StopTogether) -> None:
        """From now on steps announce and make them."""
        each: list[Draining | Joining | Relayout] = [self.draining, self.joining, self.relayout]
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
