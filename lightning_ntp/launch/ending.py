"""When the supervisor makes ranks stop. A pure state machine over a clock, testable without processes."""

from __future__ import annotations

import math
import signal
from datetime import timedelta


class Ending:
    """Tells which signal is due to the living ranks.

    - A rank failed alone: the others get ``failure_grace`` to fail in the same way or to finish, then SIGTERM, then
      ``kill_grace`` later SIGKILL. Once all have raised, they get ``stop_grace``: they may be saving a checkpoint.
    - A stop was requested: the ranks have ``stop_grace`` to stop, then SIGKILL; at once if requested twice.
    - Nobody can go on: SIGKILL.
    - Only newcomers are left, which have nobody to join any more: SIGTERM, then ``kill_grace`` later SIGKILL.
    """

    def __init__(self, ranks: int, stop_grace: timedelta, failure_grace: timedelta, kill_grace: timedelta) -> None:
        self._living = set(range(ranks))
        self._raised: dict[int, float] = {}
        self._stop_grace = stop_grace.total_seconds()
        self._failure_grace = failure_grace.total_seconds()
        self._kill_grace = kill_grace.total_seconds()
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self._sent: signal.Signals | None = None
        self._hurry = False
        self._newcomers: set[int] = set()
        self._deserted_at = math.inf
        self.forced = False
        """Ranks that did not stop in time were killed."""
        self.stop_signal: int | None = None

    @property
    def begun(self) -> bool:
        """The job is ending, or nobody is left who could go on."""
        return self._failed_at is not None or self._stopped_at is not None or self.pressed or not self._living

    @property
    def pressed(self) -> bool:
        """Ranks were sent a signal because another one failed: how they end says nothing any more."""
        return self._sent is not None

    def ended(self, slot: int, code: int, now: float) -> None:
        """A rank is gone."""
        self._living.discard(slot)
        if not self._living:
            self._deserted_at = now
        if code != 0 and self._failed_at is None:
            self._failed_at = now

    def came(self, slot: int) -> None:
        """A newcomer was started: the job is not its business yet, and how it ends not the job's."""
        self._newcomers.add(slot)

    def joined(self, slot: int) -> None:
        """A newcomer has become a member."""
        self._newcomers.discard(slot)
        self._living.add(slot)
        self._raised.pop(slot, None)

    def came_to_nothing(self, slot: int) -> None:
        """A newcomer is gone."""
        self._newcomers.discard(slot)

    def raised(self, slot: int, now: float) -> None:
        """A rank reported an exception, and still lives."""
        self._raised.setdefault(slot, now)

    def stop(self, signum: int, now: float) -> None:
        """Somebody asked the job to stop."""
        if self._stopped_at is None:
            self._stopped_at, self.stop_signal = now, signum
        else:
            self._hurry = True

    def give_up(self, now: float) -> None:
        """Nobody can go on: the living ranks are to be killed."""
        self._stopped_at, self._hurry = now, True

    def due(self, now: float) -> signal.Signals | None:
        """The signal to send to all living ranks now, each once."""
        wanted: signal.Signals | None = None
        if not self._living:
            if self._newcomers:
                late = self._hurry or now - self._deserted_at >= self._kill_grace
                wanted = signal.SIGKILL if late else signal.SIGTERM
        elif self._stopped_at is not None:
            if self._hurry or now - self._stopped_at >= self._stop_grace:
                wanted = signal.SIGKILL
        else:
            since, grace = self._trouble()
            if now >= since + grace + self._kill_grace:
                wanted = signal.SIGKILL
            elif now >= since + grace:
                wanted = signal.SIGTERM
        if wanted is None or wanted == self._sent or self._sent == signal.SIGKILL:
            return None
        self._sent = wanted
        self.forced = self.forced or (wanted == signal.SIGKILL and bool(self._living))
        return wanted

    def _trouble(self) -> tuple[float, float]:
        """(since when a rank is in trouble without the others, how long they may go on), in seconds."""
        all_raised = self._living <= self._raised.keys()
        if self._failed_at is not None:
            return self._failed_at, self._stop_grace if all_raised else self._failure_grace
        if self._raised and not all_raised:
            return min(self._raised.values()), self._failure_grace
        # Nobody is in trouble, or all raised and none is gone: the script may catch it and go on.
        return math.inf, 0.0
