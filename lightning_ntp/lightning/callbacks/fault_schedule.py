"""Which fault hits whom, when and where: data that every rank computes alike."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["kill", "stop", "hang", "raise", "slow"]
"""``kill``: SIGKILL. ``stop``: SIGSTOP, so the process is there but silent. ``hang``: Python sleeps for ever.
``raise``: an exception. ``slow``: sleeps for some seconds in each of some steps."""

StepPhase = Literal["data", "forward", "backward", "sync", "vote", "between_vote_and_update", "update", "batch_end"]
"""Where in a step: once the batch is there; half-way through forward; half-way through backward; during gradient sync;
in the vote; after it, before any parameter has changed; when half of the parameters have; after the step."""

OtherPhase = Literal[
    "sanity", "validation_batch", "validation_end", "checkpoint", "epoch_end", "fit_end", "test", "predict"
]
"""Where outside of steps: a batch of the sanity check; a batch of validation; after the last one; while a checkpoint is
written (rank 0 has written part of the file); the end of a training epoch; of the fit; a batch of test; of predict."""

Phase = Literal[StepPhase, OtherPhase]

KINDS: tuple[Kind, ...] = get_args(Kind)
STEP_PHASES: tuple[StepPhase, ...] = get_args(StepPhase)
OTHER_PHASES: tuple[OtherPhase, ...] = get_args(OtherPhase)
PHASES: tuple[Phase, ...] = (*STEP_PHASES, *OTHER_PHASES)
AFTER_FIT: tuple[Phase, ...] = ("test", "predict")
"""Not part of a fit: what a fit starts at says nothing about them."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        kind: What happens.
        slot: Whom it hits.
        step: The step it hits: the number of optimizer steps committed before, so 0 is the first step. Outside of
            steps: it happens when so many are done, or more.
        phase: Where in the step, or outside of steps.
        seconds: How long a ``slow`` fault sleeps in each step.
        steps: How many steps in a row a ``slow`` fault lasts.

    Raises:
        ValueError: If a value is out of range.
    """

    kind: Kind
    slot: int
    step: int
    phase: Phase = "forward"
    seconds: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        check_among("kind", self.kind, KINDS)
        check_among("phase", self.phase, PHASES)
        for name, value, least in (("slot", self.slot, 0), ("step", self.step, 0), ("steps", self.steps, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} of a fault must be an integer of at least {least}")
        check_seconds("seconds", self.seconds, zero=True)

    def __str__(self) -> str:
        more = f" {self.seconds:g} s in each of {self.steps} steps" if self.kind == "slow" else ""
        return f"{self.kind}{more}, slot {self.slot}, step {self.step}, {self.phase}"


def as_faults(given: Sequence[Fault | Mapping[str, Any]]) -> tuple[Fault, ...]:
    """Faults from what Python code or YAML gives.

    Raises:
        ValueError: If an entry is no fault; the message says which.
    """
    faults = []
    for number, each in enumerate(given):
        if isinstance(each, Fault):
            faults.append(each)
            continue
        if not isinstance(each, Mapping):
            raise ValueError(f"faults[{number}]={each!r} is no fault: give a Fault, or its fields as a mapping")
        try:
            faults.append(Fault(**each))
        except TypeError:
            raise ValueError(
                f"faults[{number}]={dict(each)!r} is no fault: it needs kind, slot and step, and may have phase,"
                " seconds and steps"
            ) from None
    return tuple(faults)


@dataclass(frozen=True)
class Draw:
    """A random fault, before it is known how many slots there are."""

    kind: Kind
    step: int
    phase: Phase
    place: float
    """In [0, 1): which of the slots, in ascending order."""

    def among(self, slots: Sequence[int], seconds: float, steps: int) -> Fault:
        """The fault, for one of ``slots``."""
        return Fault(self.kind, slots[int(self.place * len(slots))], self.step, self.phase, seconds, steps)


def draw_faults(mtbf: float, seed: int, kinds: Sequence[Kind], phases: Sequence[Phase]) -> Iterator[Draw]:
    """Endless random faults: times between them are exponential with a mean of ``mtbf`` steps.

    The numbers are Python's own, apart from every generator that training uses.
    """
    generator = random.Random(seed)
    at = 0.0
    while True:
        at += generator.expovariate(1 / mtbf)
        yield Draw(generator.choice(kinds), int(at), generator.choice(phases), generator.random())


def check_among(name: str, value: object, known: Sequence[str]) -> None:
    """Raises:
    ValueError: If ``value`` is none of ``known``.
    """
    if value not in known:
        raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")


def check_seconds(name: str, value: object, *, zero: bool = False) -> None:
    """Raises:
    ValueError: If ``value`` is no finite number above 0 (or of at least 0).
    """
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not (value >= 0 if zero else value > 0):  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} must be a finite number {'of at least' if zero else 'above'} 0")
