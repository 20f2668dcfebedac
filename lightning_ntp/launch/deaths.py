"""The supervisor's side of recovery: it tells the survivors of a death at once, and lets them go on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Container
from typing import Any

from lightning_ntp.launch.console import say
from lightning_ntp.launch.exits import ExitWatch
from lightning_ntp.launch.log import FINISHED, RECOVERABLE, Log, dismissed_key, left_key, released_key
from lightning_ntp.launch.obituary import announce_death

LOOK_SECONDS = 0.006
"""Between looks at the processes, once the ranks recover from deaths."""


class Deaths:
    """Announces deaths in a job whose ranks have said that they recover from them.

    Args:
        store: The job's store.
        uids: Slot -> unique id of its process.
        reason: Given a slot and how its process went, why it counts as dead; None if it does not, because it has
            reported an exception that ends the job.
        newcomers: Slots whose process is no member yet: nobody needs it, and nothing is said of its death.
    """

    def __init__(
        self,
        store: Any,
        uids: dict[int, str],
        reason: Callable[[int, str], str | None],
        newcomers: Container[int] = frozenset(),
    ) -> None:
        self._store, self._uids, self._reason, self._newcomers = store, uids, reason, newcomers
        self._log: Log | None = Log(store)
        self._watch = ExitWatch()
        self._pids: dict[int, int] = {}
        self._living: set[int] = set()
        self._told = False
        self._condemned: dict[int, str] = {}
        self.slots: set[int] = set()
        """Slots whose last member's death was announced."""

    @property
    def expected(self) -> bool:
        """Whether the ranks have said that they recover from deaths. Asks the store until they have."""
        if not self._told and self._store is not None:
            self._told = bool(self._store.check([RECOVERABLE]))
        return self._told

    def started(self, slot: int, pid: int) -> None:
        self._pids[slot] = pid
        self._living.add(slot)
        self._watch.add(slot, pid)

    @property
    def watched(self) -> list[int]:
        """Slots of members that live and shall go on living."""
        return sorted(slot for slot in self._living - self._condemned.keys() if slot not in self._newcomers)

    @property
    def arriving(self) -> list[int]:
        """Slots of newcomers that live and shall go on living."""
        return sorted(slot for slot in self._living - self._condemned.keys() if slot in self._newcomers)

    def pid(self, slot: int) -> int | None:
        """Of a process that lives."""
        return self._pids[slot] if slot in self._living else None

    def stopped(self) -> set[int]:
        """Slots of processes that are stopped (SIGSTOP)."""
        return self._watch.stopped() & self._living - self._condemned.keys()

    def kill(self, slot: int, why: str) -> None:
        """Kill a process that hangs. It is declared dead once the kernel says that it is: never before.

        Args:
            why: Told as the reason of its death.
        """
        if slot in self._living and slot not in self._watch.exiting():
            self._condemned[slot] = why
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[slot], signal.SIGKILL)

    def why_killed(self, slot: int) -> str:
        """Why the process in a slot was killed from here; empty if it was not."""
        return self._condemned.get(slot, "")

    def look(self) -> None:
        """Announce who has begun to exit without a farewell."""
        for slot, how in self._watch.exiting().items():
            # of a newcomer it is not known yet whether it has ended well: it has nobody to say farewell to
            if slot in self._living and (how or slot not in self._newcomers):
                self._gone(slot, how or "killed")

    def ended(self, slot: int, how: str) -> None:
        """The parent has reaped a rank."""
        if slot in self._living and self.expected:
            self._gone(slot, how)
        self._forget_process(slot)

    def left_early(self, slot: int) -> bool:
        """Whether the process in a slot has left in good order before the work was done."""
        key = left_key(self._uids[slot])
        return self.expected and self._store.check([key]) and self._store.get(key).decode() != FINISHED

    def was_released(self, slot: int) -> bool:
        """Whether it has left only because the others had no place for it."""
        return self.expected and self._store.check([released_key(self._uids[slot])])

    def end_dismissed(self) -> None:
        """Kill newcomers that the members could not wait for: they may hang, and another one may do better."""
        for slot in self.arriving if self.expected else ():
            key = dismissed_key(self._uids[slot])
            if self._store.check([key]):
                self.kill(slot, f"the others have waited for it in vain: {self._store.get(key).decode()}")

    def replaced(self, slot: int) -> None:
        """The process in a slot has ended, and there will be another one."""
        self._forget_process(slot)
        self._condemned.pop(slot, None)

    def close(self) -> None:
        """Let go of the store at once: in a process forked later, its destructor would wait for a thread of ours."""
        self._watch.close()
        self._store = self._log = None
        self._reason = lambda slot, how: None

    def _gone(self, slot: int, how: str) -> None:
        how = self._condemned.get(slot, how)
        self._forget_process(slot)
        reason = self._reason(slot, how)
        if reason is None or not announce_death(self._store, self._uids[slot], slot, reason, self._log):
            return
        if slot in self._newcomers:
            return
        self.slots.add(slot)
        left = sum(each not in self._newcomers for each in self._living)
        if left or slot in self._condemned:
            go_on = f"; {left} rank{'s go' if left > 1 else ' goes'} on" if left else ""
            say(f"slot {slot} (pid {self._pids[slot]}) died: {reason}{go_on}")

    def _forget_process(self, slot: int) -> None:
        self._living.discard(slot)
        self._watch.remove(slot)
