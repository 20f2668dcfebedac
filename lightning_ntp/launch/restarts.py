"""When dead ranks are started again. A state machine over a clock, testable without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from lightning_ntp.launch.console import say

LONGEST_BACKOFF = timedelta(seconds=60)

MayRestart = Callable[[int], bool | str | None]
"""Asked whether the device of a slot is fit for a new rank. False, or a text that says why not, forbids it."""


class Restarts:
    """Plans the restarts of all slots, and says so: one line per event.

    Args:
        most: How often a slot is started again without anybody's asking for it.
        backoff: Before the first restart of a slot; doubled for each further one, up to a minute.
        may_restart: Asked before each restart; if it forbids, again after the backoff.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, most: int, backoff: timedelta, may_restart: MayRestart | None = None) -> None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise ValueError(f"max_restarts={most!r}: give how often a slot may be started again, 0 for never.")
        if backoff < timedelta(0):
            raise ValueError(f"restart_backoff={backoff}: a time to wait cannot be negative.")
        self._most, self._may_restart = most, may_restart
        self._backoff = backoff.total_seconds()
        self._counts: dict[int, int] = {}
        self._due: dict[int, float] = {}
        self._questions: dict[int, _Question] = {}
        self._told: set[tuple[int, str]] = set()

    def gone(self, slot: int, now: float) -> None:
        """The rank in ``slot`` is gone, and the job goes on: plan its restart, if there is one left."""
        if not self._most:
            return
        count = self._counts.get(slot, 0)
        if count >= self._most:
            times = "once" if count == 1 else f"{count} times"
            say(f"slot {slot} is not started again: it was, {times} (max_restarts={self._most})")
            return
        delay = self._delay(slot)
        self._due[slot] = now + delay
        say(f"slot {slot} is started again in {delay:g} s (restart {count + 1} of {self._most})")

    def demanded(self, slot: int) -> None:
        """A person has it started now. What was counted for the slot until now, counts no more."""
        self._counts.pop(slot, None)
        self._due.pop(slot, None)
        self._questions.pop(slot, None)

    def due(self, now: float) -> list[int]:
        """The slots to start now; they are taken as started."""
        ready = [slot for slot, when in self._due.items() if now >= when and self._is_allowed(slot, now)]
        for slot in ready:
            del self._due[slot]
            self._counts[slot] = self._counts.get(slot, 0) + 1
            self._told = {told for told in self._told if told[0] != slot}
        return ready

    def _delay(self, slot: int) -> float:
        """Seconds before the next restart of a slot."""
        longest = max(self._backoff, LONGEST_BACKOFF.total_seconds())
        # the exponent is kept small: a float cannot hold every power of two
        return min(self._backoff * 2.0 ** min(self._counts.get(slot, 0), 64), longest)

    def _is_allowed(self, slot: int, now: float) -> bool:
        if self._may_restart is None:
            return True
        if slot not in self._questions:
            self._questions[slot] = _Question(self._may_restart, slot)
        why = self._questions[slot].answer
        if why is None:
            return False
        del self._questions[slot]
        if not why:
            return True
        delay = self._delay(slot)
        self._due[slot] = now + delay
        if (slot, why) not in self._told:
            self._told.add((slot, why))
            say(f"slot {slot} is not started again yet: {why} (asked again every {delay:g} s)")
        return False


class _Question:
    """Asks in a thread of its own: a look at a device may take seconds, in which the supervisor would see no death."""

    def __init__(self, ask: MayRestart, slot: int) -> None:
        self._ask, self._slot = ask, slot
        self.answer: str | None = None
        """Why not, empty if nothing speaks against it; None until it is known."""
        threading.Thread(target=self._run, name=f"ntp-may-restart-{slot}", daemon=True).start()

    def _run(self) -> None:
        try:
            said = self._ask(self._slot)
        except BaseException as error:
            self.answer = f"may_restart raised {type(error).__name__}: {error}".rstrip(": ")
            return
        if isinstance(said, str):
            self.answer = said
        else:
            self.answer = "" if said is None or said else "may_restart said no"
