"""A rank leaves as planned: what only it holds travels beside a step, and that very step is finished without it.

While step k runs forward and backward in the old layout, the next generation's groups are built and the moving units'
parameters and optimizer states, those after step k - 1, travel to their new owners. Once the gradients of step k are
synced, those of the moving units follow; then all change over together, and the new owners apply step k themselves.
Until then the old layout is complete: a death in between only drops what was staged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_ntp.comm import Interrupted, Resharding, Runtime, ShardedState
from lightning_ntp.engine.consistency import all_equal
from lightning_ntp.parallel import ShardedModel

if TYPE_CHECKING:
    from lightning_ntp.plan import Topology


class PlannedLeave:
    """One slot's leave, from its announcement to the change. All members make it at the same committed step.

    Args:
        runtime: The rank's runtime.
        model: The cut model.
        states: Gives the per-parameter states that move with the parameters.
        before: The topology the shards are cut for.
        slot: Who leaves.
        reason: Why, for people.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: ShardedModel,
        states: Callable[[], Iterable[ShardedState]],
        before: Topology,
        slot: int,
        reason: str,
    ) -> None:
        self._runtime, self.before, self.slot, self.reason = runtime, before, slot, reason
        self.after = before.lose([slot])[0]
        self._resharding = Resharding(model, states(), before, self.after, gone=())
        self.moved, self.sources = self._resharding.bytes_moved(), self._resharding.sources()
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()
        self._preparation = runtime.prepare(self.after, self._travel)

    def switch(self) -> bool:
        """Change over. Collective over all members, between the gradient sync of a step and what follows it.

        Returns:
            False on the rank that leaves: it has no part in the job any more.

        Raises:
            Interrupted: If the membership changes first. The old layout stands; call :meth:`drop`.
        """
        waited = time.monotonic()
        self._preparation.wait()
        began = time.monotonic()
        with torch.no_grad():
            self._resharding.travel_gradients(self._preparation.group, self.before.slots, self._runtime.slot)
        uid = self._runtime.membership.roster.members.get(self.slot, "")
        if not self._runtime.enter(self._preparation, self.slot, uid, self.reason):
            raise Interrupted("a planned change was interrupted: the membership has changed")
        if self._runtime.slot == self.slot:
            return False
        self._resharding.install(self._runtime.slot, self._runtime.generation.tensor_parallel)
        self.drop()
        self.seconds |= {"wait": began - waited, "switch": time.monotonic() - began}
        return True

    def drop(self) -> None:
        """Let go of what was staged."""
        self._runtime.let_go(self._preparation)

    def _travel(self, group: dist.ProcessGroup) -> None:
        """Beside the training: nothing here may change what a step uses."""
        connected = time.monotonic()
        if not all_equal(self._resharding.fingerprint(), group, self._runtime.generation.device):
            raise RuntimeError(
                "ranks hold different optimizer states or registered states: nobody can leave as planned"
            )
        with torch.no_grad():
            self._resharding.travel(group, self.before.slots, self._runtime.slot)
        ended = time.monotonic()
        self.seconds |= {"prepare": connected - self._began, "travel": ended - connected}
