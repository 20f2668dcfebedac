"""How a job ended: who failed, which failure is the cause, and the exit code. Pure decisions, no processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from lightning_ntp.launch.report import Report

_REAP_DELAY = 2.0
"""Seconds. The kernel announces the end of a process that holds gigabytes up to seconds after it; peers complain within
milliseconds. A death therefore counts as this much older than its announcement."""


@dataclass(frozen=True)
class Failure:
    """One rank's failure, or (slot -1) the fork server's."""

    slot: int
    summary: str
    """One line: the exception, "killed by SIGKILL", "exit code 3"."""
    exit_code: int
    """Exit code of the job if this is the cause."""
    when: float
    """``time.monotonic()`` in seconds."""
    text: str = ""
    """The traceback, if there is one."""
    signature: str = ""
    """Failures of equal signature are the same."""
    echo: bool = False
    """It only reports that a peer is gone."""
    plain: bool = False
    """The text is a message for people, not a traceback."""


@dataclass(frozen=True)
class Outcome:
    """The end of a job."""

    ranks: int
    exit_code: int
    codes: dict[int, int]
    """Slot -> exit code of its process, negative for a signal."""
    failures: tuple[Failure, ...] = ()
    cause: Failure | None = None
    """The failure that made the job end; the others followed from it."""
    stop_signal: int | None = None
    """The signal that asked the job to stop."""
    result: Any = field(default=None, repr=False)
    """What the call returned in slot 0."""

    def describe(self) -> str:
        """The cause, with its traceback once and the slots it happened in; empty if nothing failed.

        A cause that is no bug is one plain line.
        """
        if self.cause is None:
            return ""
        same = [f.slot for f in self.failures if f.signature == self.cause.signature]
        if self.cause.plain:
            return f"The job has ended: {self.cause.text.rstrip()}\n"
        if self.cause.slot < 0:
            return f"{self.cause.summary}\n"
        lines = [f"{self.cause.text.rstrip()}\n(raised by " if self.cause.text else f"{self.cause.summary}\n(in "]
        lines.append(_who(same, self.ranks))
        others = sorted({f.slot for f in self.failures} - set(same))
        if others:
            first = next(f for f in self.failures if f.slot == others[0])
            lines.append(f"; {_who(others, self.ranks)} failed as a consequence: {first.summary[:120]}")
        return "".join([*lines, ")\n"])


class RanksFailedError(RuntimeError):
    """A call in ranks failed; the message holds the rank's traceback, :attr:`outcome` the rest."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"the ranks did not finish:\n{outcome.describe()}".rstrip())
        self.outcome = outcome


def failure_of(slot: int, code: int, when: float, report: Report | None) -> Failure | None:
    """What the end of one rank means: ``None`` for exit code 0, even if an exception was reported (and caught)."""
    if code == 0:
        return None
    if report is not None:
        return Failure(slot, report.summary, 1, report.when, report.text, report.signature, report.echo, report.plain)
    if code < 0:
        name = _signal_name(-code)
        return Failure(slot, f"killed by {name}", 128 - code, when - _REAP_DELAY, signature=f"killed by {name}")
    return Failure(slot, f"exit code {code}", code, when, signature=f"exit code {code}")


def find_cause(failures: list[Failure]) -> Failure | None:
    """The first failure that is not the echo of another one."""
    return min(failures, key=lambda f: (f.echo, f.when, f.slot), default=None)


def exit_code(codes: dict[int, int], cause: Failure | None, stop_signal: int | None, forced: bool) -> int:
    """The job's exit code.

    Args:
        codes: exit codes of the ranks.
        cause: why it failed, if it did.
        stop_signal: the signal that asked it to stop, if one did; then the ranks' own codes count.
        forced: ranks had to be killed because they did not stop in time.
    """
    if stop_signal is not None:
        return 128 + stop_signal if forced else max((c if c >= 0 else 128 - c for c in codes.values()), default=0)
    return cause.exit_code if cause is not None else 0


def _who(slots: list[int], ranks: int) -> str:
    if len(slots) == ranks and ranks > 1:
        return f"all {ranks} ranks"
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, sorted(slots)))} of {ranks}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
