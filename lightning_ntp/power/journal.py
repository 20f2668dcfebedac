"""The journal: before a lever is moved it is on disk where it was, so that somebody can always put it back.

It lies in a directory (:func:`~lightning_ntp.power.files.default_directory`) with one file per owner, a process that
writes limits. Owners see each other's files: a GPU belongs to one at a time, and what a dead one has left is put back
by whoever finds it first, :class:`Leftovers`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

from lightning_ntp.power.entries import CLAIM, CLOCKS, POWER_LIMIT, PROFILE, Entry, Value, same
from lightning_ntp.power.files import JournalFile, locked, new_path
from lightning_ntp.power.owners import Owner
from lightning_ntp.power.scan import Found, Say, Scan

_LOCK_SECONDS = 2.0
"""For others who claim at the same time, or are just putting back what a dead owner has left."""
_TICK = 0.02
LEVERS = (PROFILE, POWER_LIMIT, CLOCKS)
"""In the order in which they are put back: under a profile a driver may show another limit than the one written."""


class Taken(Exception):
    """A GPU is another owner's; says whose.

    Args:
        why: In words.
        lives: Whether that owner lives, so that it is of no use to try again.
    """

    def __init__(self, why: str, lives: bool) -> None:
        super().__init__(why)
        self.lives = lives


class Journal:
    """What this process has moved. Any thread may call.

    Args:
        directory: Where journals lie.
        say: Where to say what is wrong with files.
    """

    def __init__(self, directory: Path, say: Say) -> None:
        self.directory, self.owner = directory, Owner.here()
        self._say = say
        self._file = JournalFile(new_path(directory, self.owner), [])
        self._looking = threading.Lock()
        """A look holds dead owners' files for a moment: two threads would take each other for an owner."""

    def claim(self, gpu: str, job: str) -> None:
        """Take a GPU, so that no other owner moves its levers. It is kept until :meth:`unclaim`.

        Raises:
            Taken: If it is another one's, or a dead one has left something that is not put back yet.
            OSError: If the journal cannot be written.
        """
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            with self._looking, locked(self.directory) as alone:
                taken, soon = self._taken(gpu) if alone else (Taken("somebody else claims GPUs too long", True), True)
                if taken is None:
                    self._file.put(Entry(gpu, CLAIM, None, None, None, self.owner, job))
                    return
            if not soon or time.monotonic() > deadline:
                raise taken
            time.sleep(_TICK)

    def unclaim(self, gpu: str) -> None:
        """Raises:
        OSError: If the journal cannot be written.
        """
        self._file.drop(gpu, CLAIM)

    def get(self, gpu: str, lever: str) -> Entry | None:
        """What this process has moved."""
        return self._file.get(gpu, lever)

    def record(self, gpu: str, lever: str, before: Value, after: Value, job: str) -> None:
        """Before a write: where the lever is, and where it goes. On disk when this returns.

        Raises:
            OSError: If it cannot be; then nothing may be written.
        """
        known = self._file.get(gpu, lever)
        first = known.first if known else before
        self._file.put(Entry(gpu, lever, first, before, after, self.owner, job))

    def settle(self, gpu: str, lever: str, now: Value) -> None:
        """After a write: where the lever is indeed. Back at its first value there is no entry any more.

        Raises:
            OSError: If the journal cannot be written.
        """
        known = self._file.get(gpu, lever)
        if known is None or now == known.after != known.first:
            return
        if same(now, known.first):
            self._file.drop(gpu, lever)
        else:
            self._file.put(replace(known, before=now, after=now))

    def drop(self, gpu: str, lever: str) -> None:
        """Forget a lever, which is no longer this process's affair.

        Raises:
            OSError: If the journal cannot be written.
        """
        self._file.drop(gpu, lever)

    def moved(self) -> list[Entry]:
        """All that is not at its first value."""
        return [entry for entry in self._file.entries() if entry.lever != CLAIM]

    def scan(self, change: bool = True) -> Scan:
        """A look at the files of other owners."""
        return Scan(self.directory, self.owner, self._say, change, {self._file.path})

    def newer_elsewhere(self, entry: Entry) -> bool:
        """Whether another owner has moved the same lever later: then it is not this one's to put back."""
        with self._looking:
            found = self._others()
        return any(newer.key == entry.key and newer.at > entry.at for each in found for newer in each.entries)

    def close(self) -> None:
        """Let go of the file: what is in it is from now on a dead owner's."""
        self._file.close()

    def _others(self) -> list[Found]:
        """Other owners' files; those of dead ones are not held any more."""
        found = self.scan().files()
        for each in found:
            if each.file is not None:
                each.file.close()
        return found

    def _taken(self, gpu: str) -> tuple[Taken | None, bool]:
        """Why a GPU cannot be had, if so; and whether that may be over soon."""
        for each in self._others():
            for entry in each.entries:
                if entry.gpu == gpu and each.file is None:
                    # a dead owner's file is held by who puts back what is in it, or by what is left of the owner
                    lives = each.owner.seems_alive(self.owner) is not False
                    why = f"it is in use by job {entry.job!r} ({each.owner}, journal {each.path})"
                    return Taken(why, lives), not lives
                if entry.gpu == gpu and entry.lever != CLAIM:
                    why = f"what job {entry.job!r} has left there is not put back yet (journal {each.path})"
                    return Taken(why, False), False
        return None, False


class Leftovers:
    """What dead owners have left. Their files are held until nothing is left in them. Any thread may call.

    Args:
        journal: This process's own, beside which they lie.
        change: Whether files that are none are moved out of the way, and entries dropped that are mere claims.
    """

    def __init__(self, journal: Journal, change: bool = True) -> None:
        self._scan = journal.scan(change)
        self._change = change
        self._own = set(self._scan.skip)
        self._files: dict[Path, JournalFile] = {}
        self._guard = threading.Lock()
        self.alive: list[Found] = []
        """Files of owners that live, as of the last look."""

    def refresh(self) -> None:
        """Look for more of them."""
        with self._guard:
            self._scan.skip = self._own | set(self._files)
            self.alive = []
            for found in self._scan.files():
                if found.file is None:
                    self.alive.append(found)
                    continue
                self._files[found.path] = found.file
                for entry in found.entries:
                    if entry.lever == CLAIM and self._change:
                        self._drop(found.file, entry)

    def entries(self, gpu: str | None = None) -> list[Entry]:
        """What is to be put back, of one GPU or all; the newest first, since older ones lie under them."""
        with self._guard:
            found = [entry for file in self._files.values() for entry in file.entries()]
        wanted = [entry for entry in found if entry.lever != CLAIM and gpu in (None, entry.gpu)]
        return sorted(wanted, key=lambda entry: entry.at, reverse=True)

    def drop(self, entry: Entry) -> None:
        """It is put back."""
        with self._guard:
            for file in list(self._files.values()):
                if entry in file.entries():
                    self._drop(file, entry)

    def newer_elsewhere(self, entry: Entry) -> bool:
        """Whether another owner, dead or alive, has moved the same lever later."""
        living = [each for found in self.alive for each in found.entries]
        return any(each.key == entry.key and each.at > entry.at for each in [*living, *self.entries(entry.gpu)])

    def close(self) -> None:
        """Let go of the files; what is left in them, others may put back."""
        with self._guard:
            for file in self._files.values():
                file.close()
            self._files = {}

    def _drop(self, file: JournalFile, entry: Entry) -> None:
        try:
            file.drop(*entry.key)
        except OSError as error:  # whoever finds it again finds the value where it belongs
            self._scan.say(f"journal {file.path} cannot be written: {error}")
        if not file.entries():
            self._files.pop(file.path, None)
