"""How long a replica computes: what counts, and what does not. On the clock of a CPU, which tests turn by hand."""

from __future__ import annotations

import pytest
import torch

from lightning_ntp.engine import ComputeTime
from lightning_ntp.launch import progress
from lightning_ntp.launch.progress import Progress, Sample


class Clock:
    """Marks are numbers of nanoseconds; some of them have not been reached yet, as those of a stream."""

    def __init__(self) -> None:
        self.now = self.reached_until = 0

    def mark(self) -> int:
        return self.now

    def reached(self, mark: int) -> bool:
        return mark <= self.reached_until

    def between(self, begin: int, end: int) -> int:
        return end - begin

    def go_on(self, nanoseconds: int, reached: bool = True) -> None:
        self.now += nanoseconds
        self.reached_until = self.now if reached else self.reached_until


class Measured:
    """A measurement, and what it shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._memory = bytearray(512)
        monkeypatch.setattr(progress, "_current", Progress(memoryview(self._memory).cast("Q")))
        self.clock, self.time = Clock(), ComputeTime(torch.device("cpu"))
        monkeypatch.setattr(self.time, "_clock", self.clock)

    @property
    def shown(self) -> tuple[int, int]:
        """Nanoseconds, micro-batches."""
        sample = Sample.decode(bytes(self._memory))
        return sample.computed_ns, sample.micro_batches

    def micro_batch(self, nanoseconds: int, reached: bool = True) -> None:
        self.time.begin()
        self.clock.go_on(nanoseconds, reached)
        self.time.end()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def test_a_micro_batch_is_shown_when_the_next_one_begins(measured: Measured) -> None:
    measured.micro_batch(100)
    assert measured.shown == (0, 0)
    measured.clock.go_on(1000)  # sync, update, data: not computed
    measured.micro_batch(70)
    assert measured.shown == (100, 1)
    measured.time.begin()
    assert measured.shown == (170, 2)


def test_waits_for_other_replicas_do_not_count(measured: Measured) -> None:
    measured.time.begin()
    measured.clock.go_on(30)
    with measured.time.waiting():
        measured.clock.go_on(5000)
    measured.clock.go_on(20)
    measured.time.end()
    measured.time.begin()
    assert measured.shown == (50, 1)


def test_a_wait_that_is_broken_off_ends_the_wait(measured: Measured) -> None:
    measured.time.begin()
    measured.clock.go_on(30)
    with pytest.raises(RuntimeError), measured.time.waiting():
        measured.clock.go_on(5000)
        raise RuntimeError("a rank was lost")
    measured.clock.go_on(20)
    measured.time.end()
    measured.time.begin()
    assert measured.shown == (50, 1)


def test_a_micro_batch_that_was_given_up_does_not_count(measured: Measured) -> None:
    measured.time.begin()
    measured.clock.go_on(400)  # a rank was lost; it is begun again
    measured.micro_batch(100)
    measured.time.begin()
    assert measured.shown == (100, 1)


def test_waits_outside_of_a_micro_batch_are_nothing(measured: Measured) -> None:
    with measured.time.waiting():
        measured.clock.go_on(10)
    measured.time.end()  # of a backward without a forward
    measured.time.begin()
    assert measured.shown == (0, 0)


def test_of_several_backward_passes_the_first_ends_it(measured: Measured) -> None:
    measured.micro_batch(100)
    measured.clock.go_on(40)
    measured.time.end()
    measured.time.begin()
    assert measured.shown == (100, 1)


def test_a_stream_that_is_behind_is_not_waited_for(measured: Measured) -> None:
    measured.micro_batch(100, reached=False)
    measured.micro_batch(60, reached=False)
    measured.time.begin()
    assert measured.shown == (0, 0)
    measured.clock.reached_until = 100
    measured.time.begin()
    assert measured.shown == (100, 1), "the second one has not been computed yet"
    measured.clock.reached_until = 160
    measured.time.begin()
    assert measured.shown == (160, 2)


def test_the_clock_of_a_cpu_is_that_of_the_machine(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    own, now = ComputeTime(torch.device("cpu")), iter([5_000, 9_000, 20_000])
    monkeypatch.setattr("lightning_ntp.engine.compute_time.time.monotonic_ns", lambda: next(now))
    own.begin()
    own.end()
    own.begin()
    assert measured.shown == (4_000, 1)
