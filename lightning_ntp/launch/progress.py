"""What a rank shows of its progress: a few numbers in a small file that the supervisor reads at any time.

Writing is a store into mapped memory, so it needs no thread, which would go on beating in a rank that hangs, and no
system call. A process without a supervisor writes into memory that nobody reads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import IO, Any
from zlib import crc32


class Tag(IntEnum):
    """What a rank is doing. How long it may take is learnt for each by itself."""

    SETUP = 0
    """Before the first batch, after the last one, and outside of trainer runs: anything may take any time."""
    STEP = 1
    BETWEEN = 2
    """Data is fetched, hooks run."""
    EPOCH_END = 3
    EVALUATION_START = 4
    EVALUATION = 5
    """A batch, and the fetch of the next one."""
    EVALUATION_END = 6
    CHECKPOINT = 7


IN_WORDS = {
    Tag.SETUP: "outside of training",
    Tag.STEP: "in a training step",
    Tag.BETWEEN: "between training steps",
    Tag.EPOCH_END: "at the end of an epoch",
    Tag.EVALUATION_START: "at the start of an evaluation loop",
    Tag.EVALUATION: "in an evaluation batch",
    Tag.EVALUATION_END: "at the end of an evaluation loop",
    Tag.CHECKPOINT: "while a checkpoint was saved",
}

NOT_WAITING, WAITING, WAITING_BLINDLY = 0, 1, 2
"""``WAITING`` ticks. A blind wait cannot, because it blocks in C++."""

NOBODY, EVERYBODY = 0, 1
"""Whom a wait is for, where it is no group."""

_WORD = 8
_SEQ, _TICKS, _WAITING, _WAITS_FOR, _TAG, _FLAGS, _GROUPS, _WORKED = range(8)
_DONE = 8
"""How often each tag's work was completed: words 8 to 15."""
_COMPUTED, _MICRO_BATCHES = 16, 17
_TABLE = 18
"""Pairs: (the group's number, collectives entered on it)."""
_WORDS = 66
_BLIND, _DUMPS, _LEFT = 1, 2, 4
_SLICE_SECONDS = 0.05
_INSIDE_OF_STEPS = (Tag.EVALUATION_START, Tag.EVALUATION, Tag.EVALUATION_END, Tag.CHECKPOINT)
"""What comes after one of these is the rest of a step, if it is a step."""

DUMP_SIGNAL: int | None = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None
"""Makes a rank write the stacks of its threads, also where it holds Python's lock."""


class Progress:
    """The rank's side: says what this process does. Cheap enough for every collective (0.1-1 us a call).

    Args:
        words: Where to write: 66 unsigned numbers of 64 bits.
        beside: The threads beside; those of a former one of this process.
    """

    def __init__(self, words: Any, beside: set[int] | None = None) -> None:
        self._words = words
        self._beside: set[int] = set() if beside is None else beside
        # on the clock of this process, in nanoseconds; 0 if there is none
        self._step_began = self._wait_began = self._waited = 0

    def beat(self) -> None:
        """Something went on."""
        self._words[_SEQ] += 1

    def computed(self, nanoseconds: int) -> None:
        """One more micro-batch was computed, in so much time."""
        words = self._words
        words[_COMPUTED] += nanoseconds
        words[_MICRO_BATCHES] += 1

    @property
    def tag(self) -> Tag:
        return Tag(self._words[_TAG])

    def begin(self, tag: Tag) -> None:
        """Begin a piece of work; the one before is done."""
        words = self._words
        now = time.monotonic_ns()
        if words[_TAG] == Tag.STEP:
            # a step that cannot be measured makes readers begin anew
            began = self._step_began
            words[_WORKED] = words[_WORKED] + max(0, now - began - self._waited) if began else 0
        is_new = tag is Tag.STEP and words[_TAG] not in _INSIDE_OF_STEPS
        self._step_began, self._waited = now if is_new else 0, 0
        words[_DONE + words[_TAG]] += 1
        words[_TAG] = tag
        words[_SEQ] += 1

    def back_to(self, tag: Tag) -> None:
        """Go on with an earlier piece of work."""
        self._step_began = 0  # what of it was work, nobody knows
        self._words[_TAG] = tag
        self._words[_SEQ] += 1

    @contextlib.contextmanager
    def within(self, tag: Tag) -> Iterator[None]:
        """A piece of work in the middle of another one."""
        outer = self.tag
        self.back_to(tag)
        try:
            yield
        finally:
            self.begin(outer)

    def forget_done(self) -> None:
        """What comes next may be slow as if it were the first of its kind: it may have to be compiled anew."""
        for tag in Tag:
            self._words[_DONE + tag] = 0
        self._words[_SEQ] += 1

    # ---- collectives ------------------------------------------------------------------------------------------

    def enter_groups(self, blind: bool) -> None:
        """A new generation of process groups begins.

        Args:
            blind: Waiting for their collectives only orders streams, so it shows nothing (NCCL).
        """
        words = self._words
        self._step_began = 0  # the step is one of a recovery, or of a change
        words[_GROUPS] = 0
        words[_FLAGS] = words[_FLAGS] & ~_BLIND | (_BLIND if blind else 0)
        self.forget_done()

    def group(self, name: str) -> int:
        """Make a group known.

        Args:
            name: The same for all members, and for no other group in the job.

        Returns:
            Its mark, for :meth:`entered` and the waits; 0 if there are too many.
        """
        words = self._words
        number = words[_GROUPS]
        mark = _TABLE + 2 * number + 1
        if mark >= _WORDS:
            return 0
        words[mark - 1] = crc32(name.encode()) + EVERYBODY + 1
        words[mark] = 0
        words[_GROUPS] = number + 1
        return int(mark)

    def entered(self, mark: int) -> None:
        """This rank has entered the next collective of a group."""
        words = self._words
        if mark:
            words[mark] += 1
        if threading.get_ident() not in self._beside:
            words[_SEQ] += 1

    def begin_wait(self, mark: int, blind: bool = False) -> bool:
        """A wait for a group begins. Returns False in a thread beside: its waits say nothing about the rank."""
        if threading.get_ident() in self._beside:
            return False
        words = self._words
        words[_WAITS_FOR] = words[mark - 1] if mark else EVERYBODY
        words[_WAITING] = WAITING_BLINDLY if blind else WAITING
        self._wait_began = time.monotonic_ns()
        return True

    def tick(self) -> None:
        """The wait goes on."""
        self._words[_TICKS] += 1

    def end_wait(self) -> None:
        words = self._words
        if self._wait_began:
            self._waited += time.monotonic_ns() - self._wait_began
            self._wait_began = 0
        words[_WAITING] = NOT_WAITING
        words[_SEQ] += 1

    def wait_for(
        self, condition: threading.Condition, done: Callable[[], Any], seconds: float | None, whom: int = EVERYBODY
    ) -> bool:
        """``condition.wait_for(done, seconds)`` as a visible wait.

        Args:
            whom: ``NOBODY`` if this thread waits for another one of the process.
        """
        if done():
            return True
        words = self._words
        deadline = None if seconds is None else time.monotonic() + seconds
        visible = threading.get_ident() not in self._beside
        if visible:
            words[_WAITS_FOR], words[_WAITING] = whom, WAITING
            self._wait_began = time.monotonic_ns()
        try:
            while True:
                left = _SLICE_SECONDS if deadline is None else min(_SLICE_SECONDS, deadline - time.monotonic())
                if condition.wait_for(done, max(0.0, left)):
                    return True
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                if visible:
                    words[_TICKS] += 1
        finally:
            if visible:
                self.end_wait()

    @contextlib.contextmanager
    def polling(self) -> Iterator[Callable[[], None]]:
        """A visible wait for the others that looks for something again and again: call what it gives at every look."""

        def waits() -> None:
            self._words[_WAITS_FOR], self._words[_WAITING] = EVERYBODY, WAITING
            self._wait_began = self._wait_began or time.monotonic_ns()
            self.tick()

        try:
            yield waits
        finally:
            self.end_wait()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """In a thread that works beside the rank's own: what it does is no progress of the rank."""
        me = threading.get_ident()
        self._beside.add(me)
        try:
            yield
        finally:
            self._beside.discard(me)

    # ---- the end ----------------------------------------------------------------------------------------------

    def can_dump(self) -> None:
        """The process answers :data:`DUMP_SIGNAL`, which would end others."""
        self._words[_FLAGS] |= _DUMPS

    def leave(self) -> None:
        """The rank leaves the job in good order: nobody waits for it any more."""
        self._words[_FLAGS] |= _LEFT


@dataclass(frozen=True)
class Sample:
    """The supervisor's side: what a rank's file said at one moment. Numbers written together may not fit together."""

    seq: int = 0
    """Changes whenever the rank goes on."""
    ticks: int = 0
    """Changes while it waits for others."""
    waiting: int = NOT_WAITING
    waits_for: int = NOBODY
    """A group's number, or ``EVERYBODY``."""
    tag: Tag = Tag.SETUP
    done: tuple[int, ...] = (0,) * len(Tag)
    """By tag: how often its work was completed."""
    groups: tuple[tuple[int, int], ...] = ()
    """The group's number, and how many collectives this rank has entered on it."""
    blind: bool = False
    """Its waits show nothing."""
    dumps: bool = False
    left: bool = False
    worked_ns: int = 0
    """Nanoseconds of the rank's own work in its training steps, those that were completed: what it has waited for
    others in them is left out, and so is what lies between them. Starts again at 0 after a step that could not be
    measured: one that was done again, or in which the members changed. Says nothing if waits are blind.
    """
    computed_ns: int = 0
    """Nanoseconds that this rank's replica has computed, forward and backward, without waiting for other replicas."""
    micro_batches: int = 0
    """How many micro-batches :attr:`computed_ns` is the sum of."""

    @classmethod
    def decode(cls, content: bytes) -> Sample:
        words = memoryview(content).cast("Q")
        flags = words[_FLAGS]
        table = range(_TABLE, min(_TABLE + 2 * words[_GROUPS], _WORDS), 2)
        return cls(
            words[_SEQ],
            words[_TICKS],
            words[_WAITING],
            words[_WAITS_FOR],
            Tag(words[_TAG]),
            tuple(words[_DONE : _DONE + len(Tag)]),
            tuple((words[at], words[at + 1]) for at in table),
            bool(flags & _BLIND),
            bool(flags & _DUMPS),
            bool(flags & _LEFT),
            words[_WORKED],
            words[_COMPUTED],
            words[_MICRO_BATCHES],
        )


def progress_path(job_dir: Path, slot: int) -> Path:
    return job_dir / f"progress-{slot}"


def dump_path(job_dir: Path, slot: int) -> Path:
    """Where a rank writes the stacks of its threads."""
    return job_dir / f"stacks-{slot}.txt"


def run_directory_path(job_dir: Path, slot: int) -> Path:
    """Where a rank notes the directory of its run."""
    return job_dir / f"run-directory-{slot}"


class ProgressReader:
    """Reads one rank's file."""

    def __init__(self, job_dir: Path, slot: int) -> None:
        self._path = progress_path(job_dir, slot)
        self._file: int | None = None

    def read(self) -> Sample | None:
        """What it says; None if the rank has not started it yet."""
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
        content = os.pread(self._file, _WORDS * _WORD, 0)
        return Sample.decode(content) if len(content) == _WORDS * _WORD else None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _unread() -> Progress:
    return Progress(memoryview(bytearray(_WORDS * _WORD)).cast("Q"))


_current = _unread()
_place: tuple[int, Path] | None = None
"""This rank's slot, and its supervisor's directory."""
_dumps: IO[str] | None = None


def current() -> Progress:
    """This process's progress. Ask each time: it is another one once the rank has started."""
    return _current


def start(slot: int, job_dir: Path | None) -> None:
    """Show this rank's progress to its supervisor, and let it ask for stacks. Does nothing the second time.

    Args:
        slot: This rank's slot.
        job_dir: The supervisor's directory; None if there is none.

    Raises:
        OSError: If the directory cannot be written.
    """
    global _current, _place, _dumps
    if _place is not None or job_dir is None:
        return
    _place = slot, job_dir
    path = progress_path(job_dir, slot)
    temporary = path.with_suffix(f".{os.getpid()}")
    with open(temporary, "w+b") as file:
        file.write(bytes(_WORDS * _WORD))  # not a hole: where the disk is full, that would end the process later
        file.flush()
        mapped = mmap.mmap(file.fileno(), _WORDS * _WORD)
    _current = Progress(memoryview(mapped).cast("Q"), _current._beside)
    if DUMP_SIGNAL is not None:
        _dumps = open(dump_path(job_dir, slot), "w")  # noqa: SIM115  it must stay open for the signal
        faulthandler.register(DUMP_SIGNAL, file=_dumps, all_threads=True)
        _current.can_dump()
    temporary.replace(path)


def note_run_directory(directory: Path) -> None:
    """Tell the supervisor where what it keeps of this run belongs."""
    if _place is not None:
        slot, job_dir = _place
        with contextlib.suppress(OSError):
            run_directory_path(job_dir, slot).write_text(str(directory.absolute()), encoding="utf-8")
