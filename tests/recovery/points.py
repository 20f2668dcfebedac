"""Points inside of a recovery at which a process can kill itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

POINTS = ("agree", "joined", "rebuild", "rebuilt", "receive", "received", "vote", "installed")
"""Before it has joined the agreement; once it has joined; while groups are being built; when they are; before shards
move; when they have, before the vote on them; when it has passed that vote; after it has installed its shards. Of a
planned leave there are "built", "travelled", "gradients" and "switched": when the groups for it are there; when shards
have moved; when gradients have, too; once all have agreed to it."""


def install(deaths: Iterable[tuple[str, int]]) -> None:
    """Let this process die at points; each for the number-th time, counted from 1.

    Args:
        deaths: (point, number).
    """
    from lightning_ntp.comm import neighbour_copies, reshard
    from lightning_ntp.comm.generation import Generation
    from lightning_ntp.comm.membership import Membership
    from lightning_ntp.engine.planned import PlannedChange
    from lightning_ntp.engine.recovery import RecoveryEngine

    places: dict[str, tuple[Any, str, bool]] = {
        "agree": (Membership, "agree", True),
        "joined": (Membership, "_join", False),
        "rebuild": (Generation, "connect", True),
        "rebuilt": (Generation, "install", False),
        "receive": (reshard.Resharding, "receive", True),
        "received": (reshard.Resharding, "receive", False),
        "vote": (RecoveryEngine, "_install", True),
        "installed": (RecoveryEngine, "_install", False),
        "built": (PlannedChange, "_travel", True),
        "travelled": (PlannedChange, "_travel", False),
        "gradients": (reshard.Resharding, "travel_gradients", False),
        "switched": (Membership, "switch", False),
    }
    for point, number in deaths:
        owner, name, before = places[point]
        setattr(owner, name, _dying(getattr(owner, name), number, before))
        if point in ("receive", "received"):  # the way back to neighbours' copies has the same points
            back = neighbour_copies.Restoring
            setattr(back, name, _dying(getattr(back, name), number, before))


def _dying(call: Callable[..., Any], number: int, before: bool) -> Callable[..., Any]:
    """``call`` with a death before or after it."""
    left = number

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if before and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if not before and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return dying
