"""What befalls which process of a slot, where: the one of the launch, or one that was started again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, Trainer

from tests.lightning.rigs import slot
from tests.recovery.places import befall

_PATIENCE_SECONDS = 60.0

ON_THE_WAY = (
    *("alone", "cut", "stands by", "invited", "made", "built", "travelled", "gradients", "switch", "switched"),
    *("first", "arrived", "vote", "voted", "committed", "handed"),
)
"""Points at which a newcomer can be, in this order: it has no peers yet; its model is cut; it has said that it stands
by; it has read an invitation; it has made states; groups are built; shards have moved; gradients have; before and after
all have agreed; it has its first batch; it works with the others; before and after a vote; before a step is counted;
before it is handed a batch."""
OF_MEMBERS = ("plans", "schema", "captured", "built", "travelled", "gradients", "switch", "switched", "entered", "vote")
"""Points at which a member can be while it lets somebody in."""


class Fate(NamedTuple):
    """A fault of a process."""

    slot: int
    life: int
    """0 for the process of the launch, 1 for the first one that was started again."""
    point: str
    number: int = 1
    """The how many-th time that it comes there, counted from 1."""
    kind: str = "kill"
    """Of :data:`tests.recovery.places.KINDS`."""


def begin_life(directory: Path) -> int:
    """The number of this process among those of its slot."""
    file = directory / f"lives-{slot()}"
    with open(file, "a") as lives:
        lives.write("x")
    return file.stat().st_size - 1


def install(fates: Iterable[Fate], life: int) -> None:
    """Let faults happen to this process at points."""
    mine = [fate for fate in fates if (fate.slot, fate.life) == (slot(), life)]
    if not mine:
        return
    from lightning_ntp import NTPStrategy
    from lightning_ntp.comm.membership import Membership
    from lightning_ntp.comm.reshard import Resharding
    from lightning_ntp.comm.runtime import Runtime
    from lightning_ntp.engine import planned
    from lightning_ntp.engine.recovery import RecoveryEngine
    from lightning_ntp.lightning.arrivals.fit import Arrivals
    from lightning_ntp.lightning.arrivals.joined_state import JoinedState
    from lightning_ntp.lightning.arrivals.newcomer import Newcomer
    from lightning_ntp.lightning.steps.transaction import Transaction

    places: dict[str, tuple[Any, str, bool]] = {
        "alone": (Runtime, "_begin_alone", False),
        "cut": (NTPStrategy, "setup", False),
        "stands by": (Membership, "stand_by", False),
        "invited": (Newcomer, "_take_part", True),
        "made": (JoinedState, "make_states", False),
        "built": (planned, "_travel", True),
        "travelled": (planned, "_travel", False),
        "gradients": (Resharding, "travel_gradients", False),
        "switch": (Membership, "switch", True),
        "switched": (Membership, "switch", False),
        "first": (Newcomer, "first", False),
        "arrived": (RecoveryEngine, "arrive", False),
        "vote": (NTPStrategy, "_vote", True),
        "voted": (NTPStrategy, "_vote", False),
        "committed": (Transaction, "_commit", True),
        "handed": (Newcomer, "handed", True),
        "plans": (RecoveryEngine, "plan_join", False),
        "schema": (JoinedState, "schema", False),
        "captured": (JoinedState, "capture", False),
        "entered": (Runtime, "enter", False),
        "fetch": (Arrivals, "_fetch", True),
        "fetched": (Arrivals, "_fetch", False),
    }
    times: Counter[str] = Counter()
    for point in {fate.point for fate in mine}:
        owner, name, before = places[point]
        here = {fate.number: fate.kind for fate in mine if fate.point == point}

        def reach(point: str = point, here: dict[int, str] = here) -> None:
            times[point] += 1
            if times[point] in here:
                befall(here[times[point]])

        setattr(owner, name, _around(getattr(owner, name), reach, before))


def _around(call: Callable[..., Any], reach: Callable[[], None], before: bool) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if before:
            reach()
        result = call(*args, **kwargs)
        if not before:
            reach()
        return result

    return called


class WaitsForNewcomers(Callback):
    """Before some steps all ranks wait until every process of the job is a member or stands by.

    Args:
        steps: Before which; the change comes in the step after.
        patience: Seconds.
        or_go_on: Whether they go on then, rather than raise.
    """

    def __init__(self, steps: Iterable[int], patience: float = _PATIENCE_SECONDS, or_go_on: bool = False) -> None:
        self._steps, self._patience, self._or_go_on = set(steps), patience, or_go_on

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self._steps:
            self._steps.discard(trainer.global_step)  # once: before a later micro-batch somebody may be lost already
            try:
                wait_until_all_stand_by(trainer, self._patience)
            except TimeoutError:
                if not self._or_go_on:
                    raise


def wait_until_all_stand_by(trainer: Trainer, patience: float = _PATIENCE_SECONDS) -> None:
    runtime = trainer.strategy._runtime
    deadline = time.monotonic() + patience
    while not runtime.joining:
        roster = runtime.membership.roster
        if len({*roster.members, *roster.standby}) >= trainer.strategy.num_processes:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"members {roster.slots}, standing by {sorted(roster.standby)}")
        time.sleep(0.01)
