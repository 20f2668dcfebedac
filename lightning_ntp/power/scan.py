"""Looks through journals: which owners live, which are dead, and what is no journal of this machine and boot."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightning_ntp.power.entries import Entry
from lightning_ntp.power.files import SUFFIX, JournalFile, lock
from lightning_ntp.power.owners import Owner

_MOST_BYTES = 1 << 20
Say = Callable[[str], None]


@dataclass
class Found:
    """A file of this boot that was found.

    Args:
        path: Where it lies.
        owner: Whose it is.
        entries: What it holds.
        file: If the owner is dead: this process holds it now, and may put things back. None if the owner lives.
    """

    path: Path
    owner: Owner
    entries: list[Entry]
    file: JournalFile | None = None


@dataclass
class Scan:
    """Looks through a directory.

    Args:
        directory: Which one.
        here: This process.
        say: Where to say what is wrong with files.
        change: Whether files of another boot and garbage may be moved out of the way.
        skip: Files that are this process's.
    """

    directory: Path
    here: Owner
    say: Say
    change: bool = True
    skip: set[Path] = field(default_factory=set)

    def files(self) -> list[Found]:
        """What there is. Raises nothing: what cannot be read is said."""
        try:
            paths = sorted(path for path in self.directory.iterdir() if path.name.endswith(SUFFIX))
        except FileNotFoundError:
            return []
        except OSError as error:
            self.say(f"journals cannot be read: {error}")
            return []
        found = [self._look(path) for path in paths if path not in self.skip and not path.name.startswith(".")]
        return [each for each in found if each is not None]

    def _look(self, path: Path) -> Found | None:
        while True:
            try:
                file = _open(path)
            except FileNotFoundError:
                return None
            except OSError as error:
                self._set_aside(path, f"it cannot be opened ({error.strerror})")
                return None
            keep = False
            try:
                held = _held(file)
                if held is False and not _is_still(path, file):
                    continue  # its owner has replaced it meanwhile
                result = self._judge(path, file, held)
                keep = result is not None and result.file is not None
                return result
            except OSError as error:
                self.say(f"journal {path} cannot be read: {error}")
                return None
            finally:
                if not keep:
                    os.close(file)

    def _judge(self, path: Path, file: int, held: bool | None) -> Found | None:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            self._set_aside(path, "it is no file of the size of a journal")
            return None
        if about.st_uid not in (0, os.geteuid()):
            # it would have this process write what somebody else wants
            self.say(f"journal {path} is left alone: it belongs to user {about.st_uid}")
            return None
        entries, bad = _parse(os.pread(file, _MOST_BYTES, 0))
        if not entries:
            self._set_aside(path, "there is no entry in it")
            return None
        if bad:
            self.say(f"journal {path}: {bad} lines cannot be read and are left out")
        owner = entries[0].owner
        entries = [entry for entry in entries if entry.owner == owner]
        if owner.boot != self.here.boot:
            self._of_another_boot(path, owner)
            return None
        alive = owner.seems_alive(self.here)
        if held or alive or (held is None and alive is None):
            return Found(path, owner, entries)
        return Found(path, owner, entries, JournalFile(path, entries, file))

    def _of_another_boot(self, path: Path, owner: Owner) -> None:
        if owner.machine != self.here.machine:
            self.say(f"journal {path} is left alone: it is of another machine ({owner.machine})")
            return
        self.say(f"journal {path} is dropped: it is of another boot, and limits are at their defaults after one")
        if self.change:
            with contextlib.suppress(OSError):
                path.unlink()

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_name(f"{path.name}.unreadable-{os.urandom(4).hex()}")
        if not self.change:
            self.say(f"journal {path} is no journal: {why}")
            return
        try:
            path.rename(aside)
        except OSError as error:
            self.say(f"journal {path} is no journal ({why}), and cannot be set aside: {error}")
        else:
            self.say(f"journal {path} is no journal ({why}): it is called {aside.name} now")


def _held(file: int) -> bool | None:
    """Whether another one holds it; if not, this process does from now on. None if there are no locks here."""
    mine = lock(file)
    return None if mine is None else not mine


def _open(path: Path) -> int:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe of that name would wait for its other end
    try:
        return os.open(path, os.O_RDWR | flags)
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags)


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False


def _parse(data: bytes) -> tuple[list[Entry], int]:
    found, bad = [], 0
    for line in data.split(b"\n"):
        if line.strip():
            try:
                found.append(Entry.from_line(line))
            except ValueError:
                bad += 1
    return found, bad
