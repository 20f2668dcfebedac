"""A rank hands its traceback to the supervisor, which prints it once instead of every rank printing its own."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from lightning_ntp.launch.environment import JOB_DIR, JOINS, SLOT, UID, is_rank

PLAIN = "__plain_reason__"
"""Class attribute of exceptions that are no bug: their message is all that a person needs."""

_LAUNCH_DIR = os.path.dirname(os.path.abspath(__file__))

_ECHOES = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "socket timeout",
    "timed out",
    "ncclremoteerror",
    "nccl communicator was aborted",
    "enforce fail at gloo",
    "gloo/transport",
    "[gloo",
    "a collective was interrupted",
)


@dataclass(frozen=True)
class Report:
    """An exception as one rank saw it."""

    slot: int
    when: float
    """``time.monotonic()``, comparable between the processes of one machine."""
    summary: str
    """The last line of the traceback."""
    signature: str
    """Equal for exceptions of one type raised at one place, whatever their message: these are printed once."""
    text: str
    """The whole traceback."""
    echo: bool
    """It only says that a peer is gone, so it is never the cause."""
    plain: bool = False
    """The message says everything: a traceback would only bury it."""
    alone: bool = False
    """The others have not raised it and go on: it counts as the death of this rank."""


_alone: bool | None = None
"""None: as the environment says, which a forked rank takes on after this module was imported."""


def report_alone(alone: bool) -> None:
    """In a rank that was started again: say whether it stands alone, as it does until it is a member.

    While it does, what it raises concerns nobody else. Call it with False as soon as the rank is a member: from then
    on it counts for the job like any other, for the supervisor too.
    """
    global _alone
    directory = os.environ.get(JOB_DIR)
    if directory and not alone and os.environ.get(JOINS) == "1":
        member_mark(Path(directory), os.environ[UID]).touch()
    _alone = alone


def member_mark(directory: Path, uid: str) -> Path:
    """The file that says that a process which was started again has become a member."""
    return directory / f"member-{uid}"


def is_newcomer() -> bool:
    """Whether this process was started to join the others at work, and has not become a member."""
    directory = os.environ.get(JOB_DIR)
    joins = os.environ.get(JOINS) == "1"
    return joins and not (directory and member_mark(Path(directory), os.environ[UID]).exists())


def report(exception: BaseException, alone: bool = False) -> bool:
    """Leave ``exception`` for the supervisor. A later report of the same rank replaces it.

    Args:
        exception: What was raised.
        alone: Whether the others go on without this rank; see also :func:`report_alone`.

    Returns:
        Whether it will be printed by the supervisor. False in a process without one, and for SystemExit and
        KeyboardInterrupt, which are no errors.
    """
    directory = os.environ.get(JOB_DIR)
    if not is_rank() or not directory or isinstance(exception, (SystemExit, KeyboardInterrupt)):
        return False
    path = report_path(Path(directory), int(os.environ[SLOT]))
    alone = alone or (os.environ.get(JOINS) == "1" if _alone is None else _alone)
    content = json.dumps(asdict(replace(describe(exception), alone=alone)))
    try:
        # The supervisor must never read half a report.
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    except OSError:  # e.g. a full disk: print it the ordinary way
        return False
    return True


def report_path(directory: Path, slot: int) -> Path:
    """Where the rank in ``slot`` leaves its report."""
    return directory / f"report-{slot}.json"


def read_report(directory: Path, slot: int) -> Report | None:
    """The last report of the rank in ``slot``, if there is one."""
    try:
        return Report(**json.loads(report_path(directory, slot).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def install_excepthook() -> None:
    """In a cold-started rank: report uncaught exceptions instead of printing them (a warm rank does so by itself)."""
    former = sys.excepthook
    if not is_rank() or former is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        if not report(value):
            former(kind, value, tb)

    sys.excepthook = hook


def user_traceback(tb: TracebackType | None) -> TracebackType | None:
    """``tb`` without the leading frames of the launcher and of runpy: as if Python itself had started the script."""
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if not (os.path.dirname(os.path.abspath(file)) == _LAUNCH_DIR or "runpy" in file or file == "<string>"):
            break
        tb = tb.tb_next
    return tb


def describe(exception: BaseException) -> Report:
    """An exception of this rank."""
    tb = user_traceback(exception.__traceback__)
    kind = type(exception)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(tb)]
    message = str(exception)
    plain = bool(getattr(kind, PLAIN, False))
    echo = isinstance(exception, (RuntimeError, ConnectionError)) and any(e in message.lower() for e in _ECHOES)
    return Report(
        slot=int(os.environ.get(SLOT, "0")),
        when=time.monotonic(),
        summary=f"{name}: {message.splitlines()[0] if message else ''}".rstrip(": "),
        signature="|".join([name, *places]),
        text=message if plain else "".join(traceback.format_exception(kind, exception, tb)),
        echo=echo,
        plain=plain,
    )
