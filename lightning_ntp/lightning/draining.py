"""Ranks that are asked to leave do so between two updates: no step is lost, and none is done again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from lightning_ntp.comm import Runtime
from lightning_ntp.engine import RecoveryEngine

log = logging.getLogger("lightning_ntp")


class Draining:
    """Carries requests to all ranks, in the votes of steps, and makes the change in the step after.

    Args:
        current: The rank's runtime.
        engine: Plans and makes the change.
        leave: Ends this process, given the reason; the others go on.
    """

    def __init__(self, current: Runtime, engine: RecoveryEngine, leave: Callable[[str], NoReturn]) -> None:
        self._runtime, self._engine, self._leave = current, engine, leave
        self._requests: dict[int, str] = {}
        self._announced = -1

    def request(self, slot: int, reason: str) -> None:
        """Let a slot leave in one of the next steps. From any rank; asking again changes nothing.

        Raises:
            ValueError: If it cannot leave; says why.
        """
        if isinstance(slot, bool) or not isinstance(slot, int):
            raise ValueError(
                f"drain: slot={slot!r} is no slot's number; live slots are {list(self._engine.layout.slots)}"
            )
        if slot in self._requests:
            return
        why = self._engine.may_leave(slot)
        if why:
            raise ValueError(f"drain: {why}")
        self._requests[slot] = reason or "asked to"
        self._runtime.membership.post(_key(slot), self._requests[slot])

    def ballot(self) -> tuple[int]:
        """The slot to leave next, counted from 1; 0 for none."""
        slots = self._engine.layout.slots
        self._requests = {slot: reason for slot, reason in self._requests.items() if slot in slots}
        return (max(self._requests, default=-1) + 1,)

    def counted(self, votes: tuple[int, ...]) -> None:
        """What the vote has said."""
        self._announced = votes[0] - 1

    def step_done(self, committed: int, gathering: bool) -> None:
        """A step is committed: begin to prepare what was announced in its vote."""
        slot, self._announced = self._announced, -1
        if slot < 0 or self._engine.planned is not None:
            return
        why = self._engine.may_leave(slot)
        if why:
            self._requests.pop(slot, None)
            log.warning("slot %d stays: %s", slot, why)
            return
        self._engine.plan_leave(slot, self._runtime.membership.read(_key(slot)).decode())

    def change(self) -> None:
        """Make the change that is prepared, if there is one. Does not return on the rank that leaves.

        Raises:
            Interrupted: If the membership changes first.
        """
        planned = self._engine.planned
        if planned is None or planned.leaver < 0:
            return
        if not self._engine.switch():
            self._leave(planned.reason)
        self._requests.pop(planned.leaver, None)

    def forget(self) -> None:
        """Training ends, or the membership has changed: whoever asked will ask again in the next vote."""
        self._announced = -1
        self._engine.drop_planned()


def _key(slot: int) -> str:
    return f"drain/{slot}"
