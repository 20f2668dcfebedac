"""Files of journals: where they lie, how they are written so that they are whole, and by what their owner holds one.

There is one file per owner. It is replaced as a whole at every change, so it holds the entries of before or of after.
The owner keeps it locked (``flock``), which the kernel ends with the process, in whatever container it was; pid and
start time have the word where a file system has no locks.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_ntp.power.entries import Entry
from lightning_ntp.power.owners import Owner

DIRECTORY_VARIABLE = "LIGHTNING_NTP_POWER_DIR"
"""Where journals lie, if it is set."""
_SYSTEM_DIRECTORY = "/var/lib/lightning_ntp/power"
SUFFIX = ".jsonl"


def default_directory() -> Path:
    """``$LIGHTNING_NTP_POWER_DIR``; else ``/var/lib/lightning_ntp/power`` if this process may write there; else
    ``lightning_ntp/power`` in ``$XDG_STATE_HOME`` or ``~/.local/state``. It need not exist."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        return Path(given)
    system = Path(_SYSTEM_DIRECTORY)
    there = next(each for each in (system, *system.parents) if each.exists())
    if os.access(there, os.W_OK | os.X_OK):
        return system
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "lightning_ntp" / "power"


class JournalFile:
    """One owner's file, held by this process. Without entries there is no file. Any thread may write.

    Args:
        path: Where it lies.
        entries: What it holds.
        lock: A descriptor by which it is locked; None if there is no file yet.
    """

    def __init__(self, path: Path, entries: list[Entry], lock: int | None = None) -> None:
        self.path, self._lock = path, lock
        self._entries = {entry.key: entry for entry in entries}
        self._guard = threading.Lock()

    def entries(self) -> list[Entry]:
        with self._guard:
            return list(self._entries.values())

    def get(self, gpu: str, lever: str) -> Entry | None:
        with self._guard:
            return self._entries.get((gpu, lever))

    def put(self, entry: Entry) -> None:
        """Add an entry, or replace the one of its lever: it is on disk when this returns.

        Raises:
            OSError: If it cannot be. The file holds the entries of before, or of after.
        """
        with self._guard:
            self._write({**self._entries, entry.key: entry})

    def drop(self, gpu: str, lever: str) -> None:
        """Remove an entry.

        Raises:
            OSError: As :meth:`put`.
        """
        with self._guard:
            if (gpu, lever) in self._entries:
                self._write({key: entry for key, entry in self._entries.items() if key != (gpu, lever)})

    def close(self) -> None:
        """Let go of it: from now on its owner is dead."""
        with self._guard:
            self._exchange(None)

    def _write(self, entries: dict[tuple[str, str], Entry]) -> None:
        new = self.path.with_name(f".{self.path.name}.new")
        if not entries:
            for path in (self.path, new):
                path.unlink(missing_ok=True)
            _sync_directory(self.path.parent)
            self._entries = entries
            self._exchange(None)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            lock(file)  # before it has its name: whoever finds it there finds it locked
            data = b"".join(entry.to_line() for entry in entries.values())
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
            os.replace(new, self.path)
        except BaseException:
            os.close(file)
            raise
        self._entries = entries
        self._exchange(file)
        _sync_directory(self.path.parent)

    def _exchange(self, file: int | None) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = file


def new_path(directory: Path, owner: Owner) -> Path:
    """A name for an owner's file, which no other has."""
    return directory / f"{owner.boot[:8]}-{owner.pid}-{owner.started}-{os.urandom(3).hex()}{SUFFIX}"


def lock(file: int) -> bool | None:
    """Lock a file for this process. Whether it could; None if there are no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Be the only one who claims GPUs. Gives whether it is; where there are no locks, everybody is."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        yield lock(file) is not False
    finally:
        os.close(file)


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
