"""What a journal holds: one line of JSON for each lever of a GPU that somebody has moved, or has reserved."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field

from lightning_ntp.nvml.profiles import MOST_PROFILES, show_profiles
from lightning_ntp.power.owners import Owner

POWER_LIMIT, CLOCKS, PROFILE, CLAIM = "power_limit", "clocks", "profile", "claim"
"""Levers; a claim is none, but says that its owner may move them."""
Value = int | tuple[int, int] | frozenset[int] | None
"""Of a power limit: mW; of locked graphics clocks: the lowest and the highest in MHz, None if they are not locked; of
workload power profiles: the numbers of those that are requested."""
UUID = re.compile(r"GPU-[0-9A-Za-z-]{1,80}")
"""Of a whole GPU: the parts of one that is split (MIG) have no limits and clocks of their own."""
_ALL = (POWER_LIMIT, CLOCKS, PROFILE, CLAIM)
_TOLERANCE_MW = 1000
"""A driver may round a limit; who changes one by hand changes it by a watt at least."""


@dataclass(frozen=True)
class Entry:
    """A lever that was moved.

    Args:
        gpu: UUID.
        lever: ``power_limit``, ``clocks``, ``profile``, or ``claim``.
        first: The value that is to be put back.
        before: The value before the newest write.
        after: The value that the newest write is to give, made or not.
        owner: Who has moved it.
        job: For which job.
        wall: Time of the newest write, in seconds since 1970.
        at: The same since the boot, in seconds; what entries are ordered by, since no clock change moves it.
    """

    gpu: str
    lever: str
    first: Value
    before: Value
    after: Value
    owner: Owner
    job: str = ""
    wall: float = field(default_factory=time.time)
    at: float = field(default_factory=lambda: time.clock_gettime(time.CLOCK_BOOTTIME))

    @property
    def key(self) -> tuple[str, str]:
        return self.gpu, self.lever

    def is_ours(self, now: Value) -> bool:
        """Whether a value is one that the owner has written: the newest write may not have happened any more."""
        if isinstance(now, frozenset):  # an older driver clears and sets them, and who does that may die in between
            known = [each for each in (self.first, self.before, self.after) if isinstance(each, frozenset)]
            return any(now == one & other for one in known for other in known)
        return same(now, self.after) or same(now, self.before)

    def to_line(self) -> bytes:
        record = {name: getattr(self, name) for name in self.__dataclass_fields__} | {"owner": self.owner.record()}
        return json.dumps(record, separators=(",", ":"), default=sorted).encode("ascii") + b"\n"  # sets have no order

    @classmethod
    def from_line(cls, line: bytes) -> Entry:
        """Raises:
        ValueError: If the line is no entry.
        """
        try:
            record = json.loads(line.decode("ascii"))
            owner = Owner.from_record(record.pop("owner"))
            entry = cls(**record, owner=owner)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ValueError(f"no entry of a journal: {error}") from None
        entry._check()
        values = {name: _value(entry.lever, getattr(entry, name)) for name in ("first", "before", "after")}
        return cls(**{**entry.__dict__, **values})

    def _check(self) -> None:
        texts = isinstance(self.gpu, str) and isinstance(self.job, str)
        times = type(self.wall) in (int, float) and type(self.at) in (int, float)
        if not texts or not times or self.lever not in _ALL or not UUID.fullmatch(self.gpu):
            raise ValueError("no entry of a journal: it names no GPU, lever or time")


def same(one: Value, other: Value) -> bool:
    """Whether two values are the same, but for what a driver rounds."""
    if isinstance(one, int) and isinstance(other, int):
        return abs(one - other) < _TOLERANCE_MW
    return one == other


def show(lever: str, value: Value) -> str:
    """A value for people."""
    if lever == POWER_LIMIT and isinstance(value, int):
        return f"{value / 1000:g} W"
    if isinstance(value, frozenset):
        return f"profile{'s' * (len(value) > 1)} {show_profiles(value)}" if value else "no profile"
    return f"{value[0]} to {value[1]} MHz" if isinstance(value, tuple) else "unlocked"


def unlike(lever: str, now: Value, expected: Value, written: bool = True) -> str:
    """That a lever that can be read is elsewhere.

    Args:
        lever: Which one.
        now: What it says.
        expected: What it would say if nobody had touched it.
        written: Whether that was written; otherwise it was there before.
    """
    if lever == PROFILE:
        return f"requested now: {show(lever, now)}, not {show(lever, expected)} as {'written' if written else 'before'}"
    since = "that were written" if written else "of before"
    return f"the limit is {show(lever, now)}, not the {show(lever, expected)} {since}"


def _value(lever: str, value: object) -> Value:
    if lever == POWER_LIMIT and type(value) is int and 0 < value < 10**8:
        return value
    if lever in (CLOCKS, CLAIM) and value is None:
        return None
    if lever == PROFILE and isinstance(value, list) and len(value) <= MOST_PROFILES:
        if all(type(each) is int and 0 <= each < MOST_PROFILES for each in value):
            return frozenset(value)
    if lever == CLOCKS and isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value):
        return value[0], value[1]
    raise ValueError(f"no entry of a journal: {value!r} is no value of {lever}")
