"""The hand on one GPU's levers, inside the helper: it moves them within bounds, and writes everything down before.

All its methods but :meth:`Hand.known` run in the GPU's own thread, where the driver may hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_ntp.nvml.errors import CallError
from lightning_ntp.power.entries import CLOCKS, POWER_LIMIT, Value, same, show, unlike
from lightning_ntp.power.journal import LEVERS, Journal, Leftovers, Taken
from lightning_ntp.power.levers import Bounds, Levers
from lightning_ntp.power.putting_back import Result, Status, failure, put_back
from lightning_ntp.power.scan import Say

MAXIMUM = "maximum"
"""A ceiling: the highest limit that the hardware has. Otherwise it is the limit that the operator has set."""


@dataclass(frozen=True)
class Open:
    """A GPU whose levers may be moved.

    Args:
        limit_mw: Its limit at that time, in mW.
        bounds: What the driver takes.
        ceiling_mw: The highest limit that may be set, in mW.
    """

    limit_mw: int
    bounds: Bounds
    ceiling_mw: int


class Hand:
    """See the module.

    Args:
        levers: Of the GPU.
        journal: This process's.
        leftovers: What dead owners have left.
        ceiling: :data:`MAXIMUM`, or nothing for the limit that is found.
        say: For the log.
    """

    def __init__(self, levers: Levers, journal: Journal, leftovers: Leftovers, ceiling: str, say: Say) -> None:
        self.gpu, self._levers, self._journal, self._leftovers = levers.gpu, levers, journal, leftovers
        self._ceiling, self._say = ceiling, say
        self._guard = threading.Lock()
        self._open: Open | None = None
        self._values: dict[str, Value] = {}
        self._job = ""
        self._foreign: dict[str, str] = {}
        """By lever: what somebody else has done to it."""
        self._said: set[str] = set()

    def known(self) -> tuple[Open | None, dict[str, Value]]:
        """What is known of the GPU, without asking it: how it was opened, and the values of its levers. Any thread."""
        with self._guard:
            return self._open, dict(self._values)

    def open(self, job: str, clocks_mhz: tuple[int, int] | None = None) -> Open | Result:
        """Take the GPU for a job.

        Args:
            job: Its name.
            clocks_mhz: The range to which its clocks are locked already, as the job knows it: no call says it.

        Returns:
            What may be done with it, or why nothing may.
        """
        result = self.close()
        if not result.over:
            return replace(result, why=f"what was written before is not put back: {result.why}")
        for last in (False, True):
            self._leftovers.refresh()
            result = self.put_back_leftovers()
            if not result.over:
                return replace(result, why=f"what a dead owner has left is not put back: {result.why}")
            try:
                self._journal.claim(self.gpu, job)
                break
            except Taken as error:
                if last or error.lives:
                    return Result(Status.REFUSED, str(error))
                # its owner has died meanwhile
            except OSError as error:
                return Result(Status.FAILED, f"the journal cannot be written: {error}")
        try:
            bounds, limit = self._levers.bounds(), self._levers.limit()
        except CallError as error:
            self._unclaim()
            return failure(error)
        if clocks_mhz is not None and not _fits(clocks_mhz, bounds.clocks_mhz):
            self._unclaim()
            between = f"between {bounds.clocks_mhz[0]} and {bounds.clocks_mhz[1]} MHz" if bounds.clocks_mhz else "known"
            return Result(
                Status.REFUSED, f"its clocks are locked to {clocks_mhz}, says the job, which is not {between}"
            )
        ceiling = bounds.limit_mw[1] if self._ceiling == MAXIMUM else min(limit, bounds.limit_mw[1])
        opened = Open(limit, bounds, ceiling)
        with self._guard:
            self._open, self._job, self._values = opened, job, {POWER_LIMIT: limit, CLOCKS: clocks_mhz}
        return opened

    def move(self, lever: str, value: Value) -> Result:
        """Write a value.

        Args:
            lever: ``power_limit``, ``clocks`` or ``profile``.
            value: As in :data:`~lightning_ntp.power.entries.Value`.

        Returns:
            What has become of it. Raises nothing of NVML's or of the disk's.
        """
        try:
            why = self._refusal(lever, value)
            if why:
                return Result(Status.REFUSED, why)
            if value is None or isinstance(value, tuple):
                return self._move_clocks(value)
            return self._move_what_can_be_read(lever, value)
        except CallError as error:
            return failure(error)
        except OSError as error:
            return Result(Status.FAILED, f"the journal cannot be written: {error}")

    def put_back(self) -> Result:
        """Give all levers their first values. What could not be put back stays in the journal.

        Returns:
            The worst of what has become of them.
        """
        results = []
        for lever in LEVERS:
            entry = self._journal.get(self.gpu, lever)
            if entry is None:
                continue
            newer = lever == CLOCKS and self._journal.newer_elsewhere(entry)
            result = put_back(self._levers, entry, newer)
            self._tell(result, f"{self.gpu}: {show(lever, entry.first)} of job {entry.job!r}")
            if result.over:
                self._forget(lever)
                with self._guard:
                    self._values[lever] = entry.first if result.status is Status.DONE else result.now
                if result.status is Status.LEFT:
                    self._foreign[lever] = result.why
            results.append(result)
        return _worst(results)

    def put_back_leftovers(self) -> Result:
        """Give levers the values that they had before owners that are dead now have moved them."""
        results = []
        for entry in self._leftovers.entries(self.gpu):
            result = put_back(self._levers, entry, self._leftovers.newer_elsewhere(entry))
            self._tell(result, f"{self.gpu}: {show(entry.lever, entry.first)} after the death of {entry.owner}", True)
            if result.over:
                self._leftovers.drop(entry)
            results.append(result)
        return _worst(results)

    def close(self) -> Result:
        """Put everything back and, if that is done, let go of the GPU."""
        result = self.put_back()
        if result.over:
            with self._guard:
                self._open, self._values = None, {}
            self._foreign = {}
            self._unclaim()
        return result

    # ---- one lever --------------------------------------------------------------------------------------------

    def _refusal(self, lever: str, value: Value) -> str:
        """Why a value may not be written; empty if it may.

        Raises:
            CallError: If the GPU does not say which profiles it has. It is only asked when one is wanted: a driver that
                has trouble with them keeps nobody from the other levers.
        """
        opened, _ = self.known()
        if opened is None:
            return "it was not taken"
        if lever in self._foreign:
            return f"{self._foreign[lever]}; say hello again to begin from there"
        if isinstance(value, int):
            lowest, highest = opened.bounds.limit_mw[0], opened.ceiling_mw
            if not lowest <= value <= highest:
                between = f"{lowest / 1000:g} and {highest / 1000:g} W"
                return f"{value / 1000:g} W is not between {between}, the minimum and the ceiling"
        elif isinstance(value, frozenset):
            return self._levers.profiles().refusal(value)
        elif value is not None:
            if opened.bounds.clocks_mhz is None:
                return "it does not say which clocks it has"
            lowest, highest = opened.bounds.clocks_mhz
            if not lowest <= value[0] <= value[1] <= highest:
                return f"{show(lever, value)} is no range between {lowest} and {highest} MHz"
        return ""

    def _move_what_can_be_read(self, lever: str, value: int | frozenset[int]) -> Result:
        now = self._levers.read(lever)
        entry = self._journal.get(self.gpu, lever)
        known = self.known()[1].get(lever, now)
        if not same(now, known if entry is None else entry.first) and (entry is None or not entry.is_ours(now)):
            # written over, it would be lost which one somebody wants
            what = unlike(lever, now, known, written=False)
            self._foreign[lever] = f"{what}: somebody else has changed it, or the GPU was reset"
            self._say(f"{self.gpu}: {self._foreign[lever]}; it is left as it is")
            self._forget(lever)
            self._know(lever, now)
            return Result(Status.REFUSED, f"{self._foreign[lever]}; say hello again to begin from there", now)
        self._journal.record(self.gpu, lever, now, value, self._job)
        error: CallError | None = None
        try:
            self._levers.write(value)
        except CallError as refused:
            error = refused  # which need not mean that nothing was written
        # a value that is neither is the driver's own idea of it: rather a race lost once than one never put back
        now = self._levers.read(lever)
        self._journal.settle(self.gpu, lever, now)
        self._know(lever, now)
        if error is not None:
            return replace(failure(error), now=now)
        if not same(now, value):
            return Result(Status.FAILED, unlike(lever, now, value), now)
        return Result(Status.DONE, now=now)

    def _move_clocks(self, value: tuple[int, int] | None) -> Result:
        _, values = self.known()
        before = values[CLOCKS]
        entry = self._journal.get(self.gpu, CLOCKS)
        if entry is not None and self._journal.newer_elsewhere(entry):
            self._foreign[CLOCKS] = "another owner has locked its clocks since"
            self._forget(CLOCKS)
            return Result(Status.REFUSED, f"{self._foreign[CLOCKS]}; say hello again to begin from there")
        self._journal.record(self.gpu, CLOCKS, before, value, self._job)
        try:
            if value is None:
                self._levers.unlock_clocks()
            else:
                self._levers.lock_clocks(*value)
        except CallError as error:
            if entry is None and not self._may_be_locked(error):
                self._journal.settle(self.gpu, CLOCKS, None)
            return replace(failure(error), now=before)
        self._journal.settle(self.gpu, CLOCKS, value)
        self._know(CLOCKS, value)
        return Result(Status.DONE, now=value)

    @staticmethod
    def _may_be_locked(error: CallError) -> bool:
        """Whether a call that has failed may have locked the clocks: who was refused cannot unlock them either."""
        return failure(error).status is Status.FAILED

    # ---- small things -----------------------------------------------------------------------------------------

    def _know(self, lever: str, value: Value) -> None:
        with self._guard:
            self._values[lever] = value

    def _forget(self, lever: str) -> None:
        self._disk(lambda: self._journal.drop(self.gpu, lever))

    def _unclaim(self) -> None:
        self._disk(lambda: self._journal.unclaim(self.gpu))

    def _disk(self, change: Callable[[], None]) -> None:
        try:
            change()
        except OSError as error:  # whoever finds the entry again finds the value where it belongs
            self._say(f"the journal cannot be written: {error}")

    def _tell(self, result: Result, what: str, done_too: bool = False) -> None:
        """Say what was put back, or why not; not again at every try."""
        if result.status is Status.DONE:
            if done_too or self._said:
                self._say(f"{what}: put back")
            self._said.clear()
            return
        line = f"{what}: {'left as it is' if result.over else 'not put back yet'}: {result.why}"
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def _fits(clocks_mhz: tuple[int, int], bounds: tuple[int, int] | None) -> bool:
    return bounds is not None and bounds[0] <= clocks_mhz[0] <= clocks_mhz[1] <= bounds[1]


def _worst(results: list[Result]) -> Result:
    for result in results:
        if not result.over:
            return result
    for result in results:
        if result.status is Status.LEFT:
            return result
    return results[0] if results else Result(Status.DONE)
