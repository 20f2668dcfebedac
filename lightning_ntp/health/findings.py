"""What a source says of a device, and who may be a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from operator import index
from pathlib import Path
from typing import Protocol


class Action(IntEnum):
    """What is done about a finding, from nothing to the worst."""

    IGNORE = 0
    LOG = 1
    """Noted: one line, one event."""
    SUSPECT = 2
    """The slot goes on; it is named in logs, metrics and ``lightning-ntp status``."""
    RESTART = 3
    """The rank ends and is started again on the same device, which is as good as before (a contained error)."""
    DRAIN = 4
    """The slot leaves at the next step boundary, and takes its part of the model along: no step is lost."""
    DEAD = 5
    """The rank ends now: what its device holds cannot be trusted, or will never come."""

    @classmethod
    def of(cls, name: str) -> Action:
        """The action of that name.

        Raises:
            ValueError: If there is none; the message lists them.
        """
        try:
            return cls[name.upper()] if name == name.lower() else cls[""]
        except KeyError:
            raise ValueError(f"{name!r} is no action; there are {', '.join(a.name.lower() for a in cls)}") from None

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """One thing that a source has found out about a device or a slot.

    A *condition* is what a slot or device, a signal and a code name together. It begins with a finding and lasts until
    one that ``clears`` it; a finding without an end, such as an XID, is a condition that ends by the device's check.

    Args:
        signal: What was found, as the severity table names it: ``"xid"``, ``"temperature_margin"``, ``"maintenance"``.
        text: For people: what was read, with its unit.
        gpu: UUID of the device, as the driver writes it; empty if the finding names a slot.
        slot: The slot; -1 if the finding names a device.
        code: Number of the XID, of the recovery action, of the driver's error.
        action: What the source itself asks for; None leaves it to the severity table.
        clears: Whether the condition is over.
        values: Measured numbers for the logs, by name with unit: ``{"temperature_c": 86.0}``.

    Raises:
        ValueError, TypeError: If something of it is of another kind, in the source that has made it. Numbers may be
            numpy's or torch's.
    """

    signal: str
    text: str
    gpu: str = ""
    slot: int = -1
    code: int | None = None
    action: Action | None = None
    clears: bool = False
    values: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.gpu) == (self.slot >= 0):
            raise ValueError(f"finding {self.signal!r} names {'both' if self.gpu else 'neither'} a gpu and a slot: one")
        for name in ("signal", "text", "gpu"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"finding {self.signal!r}: {name}={value!r:.100} is no text")
        if self.action is not None and not isinstance(self.action, Action):
            raise TypeError(f"finding {self.signal!r}: action={self.action!r:.100} is no Action, such as Action.DRAIN")
        # as Python's own numbers: they are written to files
        object.__setattr__(self, "slot", index(self.slot))
        object.__setattr__(self, "code", None if self.code is None else index(self.code))
        object.__setattr__(self, "values", {str(name): float(value) for name, value in self.values.items()})

    @property
    def key(self) -> str:
        """How the severity table calls it: ``xid.79``, ``recovery_action.2``, ``temperature_margin``."""
        return self.signal if self.code is None else f"{self.signal}.{self.code}"


@dataclass(frozen=True)
class WatchedJob:
    """What a source can ask of the job it watches. Any thread may ask.

    Args:
        directory: The job's own, where ranks show their progress; gone when it ends.
        devices: Gives the UUID of the device of every slot that has said it.
        slots: Gives the live slots.
        ending: Whether the job is over: whoever waits returns soon.
        replicas: Gives the replica of every live slot; of none if it is not known.
    """

    directory: Path
    devices: Callable[[], Mapping[int, str]]
    slots: Callable[[], Iterable[int]]
    ending: Callable[[], bool]
    replicas: Callable[[], Mapping[int, int]] = dict


class HealthSource(Protocol):
    """Anything that yields findings; a function will do.

    It is called in a thread of its own in the launching process, again and again with a pause in between. It may
    return a list each time, or be a generator that waits and yields for as long as the job runs. What it raises is
    told once, and it is called again later; what it holds back or repeats holds up nobody.
    """

    def __call__(self, job: WatchedJob) -> Iterable[Finding]: ...
