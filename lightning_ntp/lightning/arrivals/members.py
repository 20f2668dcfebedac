"""Newcomers join a running fit between two updates (DESIGN section 8): the members' side.

A newcomer re-runs the script up to its first training batch and says that it stands by. Rank 0 invites it in the vote
of step k - 1. Beside step k shards travel to it (:mod:`lightning_ntp.engine.planned`), and a member of its replica, the
*giver*, leaves in the job's store what else it needs: the batches of the step, the state before each and after the
last (:mod:`lightning_ntp.lightning.arrivals.joined_state`), and what ``training_step`` has returned. After the gradient
sync of step k it is a member, and finishes the step with the others without having computed it.

For the rest of the epoch its own dataloader is not in position: the giver hands it every batch. For the rest of the fit
even, if the dataloader may have a state that it carries from epoch to epoch.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ntp.comm import Runtime
from lightning_ntp.engine import RecoveryEngine
from lightning_ntp.plan import Join, Topology, choose_joins

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
        joins: Who joins.
        name: Of the planned change.
        number: Of the members' generation.
        before: Its topology.
    """

    joins: tuple[Join, ...]
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
        started: Whether the state has seen the hooks of its start: the giver replays it.
    """

    fetched: Fetched
    state: bytes
    common: dict[str, Any]
    started: bool


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


@dataclass
class Given:
    """What a giver leaves.

    Args:
        content: What was asked for, by pickle.
        failure: Why there is none.
    """

    content: bytes = b""
    failure: str = ""


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
        state: Everything else, given what a micro-batch has returned or None, and where the loops were if that is not
            where they are.
        loops: Where the loops are.
        common: What the strategy has in common on all ranks.
    """

    schema: Callable[[], bytes]
    state: Callable[[Any, bytes], bytes]
    loops: Callable[[], bytes]
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
        self._step: list[tuple[Fetched, bytes]] = []
        """The micro-batches of this step so far, and where the loops were; only while somebody stands by."""
        self._fetched = 0
        """How many they are."""
        self.awaiting: set[int] = set()
        """Slots whose dataloader is not in position, till the end of the epoch at least."""

    # ---- in the vote ------------------------------------------------------------------------------------------

    def ballot(self) -> tuple[int]:
        """The number of the invitation that rank 0 has written; 0 for none."""
        if self._runtime.generation.rank or self._engine.planned is not None or self._redoing():
            return (0,)
        joins = self._candidates(self._runtime.membership.roster.standby)
        if not joins:
            return (0,)
        number = self._runtime.membership.count("invitations")
        self._runtime.membership.post(Keys.invitation(number), pickle.dumps(joins))
        return (number,)

    def counted(self, votes: tuple[int, ...]) -> None:
        """What the vote has said."""
        if not self._redoing():
            self._announced = votes[0]

    def _candidates(self, standby: Mapping[int, str]) -> tuple[Join, ...]:
        """Who of those that stand by can be let in."""
        topology = self._engine.layout
        if not standby:  # asked in every step
            return ()
        joins = choose_joins(topology, self._runtime.launched, standby)
        returning = {join.replica for join in joins} - {*topology.live_replicas}
        if returning and not self._can_fetch():
            joins = tuple(join for join in joins if join.replica not in returning)
            for replica in sorted(returning):
                self._say_once(replica)
        return joins

    def _say_once(self, replica: int) -> None:
        if replica not in self._told:
            self._told.add(replica)
            log.warning(
                "replica %d cannot come back in this fit, though its ranks stand by: that takes a single DataLoader"
                " over a map-style dataset with the sampler that the Trainer has put in",
                replica,
            )

    def step_done(self, committed: int, gathering: bool) -> None:
        """A step is committed: begin to prepare what was announced in its vote."""
        number, self._announced = self._announced, 0
        self._step, self._fetched = [], 0
        if self._engine.planned is None:  # who has joined has read all of it, and nobody else will
            self._take_back(self._given)
        if number and self._engine.planned is None:
            note = self._runtime.membership.read(Keys.invitation(number))
            self._invite(pickle.loads(note))  # from the job's own store

    @property
    def can_replay(self) -> bool:
        """Whether this rank can give the step from its beginning to somebody who joins in its replay."""
        return 0 < len(self._step) == self._fetched

    def before_replay(self) -> None:
        """Survivors are about to replay a step: whoever stood by when they met takes part in that very step.

        Not if one of them was between two steps, and will not replay anything, or has begun the step when nobody stood
        by yet.
        """
        records = self._engine.records
        if self._engine.planned is None and all(record["open"] for record in records.values()):
            standby = {int(slot): uid for slot, uid in records[min(records)]["standby"].items()}
            joins = self._candidates(standby)
            if joins:
                self._invite(joins)

    def _invite(self, joins: tuple[Join, ...]) -> None:
        membership, generation = self._runtime.membership, self._runtime.generation
        before = self._engine.layout
        planned = self._engine.plan_join(joins)
        self._count = 0
        self._give(self._given_by_me(), "schema", self._captures.schema)
        if generation.rank == 0:
            content = pickle.dumps(Invitation(joins, planned.name, generation.number, before))
            for join in joins:
                membership.post(Keys.invited(join.uid, membership.count(f"invited/{join.uid}")), content)

    # ---- in the step ------------------------------------------------------------------------------------------

    def fetched(self, fetched: Fetched) -> None:
        """A batch was fetched; who needs it gets it."""
        self._last = fetched
        if fetched.item is not None:
            self._fetched += 1
            if self._runtime.membership.roster.standby:
                self._step.append((fetched, self._captures.loops()))
            self._hand_over(fetched, b"")
        self.hand_again()

    def replayed(self, position: int) -> None:
        """A micro-batch is about to be replayed; its start is put back."""
        if position < len(self._step):
            self._hand_over(*self._step[position])

    def _hand_over(self, fetched: Fetched, loops: bytes) -> None:
        planned = self._engine.planned
        if planned is None or not planned.joins:
            return

        def handover() -> bytes:
            state, common = self._captures.state(None, loops), self._captures.common()
            return pickle.dumps(Handover(fetched, state, common, started=bool(loops)))

        self._give(self._given_by_me(), f"batch/{self._count}", handover)
        self._count += 1

    def micro_batch_done(self, result: Any) -> None:
        """A micro-batch is done, and others of its step follow."""
        planned = self._engine.planned
        if planned is not None and planned.joins:
            self._give(self._given_by_me(), f"after/{self._count - 1}", lambda: self._captures.state(result, b""))

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

        def outcome() -> bytes:
            state = self._captures.state(result, b"") if self._automatic else b""
            return pickle.dumps(Outcome(self._count, state, self._captures.common(), self._engine.standing()))

        self._give(self._given_by_me(), "outcome", outcome)
        self._engine.switch()
        self.awaiting |= {join.slot for join in planned.joins}

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
        self._step, self._fetched = [], 0

    # ---- who gives --------------------------------------------------------------------------------------------

    def giver(self, topology: Topology, replica: int) -> int:
        """The slot that gives a replica its batches: its lowest one with a loader in position; -1 if it has none."""
        mates = [slot for slot in topology.tensor_parallel_slots(replica) if slot not in self.awaiting]
        return min(mates, default=-1)

    def _given_by_me(self) -> list[int]:
        """The newcomers of the planned change to whom this rank gives."""
        planned = self._engine.planned
        assert planned is not None
        before, givers = planned.before, {}
        for join in planned.joins:
            # a newcomer of this epoch can say everything too, and so can another replica, but for the batch
            others = before.tensor_parallel_slots(join.replica) or before.slots
            found = self.giver(before, join.replica)
            givers[join.slot] = found if found >= 0 else min(others)
        return [slot for slot, giver in givers.items() if giver == self._runtime.slot]

    def _give(self, slots: Sequence[int], what: str, capture: Callable[[], bytes]) -> None:
        """Leave something for newcomers of the planned change. A mistake in it is theirs to hear of, not the job's."""
        if not slots:
            return
        try:
            given = Given(capture())
        except Exception as error:  # user code says what its state is
            given = Given(failure=f"{type(error).__name__}: {error}")
        planned = self._engine.planned
        assert planned is not None
        for slot in slots:
            key = Keys.given(planned.name, slot, what)
            self._runtime.membership.post(key, pickle.dumps(given))
            self._given.append(key)

    def _take_back(self, keys: list[str]) -> None:
        """The store is in the memory of the launching process: leave nothing there that nobody will read."""
        while keys:
            self._runtime.membership.remove(keys.pop())
