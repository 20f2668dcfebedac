"""A file in which people and cluster managers write what they want of a job's slots."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightning_ntp.health.findings import Finding, WatchedJob
from lightning_ntp.health.sources.board import Board, wait
from lightning_ntp.health.sources.entries import MOST_ENTRIES, Entry, EntryError, parse_line

_MOST_BYTES = 1 << 20
_RECENT_SECONDS = 3.0
"""A file that has changed so recently may change once more without another time of change, or be unfinished."""
_Version = tuple[int, int, int, int]


class FileSource:
    """Yields what a file says: one entry a line, ``slot 3 drain maintenance at 18:00`` or JSON, see
    :mod:`~lightning_ntp.health.sources.entries`.

    The file is read again whenever it changes, and may be replaced or appended to at any time. Removing a line ends
    what it asks for. A last line without its line break is unfinished for 3 s. While there is no file nothing is asked
    for; while it cannot be read (no permission, more than 1 MiB, a directory, a pipe) all stays as it was.

    Args:
        path: The file, on the launching machine.
        interval: Seconds between two looks.

    Raises:
        ValueError: If ``interval`` is no number of seconds.
    """

    def __init__(self, path: str | Path, interval: float = 1.0) -> None:
        if not 0.01 <= interval <= 3600:
            raise ValueError(f"interval={interval!r} must be a number of seconds from 0.01 to 3600")
        self.path, self.interval = Path(path).absolute(), float(interval)
        self._reader = _Reader(self.path)

    def __call__(self, job: WatchedJob) -> Iterable[Finding]:
        while not job.ending():
            yield from self.look(job)
            wait(job, self.interval)

    def look(self, job: WatchedJob) -> list[Finding]:
        """Look once: what has changed since the last look."""
        if self._reader.job is not job:
            self._reader = _Reader(self.path, job)
        return self._reader.look(job)


@dataclass(frozen=True)
class _Content:
    lines: tuple[str, ...] = ()
    version: _Version | None = None
    settled: bool = True
    """Whether it is known to be all that this version says."""
    problem: str = ""


class _Reader:
    """What was read for one job."""

    def __init__(self, path: Path, job: WatchedJob | None = None) -> None:
        self.job = job
        self._path = path
        self._board = Board(str(path))
        self._content = _Content()
        self._entries: list[Entry] = []

    def look(self, job: WatchedJob) -> list[Finding]:
        content = self._read()
        if content is not self._content:
            self._content = content
            if content.problem:
                self._board.complain([content.problem])
            else:
                self._parse(content)
        return self._board.look(self._entries, job)

    def _parse(self, content: _Content) -> None:
        self._entries, problems = [], []
        for number, line in enumerate(content.lines, 1):
            try:
                entry = parse_line(line)
            except EntryError as error:
                problems.append(f"line {number}: {error}")
                continue
            if entry is not None:
                self._entries.append(entry)
        self._board.complain(problems)

    def _read(self) -> _Content:
        """What is in the file; the same object as before if nothing has changed."""
        try:
            found = os.stat(self._path)
            version = found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
            if version == self._content.version and self._content.settled:
                return self._content
            if not stat.S_ISREG(found.st_mode):
                return _Content(version=version, problem="it is no regular file: it is not read")
            if found.st_size > _MOST_BYTES:
                return _Content(version=version, problem=f"it has more than {_MOST_BYTES} bytes: it is not read")
            # the file may have become a pipe meanwhile
            handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(handle, "rb") as file:
                raw = file.read(_MOST_BYTES + 1) or b""
        except FileNotFoundError:
            return _Content()
        except (OSError, ValueError) as error:
            return _Content(problem=f"it cannot be read: {getattr(error, 'strerror', None) or error}")
        settled = not 0 <= time.time() - found.st_mtime < _RECENT_SECONDS
        text = raw[:_MOST_BYTES].decode("utf-8-sig", errors="replace")
        lines = text.split("\n")
        if not settled:
            lines.pop()  # empty, or not all of a line
        if len(lines) > MOST_ENTRIES:
            return _Content(version=version, problem=f"it has more than {MOST_ENTRIES} lines: it is not read")
        return _Content(tuple(lines), version, settled)
