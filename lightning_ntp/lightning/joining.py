"""Newcomers join a running fit between two updates (DESIGN section 8): the members' side.

A newcomer re-runs the script up to its first training batch and says that it stands by. Rank 0 invites it in the vote
of step k - 1. Beside step k shards travel to it (:mod:`lightning_ntp.engine.planned`), and a member of its replica, the
*giver*, leaves in the job's store what else it needs: the batches of the step, the state before each and after the
last (:mod:`lightning_ntp.lightning.joined_state`), and what ``training_step`` has returned. After the gradient sync of
step k it is a member, and finishes the step with the others without having computed it.

For the rest of the epoch its own dataloader is not in position: the giver hands it every batch. For the rest of the fit
even, if the dataloader may have a state that it carries from epoch to epoch.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_ntp.comm import Runtime
from lightning_ntp.engine import RecoveryEngine
from lightning_ntp.lightning.state_schema import CannotJoin
from lightning_ntp.plan import Topology

log = logging.getLogger("lightning_ntp")

Item = tuple[Any, int, int]
"""A batch as Lightning's fetcher gives it, its number in the epoch, and that of its dataloader."""


@dataclass
class Fetched:
    """What a fetch has given.

    Args:
        number: Of the batch, counted through all epochs.
        item: None at the end of the data.
        done: Whether it is the last one.
        random: The random states after it, pickled, if the data has drawn from them; None if not.
    """

    number: int
    item: Item | None
    done: bool
    random: bytes | None = None


@dataclass
class Invitation:
    """To join in the next step.

    Args:
        joins: Who joins, and the uids of their processes.
        name: Of the planned change.
        number: Of the members' generation.
        before: Its topology.
    """

    joins: dict[int, str]
    name: str
    number: int
    before: Topology


@dataclass
class Handover:
    """One micro-batch of the step in which a newcomer joins, as the giver found it.

    Args:
        fetched: The batch.
        state: Before it.
        common: What all ranks have in common, before it.
    """

    fetched: Fetched
    state: bytes
    common: dict[str, Any]


@dataclass
class Outcome:
    """What the giver had after the last backward of the step.

    Args:
        count: Micro-batches of the step.
        state: After the last one, with what ``training_step`` has returned; empty in manual optimization, where the
            newcomer makes the step itself.
        common: What all ranks have in common.
        standing: Of the recovery engine.
    """

    count: int
    state: bytes
    common: dict[str, Any]
    standing: dict[str, Any]


class Keys:
    """Where members and newcomers leave notes for each other in the job's store."""

    @staticmethod
    def invitation(number: int) -> str:
        """From rank 0 to all members."""
        return f"invitation/{number}"

    @staticmethod
    def invited(uid: str, number: int) -> str:
        """From rank 0 to a newcomer; its number-th."""
        return f"invited/{uid}/{number}"

    @staticmethod
    def given(change: str, slot: int, what: str) -> str:
        """From the giver to a newcomer."""
        return f"given/{change}/{slot}/{what}"

    @staticmethod
    def batch(replica: int, number: int) -> str:
        """From the giver to all of its replica that have no loader in position."""
        return f"batch/{replica}/{number}"


@dataclass(frozen=True)
class Captures:
    """What a giver can say of its state.

    Args:
        schema: The kinds of per-parameter states.
        state: Everything else, given what a micro-batch has returned or None.
        common: What the strategy has in common on all ranks.
    """

    schema: Callable[[], bytes]
    state: Callable[[Any], bytes]
    common: Callable[[], dict[str, Any]]


class Joining:
    """Lets newcomers in. All members have one, and so has a newcomer once it is one of them.

    Args:
        current: The rank's runtime.
        engine: Plans and makes the change.
        captures: Says what there is to give.
        automatic: Whether Lightning optimizes; else the newcomer makes the step itself.
        redoing: Whether steps are done again that were committed before.
        can_fetch: Whether batches can be fetched by their number, as a replica needs that comes back whole.
    """

    def __init__(
        self,
        current: Runtime,
        engine: RecoveryEngine,
        captures: Captures,
        automatic: bool,
        redoing: Callable[[], bool],
        can_fetch: Callable[[], bool],
    ) -> None:
        self._runtime, self._engine, self._captures, self._automatic = current, engine, captures, automatic
        self._redoing, self._can_fetch = redoing, can_fetch
        self._announced = 0
        self._count = 0
        self._told: set[int] = set()
        self._given: list[str] = []
        self._handed: list[str] = []
        self._last: Fetched | None = None
        self.awaiting: set[int] = set()
        """Slots whose dataloader is not in position, till the end of the epoch at least."""

    # ---- in the vote ------------------------------------------------------------------------------------------

    def ballot(self) -> tuple[int]:
        """The number of the invitation that rank 0 has written; 0 for none."""
        if self._runtime.generation.rank or self._engine.planned is not None or self._redoing():
            return (0,)
        joins = self._candidates()
        if not joins:
            return (0,)
        number = self._runtime.membership.count("invitations")
        self._runtime.membership.post(Keys.invitation(number), json.dumps(joins))
        return (number,)

    def counted(self, votes: tuple[int, ...]) -> None:
        """What the vote has said."""
        if not self._redoing():
            self._announced = votes[0]

    def _candidates(self) -> dict[int, str]:
        """Who stands by and can be let in."""
        topology, launched = self._engine.layout, self._runtime.launched
        found: dict[int, str] = {}
        for slot, uid in sorted(self._runtime.membership.roster.standby.items()):
            replica = launched.place(slot)[0]
            if replica in topology.live_replicas:
                found[slot] = uid
                continue
            mates = launched.tensor_parallel_slots(replica)
            standby = self._runtime.membership.roster.standby
            if not self._can_fetch():
                self._say_once(
                    replica,
                    f"slot {slot} stands by, but replica {replica} cannot come back in this fit: that takes a single"
                    " DataLoader over a map-style dataset with the sampler that the Trainer has put in",
                )
            elif all(mate in standby for mate in mates):
                found[slot] = uid
        return found

    def _say_once(self, replica: int, what: str) -> None:
        if replica not in self._told:
            self._told.add(replica)
            log.warning(what)

    def step_done(self, committed: int, gathering: bool) -> None:
        """A step is committed: begin to prepare what was announced in its vote."""
        number, self._announced = self._announced, 0
        if self._engine.planned is None:  # who has joined has read all of it, and nobody else will
            self._take_back(self._given)
        if not number or self._engine.planned is not None:
            return
        membership, generation = self._runtime.membership, self._runtime.generation
        joins = {int(slot): str(uid) for slot, uid in json.loads(membership.read(Keys.invitation(number))).items()}
        before = self._engine.layout
        planned = self._engine.plan_join(joins)
        self._count = 0
        for slot in self._given_by_me():
            try:
                schema = self._captures.schema()
            except CannotJoin as error:  # the newcomer's affair, not this rank's
                schema = pickle.dumps(error)
            self._give(planned.name, slot, "schema", schema)
        if generation.rank == 0:
            content = pickle.dumps(Invitation(joins, planned.name, generation.number, before))
            for uid in joins.values():
                membership.post(Keys.invited(uid, membership.count(f"invited/{uid}")), content)

    # ---- in the step ------------------------------------------------------------------------------------------

    def fetched(self, fetched: Fetched) -> None:
        """A batch was fetched; who needs it gets it."""
        self._last = fetched
        planned = self._engine.planned
        if planned is not None and planned.joins:
            mine = self._given_by_me()
            if mine and fetched.item is not None:
                content = pickle.dumps(Handover(fetched, self._captures.state(None), self._captures.common()))
                for slot in mine:
                    self._give(planned.name, slot, f"batch/{self._count}", content)
            self._count += fetched.item is not None
        self.hand_again()

    def micro_batch_done(self, result: Any) -> None:
        """A micro-batch is done, and others of its step follow."""
        planned = self._engine.planned
        if planned is not None and planned.joins:
            for slot in self._given_by_me():
                self._give(planned.name, slot, f"after/{self._count - 1}", self._captures.state(result))

    def change(self, result: Any) -> None:
        """Let them in, if somebody was invited. Between the gradient sync of the step and its hooks.

        Args:
            result: What the last micro-batch has returned; nothing in manual optimization.

        Raises:
            Interrupted: If the membership changes first.
        """
        planned = self._engine.planned
        if planned is None or not planned.joins:
            return
        mine = self._given_by_me()
        if mine:
            state = self._captures.state(result) if self._automatic else b""
            outcome = Outcome(self._count, state, self._captures.common(), self._engine.standing())
            for slot in mine:
                self._give(planned.name, slot, "outcome", pickle.dumps(outcome))
        self._engine.switch()
        self.awaiting |= set(planned.joins)

    @property
    def hands(self) -> bool:
        """Whether it falls to this rank to hand batches to those of its replica that have no loader in position."""
        topology, replica = self._engine.layout, self._runtime.generation.replica
        mates = topology.tensor_parallel_slots(replica)
        return bool(self.awaiting.intersection(mates)) and self._runtime.slot == self.giver(topology, replica)

    def hand_again(self) -> None:
        """Leave the newest batch for those of this replica that have no loader in position, if that falls to me."""
        last, replica = self._last, self._runtime.generation.replica
        if last is None or not self.hands:
            return
        key = Keys.batch(replica, last.number)
        self._runtime.membership.post(key, pickle.dumps(last))
        # who votes on a step has its batch
        before = self._handed[:-1]
        self._take_back(before)
        self._handed = [*self._handed[-1:], *([key] if key not in self._handed else [])]

    def epoch_begins(self, alike: bool) -> None:
        """An epoch begins.

        Args:
            alike: Whether the dataloaders of all ranks are in position then, whatever they have given before.
        """
        self._last = None
        self._take_back(self._handed)
        if alike:
            self.awaiting = set()

    def forget(self) -> None:
        """Training ends: nobody is let in any more."""
        self._announced = 0

    # ---- who gives --------------------------------------------------------------------------------------------

    def giver(self, topology: Topology, replica: int) -> int:
        """The slot that gives a replica its batches: its lowest one with a loader in position; -1 if it has none."""
        mates = [slot for slot in topology.tensor_parallel_slots(replica) if slot not in self.awaiting]
        return min(mates, default=-1)

    def _given_by_me(self) -> list[int]:
        """The newcomers of the planned change to whom this rank gives."""
        planned = self._engine.planned
        assert planned is not None
        before, launched = planned.before, self._runtime.launched
        givers = {}
        for slot in planned.joins:
            replica = launched.place(slot)[0]
            mates = before.tensor_parallel_slots(replica)
            givers[slot] = (
                self.giver(before, replica) if self.giver(before, replica) >= 0 else min(mates or before.slots)
            )
        return [slot for slot, giver in givers.items() if giver == self._runtime.slot]

    def _give(self, change: str, slot: int, what: str, content: bytes) -> None:
        key = Keys.given(change, slot, what)
        self._runtime.membership.post(key, content)
        self._given.append(key)

    def _take_back(self, keys: list[str]) -> None:
        """The store is in the memory of the launching process: leave nothing there that nobody will read."""
        while keys:
            self._runtime.membership.remove(keys.pop())
