"""A rank that joins a running fit: the newcomer's side of :mod:`lightning_ntp.lightning.arrivals.members`.

Until it is a member it is alone: its collectives have nobody else in them, and its trainer has set up as for a fresh
fit. It stands at its first training batch when it says that it stands by. Whatever happens to the members meanwhile, an
invitation that comes to nothing costs it nothing: it waits for the next one.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from lightning_ntp.comm import Interrupted, Runtime, runtime
from lightning_ntp.engine import PlannedEntry, RecoveryEngine
from lightning_ntp.launch import REFUSED, progress, report_alone
from lightning_ntp.launch.progress import Tag
from lightning_ntp.lightning.arrivals.identity import differences
from lightning_ntp.lightning.arrivals.joined_state import JoinedState
from lightning_ntp.lightning.arrivals.members import Fetched, Given, Handover, Invitation, Joining, Keys, Outcome
from lightning_ntp.lightning.arrivals.state_schema import CannotJoin
from lightning_ntp.lightning.arrivals.told import Told
from lightning_ntp.parallel import ShardedModel

log = logging.getLogger("lightning_ntp")

_TICK = 0.005
"""Seconds between looks at the store, for what takes at least a step."""


class TooLate(Exception):
    """The fit was over before this rank could join it."""


class Newcomer:
    """Brings a rank into a running fit.

    Args:
        current: The rank's runtime.
        engine: Of this rank.
        model: The cut model.
        states: Gives the per-parameter states that move with the parameters.
        carried: Makes this rank's state that of its peer.
        take_common: Takes over what the strategy has in common on all ranks, given who has joined meanwhile.
        fetch: Fetches a batch of this replica by its number in the loader's pass; raises if that cannot be done.
        automatic: Whether Lightning optimizes.
        told: What the members have said of this fit.
        described: What this rank runs.
        go_home: Called with the replica to which this rank belongs from now on.
    """

    def __init__(
        self,
        current: Runtime,
        engine: RecoveryEngine,
        model: ShardedModel,
        states: Callable[[], Any],
        carried: JoinedState,
        take_common: Callable[[dict[str, Any], Iterable[int]], None],
        fetch: Callable[[int], Any],
        automatic: bool,
        told: Told,
        described: Callable[[], dict[str, str]],
        go_home: Callable[[int], None],
    ) -> None:
        self._runtime, self._engine, self._model, self._states = current, engine, model, states
        self._carried, self._take_common, self._fetch = carried, take_common, fetch
        self._automatic, self._told, self._described, self._go_home = automatic, told, described, go_home
        self._invitations = 0
        self._stands_by = False
        self._entry: PlannedEntry | None = None
        self._outcome: Outcome | None = None
        self._batches: deque[Handover] = deque()
        self._results: deque[bytes] = deque()
        self._started = b""
        """The state before a micro-batch that has seen the hooks of its start, which this rank is about to run."""
        self._fresh = False
        self.replica = -1
        """Where this rank works, once it is invited."""
        self._joined: tuple[int, ...] = ()
        self._skipped: set[str] = set()

    # ---- at the first batch -----------------------------------------------------------------------------------

    @property
    def joins(self) -> bool:
        """Whether this rank has not yet begun to work with the others."""
        return self._runtime.joining

    def first(self) -> Fetched:
        """The next batch of the step in which this rank joins. Waits until it is a member, and stands at the batch.

        Raises:
            TooLate: If the fit is over first.
        """
        further = self._outcome is not None
        while self._outcome is None:
            self._take_part(self._wait_for_invitation())
        handover = self._batches.popleft()
        if further:
            self._become(handover.state)
        self._take_common(handover.common, ())
        self._started = handover.state if handover.started else b""
        fetched = handover.fetched
        if self._fresh and fetched.item is not None:
            # the giver's is another replica's
            fetched = Fetched(fetched.number, (self._fetch(fetched.item[1]), *fetched.item[1:]), fetched.done)
        return fetched

    def _wait_for_invitation(self) -> Invitation:
        progress.current().back_to(Tag.SETUP)  # nobody waits for this rank
        if not self._stands_by:
            self._check_job_is_ours()
            self._stands_by = True
            self._runtime.membership.stand_by()
        self._invitations += 1
        key = Keys.invited(self._runtime.uid, self._invitations)
        while True:
            found = self._runtime.membership.find(key)
            if found is not None:
                progress.current().back_to(Tag.STEP)  # from here on the members may
                invitation: Invitation = pickle.loads(found)  # from the job's own store
                return invitation
            self._check_job()
            time.sleep(_TICK)

    def _take_part(self, invitation: Invitation) -> None:
        """Become a member, unless the invitation comes to nothing."""
        name = invitation.name
        entry: PlannedEntry | None = None
        try:
            self._carried.make_states(self._given(invitation, "schema"))
            entry = PlannedEntry(
                self._runtime,
                self._model,
                self._states(),
                invitation.before,
                invitation.joins,
                name,
                invitation.number,
            )
            first: Handover = pickle.loads(self._given(invitation, "batch/0"))
            # the members still compute: now it costs nobody anything. An invitation after this one does it again
            self._set_out(invitation, first)
            outcome: Outcome = pickle.loads(self._given(invitation, "outcome", _TICK / 5))
            numbers = range(outcome.count)
            further = [pickle.loads(self._given(invitation, f"batch/{number}")) for number in numbers[1:]]
            results = [self._given(invitation, f"after/{number}") for number in numbers[:-1]] if self._automatic else []
            entry.switch()
        except (Interrupted, TooLate) as error:
            if entry is not None:
                entry.drop()
            if isinstance(error, TooLate):
                raise
            return
        except CannotJoin as error:
            self.refuse(str(error))
        report_alone(False)
        progress.current().back_to(Tag.BETWEEN)
        self._entry, self._outcome = entry, outcome
        self._joined = tuple(join.slot for join in invitation.joins)
        self._batches, self._results = deque([first, *further]), deque([*results, outcome.state])

    def _set_out(self, invitation: Invitation, first: Handover) -> None:
        """Stand where the giver stood at the beginning of the step."""
        self.replica = next(join.replica for join in invitation.joins if join.slot == self._runtime.slot)
        self._fresh = self.replica not in invitation.before.live_replicas
        self._go_home(self.replica)
        self._become(first.state)

    def _given(self, invitation: Invitation, what: str, tick: float = _TICK) -> bytes:
        """What the giver leaves.

        Args:
            invitation: To the present change.
            what: Which of it.
            tick: Seconds between looks: members wait for this rank if it comes late.

        Raises:
            Interrupted: If the members have changed first.
        """
        membership = self._runtime.membership
        key = Keys.given(invitation.name, self._runtime.slot, what)
        while True:
            found = membership.find(key)
            if found is not None:
                membership.remove(key)
                given: Given = pickle.loads(found)  # from the job's own store
                if given.failure:
                    raise CannotJoin(f"its peer could not say what its state is: {given.failure}")
                return given.content
            roster = membership.roster
            if max(roster.change, roster.commit) > invitation.number:
                raise Interrupted("the members have changed")
            self._check_job()
            progress.current().tick()
            time.sleep(tick)

    def _check_job(self) -> None:
        """Whether there is anything to wait for. Called between looks.

        Raises:
            TooLate: If the others have ended the fit.
        """
        progress.current().beat()
        if not self._runtime.membership.roster.members:
            self.leave("the training was over before it could join")
        if self._told.is_over():
            raise TooLate

    def _check_job_is_ours(self) -> None:
        """Join nobody who runs something else."""
        while (job := self._told.job()) is None:
            self._check_job()
            time.sleep(_TICK)
        different = differences(self._described(), job)
        if different:
            self.refuse(f"it does not run what the job runs: {different}")

    # ---- in the step ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A micro-batch of that step starts, and its hooks have run: what the giver's had done is done once."""
        started, self._started = self._started, b""
        if started:
            self._become(started, loops=False)

    def micro_batch(self, last: bool) -> Any:
        """In place of a micro-batch of the step in which this rank joins: what the giver's has returned."""
        result = self._become(self._results.popleft())
        if last:
            # after it: the giver's state is of before the change, of which all are told in the same moment
            self.arrive()
        return result

    def arrive(self) -> None:
        """From here on this rank works with the others."""
        assert self._entry is not None and self._outcome is not None
        self._engine.arrive(self._entry, self._outcome.standing)
        self._take_common(self._outcome.common, self._joined)
        self._entry = None

    def _become(self, state: bytes, loops: bool = True) -> Any:
        try:
            joined = self._carried.install(state, fresh_replica=self._fresh, loops=loops)
        except CannotJoin as error:
            self.refuse(str(error))
        new = set(joined.skipped) - self._skipped
        if new:
            self._skipped |= new
            log.warning("slot %d has joined without: %s", self._runtime.slot, "; ".join(sorted(new)))
        return joined.result

    # ---- the rest of the epoch ----------------------------------------------------------------------------------

    def handed(
        self,
        number: int,
        drawn: int,
        joining: Joining,
        recover: Callable[[Interrupted], None],
    ) -> Fetched:
        """The next batch, from the giver, or by its number if there is none.

        Args:
            number: Of the batch, counted through all epochs.
            drawn: Its number in the loader's pass.
            joining: Knows who gives.
            recover: Called if the membership changes meanwhile.
        """
        membership = self._runtime.membership
        with progress.current().polling() as waits:
            while True:
                if self._runtime.interrupted:
                    recover(Interrupted("a newcomer's wait for its batch was interrupted"))
                topology, replica = self._engine.layout, self._runtime.generation.replica
                if joining.giver(topology, replica) < 0:
                    return Fetched(number, (self._fetch(drawn), drawn, 0), False)
                found = membership.find(Keys.batch(replica, number))
                if found is not None:
                    fetched: Fetched = pickle.loads(found)  # from the job's own store
                    return fetched
                waits()
                time.sleep(_TICK / 5)

    # ---- ends -------------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> NoReturn:
        """This rank is no peer of the members: end, and say why. The job goes on without it."""
        log.error("slot %d cannot join: %s", self._runtime.slot, why)
        self._end(REFUSED, "cannot join")

    def leave(self, why: str) -> NoReturn:
        """End in good order."""
        log.warning("slot %d: %s", self._runtime.slot, why)
        self._end(0, why)

    def _end(self, code: int, reason: str) -> NoReturn:
        member = self._runtime.membership.is_member
        runtime.shutdown(reason, others_go_on=member)
        if member:
            code = 0  # as whoever leaves the others: any other would be the job's
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
