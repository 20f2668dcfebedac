"""After losses and returns slots may work at other indices than at launch: on demand they go back, beside a step."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from lightning_ntp.comm import Runtime
from lightning_ntp.engine import RecoveryEngine

log = logging.getLogger("lightning_ntp")


class Relayout:
    """Carries the demand to all ranks, in the vote of a step, and makes the change in the step after.

    Args:
        current: The rank's runtime.
        engine: Plans and makes the change.
        demand: A file by which somebody in a terminal demands it; taken away once it is heard.
    """

    def __init__(self, current: Runtime, engine: RecoveryEngine, demand: Path | None) -> None:
        self._runtime, self._engine, self._demand = current, engine, demand
        self._wanted = self._announced = False

    def request(self) -> None:
        """Do so in one of the next steps. From any rank."""
        self._wanted = True

    def ballot(self) -> tuple[int]:
        """Whether it is wanted."""
        asked = self._runtime.generation.rank == 0 and self._demand is not None and self._demand.exists()
        return (int(self._wanted or asked),)

    def counted(self, votes: tuple[int, ...]) -> None:
        """What the vote has said."""
        self._announced = bool(votes[0])

    def step_done(self, committed: int, gathering: bool) -> None:
        """A step is committed: begin to prepare what was announced in its vote."""
        announced, self._announced = self._announced, False
        if not announced or self._engine.planned is not None:
            return
        self._wanted = False
        first = self._runtime.generation.rank == 0
        if first and self._demand is not None:
            with contextlib.suppress(FileNotFoundError):
                self._demand.unlink()
        if not self._engine.plan_settling() and first:
            log.warning("every slot works at its place of the launch already, as far as its replica has it")

    def change(self) -> None:
        """Make the change that is prepared, if there is one.

        Raises:
            Interrupted: If the membership changes first.
        """
        planned = self._engine.planned
        if planned is not None and planned.settles:
            self._engine.switch()
