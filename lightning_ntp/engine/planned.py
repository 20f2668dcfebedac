"""A rank leaves or joins as planned: what moves travels beside a step, which is finished in the new layout.

While step k runs forward and backward in the old layout, the next generation's groups are built and the moving units'
parameters and optimizer states, those after step k - 1, travel to their new owners. Once the gradients of step k are
synced, those of the moving units follow; then all change over together, and the new owners apply step k themselves.
Until then the old layout is complete: a death in between only drops what was staged.

A newcomer takes part from its side (:class:`PlannedEntry`): it holds nothing, computes nothing of step k, and applies
it like everybody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from lightning_ntp.comm import Interrupted, Resharding, Runtime, ShardedState
from lightning_ntp.engine.consistency import all_equal
from lightning_ntp.parallel import ShardedModel
from lightning_ntp.plan import Entry, Join, Roster, Topology


class PlannedChange:
    """A leave, an arrival or a return to places, from its announcement to the change. All members make it at one step.

    Args:
        runtime: The rank's runtime.
        model: The cut model.
        states: Gives the per-parameter states that move with the parameters.
        before: The topology the shards are cut for.
        leaver: The slot that leaves; -1 if none does.
        joins: Who joins.
        settles: Whether members go back to their places of the launch.
        reason: Why somebody leaves, for people.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: ShardedModel,
        states: Callable[[], Iterable[ShardedState]],
        before: Topology,
        leaver: int = -1,
        joins: Sequence[Join] = (),
        settles: bool = False,
        reason: str = "",
    ) -> None:
        self._runtime, self.before, self.leaver, self.joins, self.reason = runtime, before, leaver, joins, reason
        self.settles = settles
        if settles:
            self.after = before.settled(runtime.launched)
        else:
            self.after = grown(before, joins) if joins else before.lose([leaver])[0]
        self._resharding = Resharding(model, states(), before, self.after, gone=())
        self.moved, self.sources = self._resharding.bytes_moved(), self._resharding.sources()
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()
        self._preparation = runtime.prepare(self.after, self._travel, self.joins)

    @property
    def name(self) -> str:
        """Of the generation to come: what newcomers must know to take part."""
        return self._preparation.name

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
        slots = sorted({*self.before.slots, *self.after.slots})
        with torch.no_grad():
            self._resharding.travel_gradients(self._preparation.group, slots, self._runtime.slot)
        uid = self._runtime.membership.roster.members.get(self.leaver, "")
        number = self._runtime.generation.number
        change = Entry(
            "switch", self.leaver, uid, self.reason, round=number, joins=tuple(self.joins), settles=self.settles
        )
        roster = self._runtime.switch(self._preparation, change)
        if roster is None:
            raise Interrupted("a planned change was interrupted: the membership has changed")
        self._runtime.enter(self._preparation, roster)
        if self._runtime.slot == self.leaver:
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
        _travel(self._runtime, self._resharding, group, self.before, self.after)
        self.seconds |= {"prepare": connected - self._began, "travel": time.monotonic() - connected}


class PlannedEntry:
    """An arrival from the newcomer's side.

    Args:
        runtime: The rank's runtime.
        model: The model, cut in whatever way: all of it will be replaced.
        states: The per-parameter states that move with the parameters, with tensors of any content.
        before: The members' topology.
        joins: Who joins, this rank among them.
        name: Of the members' planned change.
        number: Of their present generation.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: ShardedModel,
        states: Iterable[ShardedState],
        before: Topology,
        joins: Sequence[Join],
        name: str,
        number: int,
    ) -> None:
        self._runtime, self._joins, self._number, self.before = runtime, joins, number, before
        self.after = grown(before, joins)
        self._resharding = Resharding(model, states, before, self.after, gone=())
        self.moved, self.sources = self._resharding.bytes_moved(), self._resharding.sources()
        self._roster: Roster | None = None
        self._preparation = runtime.prepare_to_join(name, number, before, self.after, self._travel)

    def switch(self) -> None:
        """Become a member, when all members have synced their gradients. Collective over them and all who join.

        Raises:
            Interrupted: If it has come to nothing; call :meth:`drop`, and wait for another invitation.
        """
        self._preparation.wait()
        slots = sorted({*self.before.slots, *self.after.slots})
        with torch.no_grad():
            self._resharding.travel_gradients(self._preparation.group, slots, self._runtime.slot)
        change = Entry("switch", round=self._number, joins=tuple(self._joins))
        self._roster = self._runtime.switch(self._preparation, change)
        if self._roster is None:
            raise Interrupted("the membership has changed before this rank could join")

    def arrive(self) -> None:
        """Begin to work with the others: process groups and shards. Local; after :meth:`switch`."""
        assert self._roster is not None
        self._runtime.enter(self._preparation, self._roster)
        self._resharding.install(self._runtime.slot, self._runtime.generation.tensor_parallel)
        self.drop()

    def drop(self) -> None:
        """Let go of what was staged."""
        self._runtime.let_go(self._preparation)

    def _travel(self, group: dist.ProcessGroup) -> None:
        _travel(self._runtime, self._resharding, group, self.before, self.after)


def grown(topology: Topology, joins: Iterable[Join]) -> Topology:
    """The topology with newcomers."""
    return topology.grow({join.slot: join.replica for join in joins})


def _travel(
    runtime: Runtime, resharding: Resharding, group: dist.ProcessGroup, before: Topology, after: Topology
) -> None:
    """Parameters and states. Collective over all who take part, in a thread beside the work."""
    if not all_equal(resharding.fingerprint(), group, runtime.generation.device):
        raise RuntimeError("ranks hold different optimizer states or registered states: nothing can move as planned")
    with torch.no_grad():
        resharding.travel(group, sorted({*before.slots, *after.slots}), runtime.slot)
