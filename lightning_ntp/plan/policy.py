"""What to do when slots are lost: a function of the topology, the settings and the failures so far.

The decision is a value with one readable line. Every survivor takes it for itself and comes to the same one, because
all that goes in is agreed: topologies follow from the membership log, and the failures' times must come from there too
(survivors' own clocks differ).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from lightning_ntp.plan.layout import UnitSpace
from lightning_ntp.plan.sharding import Segment, Sharding
from lightning_ntp.plan.topology import Relabel, Topology, TopologyError, as_size


class PolicyError(ValueError):
    """A setting of the policy is out of range, or does not fit the degrees of the job."""


@dataclass(frozen=True)
class RecoveryPolicy:
    """What the user allows.

    Args:
        min_tensor_parallel_size: A replica shrinks down to this degree. Below it, it is dropped: its healthy members
            leave too, and the others go on.
        max_failures: Failures that are tolerated within ``failure_window``; the job ends at the next one. Slots that
            are lost together are one failure. None: any number.
        failure_window: Seconds or a timedelta. None: the whole job.

    Raises:
        PolicyError: If a setting is out of range.
    """

    min_tensor_parallel_size: int = 1
    max_failures: int | None = None
    failure_window: float | timedelta | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(
                self, "min_tensor_parallel_size", as_size("min_tensor_parallel_size", self.min_tensor_parallel_size)
            )
        except TopologyError as error:
            raise PolicyError(str(error)) from None
        limit = self.max_failures
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise PolicyError(f"max_failures={limit!r} is not an integer of at least 0, or None for any number")
        if self.failure_window is None:
            return
        if limit is None:
            raise PolicyError(
                f"failure_window={self.failure_window!r} does nothing without max_failures: say how many failures are"
                " tolerated in it"
            )
        seconds = self.window_seconds
        if isinstance(self.failure_window, bool) or not math.isfinite(seconds) or seconds <= 0:
            raise PolicyError(
                f"failure_window={self.failure_window!r} must be a finite number of seconds above 0, a timedelta, or"
                " None for the whole job"
            )

    @property
    def window_seconds(self) -> float:
        """The window in seconds; infinite for the whole job."""
        window = self.failure_window
        if isinstance(window, timedelta):
            return window.total_seconds()
        if window is None:
            return math.inf
        if not isinstance(window, int | float):
            raise PolicyError(f"failure_window={window!r} is neither a number of seconds nor a timedelta")
        return float(window)

    def check_degrees(self, degrees: Sequence[int]) -> None:
        """Check that every replica may start.

        Raises:
            PolicyError: If a replica starts below the smallest degree.
        """
        for replica, degree in enumerate(degrees):
            if degree < self.min_tensor_parallel_size:
                raise PolicyError(
                    f"min_tensor_parallel_size={self.min_tensor_parallel_size} is above the starting degree {degree} of"
                    f" replica {replica} (degrees={tuple(degrees)}): it would be dropped at the first loss anywhere;"
                    f" use at most {min(degrees)}"
                )


class Action(enum.Enum):
    """How the job goes on after a loss."""

    SHRINK = "shrink"
    """Every replica that lost members goes on at a smaller degree."""
    DROP = "drop"
    """At least one replica is dropped, its healthy members leave; the others go on."""
    CHECKPOINT_AND_END = "checkpoint, then end"
    """The policy forbids going on, but the whole state survives: write it, then end."""
    END = "end"
    """Something has no copy left: end at once."""


@dataclass(frozen=True)
class Decision:
    """What is done about a loss.

    Args:
        action: How the job goes on.
        before: The topology in which the slots were lost.
        lost: The slots that are lost, ascending.
        after: The topology to go on with; for ``CHECKPOINT_AND_END`` the survivors who write the checkpoint; None for
            ``END``.
        relabels: The members that take another index for it.
        dropped: The replicas that this loss takes out of the job.
        released: The healthy slots that leave with them; they can still send what they hold.
        reason: Why the job does more than shrink; empty for ``SHRINK``.
    """

    action: Action
    before: Topology
    lost: tuple[int, ...]
    after: Topology | None
    relabels: tuple[Relabel, ...] = ()
    dropped: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    reason: str = ""

    @property
    def goes_on(self) -> bool:
        return self.action in (Action.SHRINK, Action.DROP)

    def __str__(self) -> str:
        head = f"{name_slots(self.lost)} lost"
        if not self.goes_on:
            return f"{head}: {self.action.value}; {self.reason}"
        assert self.after is not None
        line = f"{head}: degrees {show_degrees(self.before)} -> {show_degrees(self.after)}"
        if self.dropped:
            line += f"; {self.reason}"
        if self.released:
            line += f"; healthy {name_slots(self.released)} {'leaves' if len(self.released) == 1 else 'leave'}"
        moved = ", ".join(f"slot {r.slot} index {r.old} -> {r.new}" for r in self.relabels)
        return f"{line}; {moved}" if moved else line


def decide(
    topology: Topology,
    lost_slots: Iterable[int],
    settings: RecoveryPolicy,
    failures: Sequence[float] = (),
    shardings: Iterable[Sharding] | None = None,
) -> Decision:
    """Decide what to do about the loss of ``lost_slots``.

    Args:
        topology: The members before the loss.
        lost_slots: Who is lost, at least one.
        settings: What the user allows.
        failures: When each failure so far happened, this one included, in seconds of one clock and the same numbers on
            all survivors. Slots that were lost together count once.
        shardings: How the model's parameters are cut, to know exactly whether a copy of everything is left. Without
            them a finely cut dimension is assumed, of which every index gets a part whenever another is dropped.

    Raises:
        TopologyError: If a slot is not alive.
        ValueError: If no slot is lost.
    """
    lost = tuple(sorted(set(lost_slots)))
    if not lost:
        raise ValueError("lost_slots is empty: nothing to decide")
    for slot in lost:
        topology.place(slot)
    if len(lost) == topology.world_size:
        return Decision(Action.END, topology, lost, None, reason="nobody is left; restart from the newest checkpoint")
    missing = _without_copy(topology, set(lost), shardings)
    if missing:
        return Decision(Action.END, topology, lost, None, reason=f"{missing}; restart from the newest checkpoint")
    shrunk, relabels = topology.lose(lost)
    forbidden = _too_many(settings, failures)
    dropped, why = _drops(topology, shrunk, settings)
    if not forbidden and len(dropped) == len(topology.live_replicas):
        forbidden = f"no replica would be left: {why}"
    if forbidden:
        reason = f"{forbidden}; a copy of everything is left"
        return Decision(Action.CHECKPOINT_AND_END, topology, lost, shrunk, relabels, reason=reason)
    if not dropped:
        return Decision(Action.SHRINK, topology, lost, shrunk, relabels)
    released = tuple(sorted(slot for r in dropped for slot in shrunk.replicas[r].values()))
    # all at once rather than one after the other: a replica that goes must not fix which index is dropped
    after, relabels = topology.lose((*lost, *released))
    return Decision(Action.DROP, topology, lost, after, relabels, dropped, released, why)


def show_degrees(topology: Topology) -> str:
    """The degrees of all replicas, a dash for one that is gone: ``(4, 3, -)``."""
    return f"({', '.join(str(degree or '-') for degree in topology.degrees)})"


def name_slots(slots: Sequence[int]) -> str:
    """``slot 5`` or ``slots 5, 6``."""
    return f"slot{'s' if len(slots) != 1 else ''} {', '.join(map(str, slots))}"


def _too_many(settings: RecoveryPolicy, failures: Sequence[float]) -> str:
    """Why the failures forbid going on; empty if they do not."""
    limit = settings.max_failures
    if limit is None:
        return ""
    newest = max(failures, default=0.0)
    recent = sum(1 for time in failures if newest - time < settings.window_seconds)
    if recent <= limit:
        return ""
    window = settings.window_seconds
    during = "in this job" if math.isinf(window) else f"within {window:g} s"
    return f"{recent} failure{'s' if recent != 1 else ''} {during}, and max_failures={limit}"


def _drops(before: Topology, shrunk: Topology, settings: RecoveryPolicy) -> tuple[tuple[int, ...], str]:
    """The replicas that are gone or that shrank below the smallest degree, and why."""
    dropped, reasons = [], []
    least = settings.min_tensor_parallel_size
    for replica in before.live_replicas:
        degree = shrunk.degrees[replica]
        if degree == 0:
            reasons.append(f"replica {replica} is gone")
        elif degree < min(least, before.degrees[replica]):
            reasons.append(f"replica {replica} is dropped (degree {degree} is below min_tensor_parallel_size={least})")
        else:
            continue
        dropped.append(replica)
    return tuple(dropped), ", ".join(reasons)


def _without_copy(topology: Topology, lost: set[int], shardings: Iterable[Sharding] | None) -> str:
    """What no survivor holds a copy of; empty if everything is left."""
    exact = shardings is not None
    family = topology.family
    for sharding in {*shardings} if shardings is not None else {_finely_cut(topology.full_degree)}:
        layouts = {degree: sharding.layouts(family, degree) for degree in set(topology.live_degrees)}
        survivors = [
            (degree, index)
            for degree, members in zip(topology.degrees, topology.replicas, strict=True)
            for index, slot in members.items()
            if slot not in lost
        ]
        for segment in range(len(sharding.unit_sizes)):
            held: set[int] = set()
            for degree, index in survivors:
                held.update(layouts[degree][segment].owned[index])
            count = layouts[min(layouts)][segment].count
            if len(held) < count:
                if not exact:
                    return "some units had their only copies on the lost slots"
                return f"{count - len(held)} of {count} units of a parameter had their only copies on the lost slots"
    return ""


def _finely_cut(full_degree: int) -> Sharding:
    """A dimension with so many units that whenever an index is dropped, every other one gets some of its own."""
    return Sharding(0, (Segment(UnitSpace(full_degree**2), 1),))
