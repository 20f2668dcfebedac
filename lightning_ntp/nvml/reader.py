"""Reads one device: everything that it supports, by UUID, whatever fails in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_ntp.nvml.errors import NOT_FOUND, SUCCESS, UNINITIALIZED, CallError, Kind
from lightning_ntp.nvml.fields import (
    DEVICE_FIELDS,
    LINK_COUNT,
    TOTAL_DATA_ERRORS,
    TOTAL_LINK_ERRORS,
    Field,
    LinkFields,
    number,
)
from lightning_ntp.nvml.library import Library
from lightning_ntp.nvml.queries import QUERIES, Query, Values
from lightning_ntp.nvml.readings import SIGNALS, Link, Reading

_ASK_AGAIN_SECONDS = 600.0
"""What was not supported may be by now: MIG and ECC are switched while a driver runs."""
_FIELDS = "nvmlDeviceGetFieldValues"


@dataclass
class Poll:
    """What one look at a device has given.

    Args:
        reading: What could be read.
        errors: By what was asked: errors that may go by.
        lost: Why the device cannot be read at all, if so; the rest is then as far as it came.
        notes: For the log: what this process may not ask.
    """

    reading: Reading
    errors: dict[str, CallError] = field(default_factory=dict)
    lost: CallError | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything that the device supports was answered, and that is not nothing."""
        return self.lost is None and not self.errors and len(self.reading.unsupported) < len(SIGNALS)


class DeviceReader:
    """Reads one device, or what a MIG instance and the device it is a part of say together.

    What a device does not support is asked again after a new start of NVML, and every ten minutes. A MIG instance is
    asked first, and the device for what it refuses.

    Args:
        gpu: UUID of the device or MIG instance.
        library: NVML.
    """

    def __init__(self, gpu: str, library: Library) -> None:
        self._gpu, self._library = gpu, library
        self._handles: list[Any] = []
        self.epoch = -1
        """In which NVML has given the handles."""
        self._support: dict[str | Field, int] = {}
        """By query or field: the first handle that may support it; beyond the last one if none does."""
        self._opened = 0.0
        self._links: list[LinkFields] = []
        self._fields: list[Field] = []
        self._noted: set[str] = set()
        self._values: dict[str, float] = {}
        self._found: dict[Field, float] = {}

    def poll(self) -> Poll:
        """Look at the device.

        Raises:
            Renewed: If NVML was started again meanwhile: look again.
        """
        poll = Poll(Reading(self._gpu, time.monotonic()))
        self._values, self._found = {}, {}
        links: dict[int, Link] = {}
        try:
            self._open(poll)
            self._read_fields(self._fields, poll)
            links = self._read_links(poll)
            self._read_queries(poll)
        except CallError as error:
            if error.kind in (Kind.LOST, Kind.RESET):
                poll.lost = error
            elif error.kind in (Kind.UNSUPPORTED, Kind.PERMISSION):
                self._note(error, poll)
            else:
                poll.errors[error.call] = error
            self.close()
        unknown = frozenset(s for s, keys in SIGNALS.items() if not any(key in self._values for key in keys))
        poll.reading = Reading(self._gpu, poll.reading.at, self._values, links, unknown)
        return poll

    def close(self) -> None:
        """Forget the handles: the device is looked up again."""
        self._handles = []

    # ---- handles ----------------------------------------------------------------------------------------------

    def _open(self, poll: Poll) -> None:
        epoch, now = self._library.epoch, time.monotonic()
        if self._handles and epoch == self.epoch and now - self._opened < _ASK_AGAIN_SECONDS:
            return
        self._handles, self._support = [], {}
        self.epoch, self._opened = epoch, now
        handles = [self._look_up()]
        if self._gpu.startswith("MIG"):
            handles.append(self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handles[0]))
        self._handles = handles
        self._read_fields([LINK_COUNT], poll)
        self._links = [LinkFields.of(link) for link in range(int(self._found.get(LINK_COUNT, 0)))]
        self._fields = [LINK_COUNT, *DEVICE_FIELDS]
        if self._links:
            self._fields += [*TOTAL_DATA_ERRORS, *TOTAL_LINK_ERRORS]
        for link in self._links:
            self._fields += [link.state, *link.errors]

    def _look_up(self) -> Any:
        return self._ask("nvmlDeviceGetHandleByUUID", self._gpu)

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._library.ask(name, self._gpu, self.epoch, *arguments)

    # ---- what a device says -----------------------------------------------------------------------------------

    def _first_answer(self, name: str, call: Callable[[Any], Any], poll: Poll) -> Any:
        """Make a call with the first handle that supports it. None if it fails, or none does."""
        for at in range(self._support.get(name, 0), len(self._handles)):
            try:
                return call(self._handles[at])
            except CallError as error:
                if not self._is_unsupported(name, error, poll):
                    return None
            self._support[name] = at + 1
        return None

    def _is_unsupported(self, what: str, error: CallError, poll: Poll) -> bool:
        """Whether the handle does not support what was asked; what may go by is noted.

        Raises:
            CallError: If it is about the device, or the driver.
        """
        if error.code == NOT_FOUND:
            self._look_up()  # raises if it is the device that is not found
            return True
        if error.kind in (Kind.DRIVER, Kind.RESET, Kind.LOST) or error.code == UNINITIALIZED:
            raise error
        if error.kind is Kind.RETRY:
            poll.errors[what] = error
            return False
        if error.kind is Kind.PERMISSION:
            self._note(error, poll)
        return True

    def _note(self, error: CallError, poll: Poll) -> None:
        if error.call not in self._noted:
            self._noted.add(error.call)
            poll.notes.append(f"{self._gpu}: {error}: this is not watched")

    def _read_queries(self, poll: Poll) -> None:
        for query in QUERIES:
            if query.unless in self._values or query.unless_failed in poll.errors:
                continue
            self._values |= self._first_answer(query.name, partial(self._read_query, query), poll) or {}

    def _read_query(self, query: Query, handle: Any) -> Values:
        return query.read(self._ask, handle, self._values)

    def _read_fields(self, wanted: Iterable[Field], poll: Poll) -> None:
        """Read fields, all of a handle in one call; each has its own answer."""
        lost: list[CallError] = []
        for at, handle in enumerate(self._handles):
            asked = [each for each in wanted if self._support.get(each, 0) == at]
            if not asked:
                continue
            try:
                found = self._ask(_FIELDS, handle, [(each.id, each.scope) for each in asked])
            except CallError as error:
                if self._is_unsupported(_FIELDS, error, poll):
                    self._support |= dict.fromkeys(asked, at + 1)
                continue
            for each, value in zip(asked, found, strict=True):
                try:
                    self._take_field(each, value, at, poll)
                except CallError as error:
                    lost.append(error)
        if lost:  # once everything else was taken: what it takes to get the device back may be among it
            raise lost[0]

    def _take_field(self, asked: Field, value: Any, at: int, poll: Poll) -> None:
        if value.nvmlReturn == SUCCESS:
            found = number(value)
            if found is not None:
                self._found[asked] = found = found * asked.factor
                if asked.key:
                    self._values[asked.key] = found
            return
        what = f"{_FIELDS}({asked.key or asked.id})"
        if self._is_unsupported(what, CallError(what, value.nvmlReturn), poll):
            self._support[asked] = at + 1

    # ---- NVLink -----------------------------------------------------------------------------------------------

    def _read_links(self, poll: Poll) -> dict[int, Link]:
        links: dict[int, Link] = {}
        counted = False
        for link in self._links:
            state = self._found.get(link.state)
            if state is None:  # before Hopper there is no field for it
                state = self._first_answer(f"link {link.link}", partial(self._read_link_state, link.link), poll)
            errors = [self._found[each] for each in link.errors if each in self._found]
            counted = counted or bool(errors)
            if state is not None:
                links[link.link] = Link(int(state), sum(errors))
        totals = [*TOTAL_DATA_ERRORS, *(() if counted else TOTAL_LINK_ERRORS)]
        sums = [self._found[each] for each in totals if each in self._found]
        if counted or sums:
            self._values["nvlink_errors"] = sum(each.errors for each in links.values()) + sum(sums)
        if links:
            self._values["nvlink_active"] = float(sum(each.active for each in links.values()))
        return links

    def _read_link_state(self, link: int, handle: Any) -> int:
        return int(self._ask("nvmlDeviceGetNvLinkState", handle, link))
