"""Two worlds that take turns on the same cores: both stay alive, and the one whose turn it is not waits in a read.

A world is a number of forked ranks that train with Lightning's Trainer. The coordinator gives a world a turn of some
steps and takes back how long its slowest rank needed. Everything a step costs is inside a turn, from one batch's start
to the next one's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import lightning.pytorch as pl

_context = multiprocessing.get_context("fork")
_coordinator_ends: list[Connection] = []
PATIENCE_SECONDS = 240.0


@dataclass(frozen=True)
class Turn:
    """What one turn cost per step."""

    seconds: float
    """Wall time of the slowest rank."""
    cpu_seconds: float
    """Processor time of all ranks together: what other work on the machine does not change."""


class TakeTurns(pl.Callback):
    """In a rank: trains only while the coordinator says so.

    Args:
        pipe: The rank's end.
        accounts: Handles requests that are no turns, by name: called with the rank's arguments before the steps, it
            returns a function that is called after them and whose result goes back.
    """

    def __init__(self, pipe: Connection, accounts: dict[str, Callable[..., Callable[[], Any]]]) -> None:
        self._pipe, self._accounts = pipe, accounts
        self._left = 0
        self._begun = (0.0, 0.0)
        self._finish: Callable[[], Any] | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._left > 0:
            self._left -= 1
        if self._left > 0:
            return
        now = (time.monotonic(), time.process_time())
        if batch_idx == 0:
            answer: Any = None
        elif self._finish is not None:
            answer = self._finish()
        else:
            answer = (self._begun[0], now[0], now[1] - self._begun[1])
        self._pipe.send(("done", answer))
        request, self._left = self._pipe.recv()
        self._finish = None
        if request != "turn":
            self._finish = self._accounts[request](pl_module)
        self._begun = (time.monotonic(), time.process_time())


class World:
    """Ranks that train one configuration.

    Args:
        name: For tables and messages.
        target: Runs in every rank: ``target(pipe, rank)``.
        ranks: How many.
    """

    def __init__(self, name: str, target: Callable[[Connection, int], None], ranks: int) -> None:
        self.name, self.ranks = name, ranks
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = _context.Pipe()
            _coordinator_ends.append(ours)
            process = _context.Process(target=_run, args=(target, theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ready(self) -> None:
        """Wait until all ranks are about to enter their first step.

        Raises:
            RuntimeError: If a rank fails or does not get there in time.
        """
        self._answers()

    def turn(self, steps: int) -> Turn:
        """Let the world train for some steps."""
        for pipe in self._pipes:
            pipe.send(("turn", steps))
        answers = self._answers()
        wall = max(end for _, end, _ in answers) - min(begin for begin, _, _ in answers)
        return Turn(wall / steps, sum(cpu for _, _, cpu in answers) / steps)

    def account(self, request: str, steps: int) -> list[Any]:
        """Let the world train for some steps and watch something; returns every rank's finding."""
        for pipe in self._pipes:
            pipe.send((request, steps))
        return self._answers()

    def end(self) -> None:
        """End the ranks: they wait in a read and hold nothing."""
        for process in self._processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            _coordinator_ends.remove(pipe)
            pipe.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _answers(self) -> list[Any]:
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(answers) < len(self._pipes):
            open_ = [pipe for pipe in self._pipes if pipe not in answers]
            found = wait(open_, timeout=max(deadline - time.monotonic(), 0.0))
            if not found:
                ranks = [rank for rank, pipe in enumerate(self._pipes) if pipe not in answers]
                raise RuntimeError(f"{self.name}: ranks {ranks} gave no answer for {PATIENCE_SECONDS:.0f} s")
            for pipe in found:
                assert isinstance(pipe, Connection)
                try:
                    kind, answer = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"{self.name}: rank {self._pipes.index(pipe)} died") from None
                if kind == "error":
                    raise RuntimeError(f"{self.name}: rank {self._pipes.index(pipe)} failed\n{answer}")
                answers[pipe] = answer
        return [answers[pipe] for pipe in self._pipes]


@dataclass(frozen=True)
class Quartiles:
    """Of ratios or of times."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        return cls(*statistics.quantiles(values, n=4)) if len(values) > 1 else cls(*values, *values, *values)


@dataclass(frozen=True)
class Comparison:
    """Pairs of turns, one world against the other."""

    ours: tuple[Turn, ...]
    theirs: tuple[Turn, ...]

    @property
    def wall(self) -> Quartiles:
        """Ratios of step times, pair by pair."""
        return Quartiles.of([a.seconds / b.seconds for a, b in zip(self.ours, self.theirs, strict=True)])

    @property
    def cpu(self) -> Quartiles:
        """Ratios of processor time, pair by pair."""
        return Quartiles.of([a.cpu_seconds / b.cpu_seconds for a, b in zip(self.ours, self.theirs, strict=True)])


def compare(ours: World, theirs: World, pairs: int, steps: int, warm_up: int) -> Comparison:
    """Interleave turns of two worlds; the order within a pair alternates, and warm-up turns are dropped."""
    for world in (ours, theirs):
        world.ready()
    for world in (ours, theirs):
        world.turn(warm_up)
    measured: dict[World, list[Turn]] = {ours: [], theirs: []}
    for pair in range(pairs):
        for world in (ours, theirs) if pair % 2 == 0 else (theirs, ours):
            measured[world].append(world.turn(steps))
    return Comparison(tuple(measured[ours]), tuple(measured[theirs]))


def _run(target: Callable[[Connection, int], None], pipe: Connection, rank: int) -> None:
    # inherited by the fork: with them open a rank would not notice that the coordinator is gone
    for end in _coordinator_ends:
        end.close()
    try:
        target(pipe, rank)
    except EOFError:
        pass
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    os._exit(0)
