"""Who works where, and who was sent away and may come back when."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ntp.health.conditions import Limits
from lightning_ntp.health.findings import Action


def slot_name(slot: int) -> str:
    """How the place of a finding is called that names a slot."""
    return f"slot {slot}"


class Places:
    """Which rank works on which device. A *place* is a device's UUID, or a slot's name."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self._devices: dict[int, str] = {}
        self._slots: dict[str, list[int]] | None = None

    def put(self, devices: Mapping[int, str]) -> None:
        """Which slot works on which device, as far as it is known."""
        self._devices, self._slots = dict(devices), None

    def started(self, slot: int) -> None:
        self.live.add(slot)
        self._slots = None

    def ended(self, slot: int) -> None:
        self.live.discard(slot)
        self._slots = None

    def of(self, slot: int) -> set[str]:
        """Where a slot can be found, whether a rank is in it or not."""
        device = self._devices.get(slot)
        return {slot_name(slot)} | ({device} if device else set())

    def slots(self, place: str) -> list[int]:
        """The live slots there."""
        if self._slots is None:
            self._slots = {}
            for slot in sorted(self.live):
                for each in self.of(slot):
                    self._slots.setdefault(each, []).append(slot)
        return self._slots.get(place, [])


class Absences:
    """Slots that were sent away: a device that has failed once must show for how long it does not.

    Args:
        limits: See there.
        places: Who works where.
    """

    def __init__(self, limits: Limits, places: Places) -> None:
        self._limits, self._places = limits, places
        self._out: dict[int, Action] = {}
        self._times: dict[int, int] = {}
        self._bad: dict[str, float] = {}
        """When something that sends a slot away was last seen there."""

    def __contains__(self, slot: int) -> bool:
        return slot in self._out

    def begin(self, slot: int, how: Action) -> None:
        """A rank has gone because of its device."""
        self._out[slot] = how
        if how >= Action.DRAIN:
            self._times[slot] = self._times.get(slot, 0) + 1

    def end(self, slot: int) -> None:
        """A rank is back."""
        self._out.pop(slot, None)

    def bad(self, place: str, now: float) -> None:
        """Something that sends a slot away is seen there."""
        self._bad[place] = now

    def quiet(self, slot: int, now: float) -> float:
        """Seconds since something bad was seen there."""
        return now - max(self._bad.get(place, float("-inf")) for place in self._places.of(slot))

    def still_needs(self, slot: int, now: float) -> float:
        """For how many seconds a device must be quiet, if it has not been; otherwise 0."""
        if self._out.get(slot, Action.IGNORE) < Action.DRAIN:
            return 0.0  # started again on the same device, which is as good as before
        doublings = min(self._times.get(slot, 1) - 1, 32)
        needed = min(self._limits.quiet * 2.0**doublings, self._limits.longest_quiet)
        return 0.0 if self.quiet(slot, now) >= needed else needed

    def pardon(self, slot: int) -> None:
        for place in self._places.of(slot):
            self._bad.pop(place, None)
        self._times.pop(slot, None)
        self._out.pop(slot, None)
