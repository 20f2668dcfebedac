"""Bounds of DESIGN section 12, and the comparison of a run's record with the reference's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference import Recipe, Record


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences."""

    scalars: float
    """Losses and gradient norms."""
    tensors: float
    """Parameters, moments, raw gradients."""


EXACT = Bounds(1e-10, 1e-10)
"""float64: sums in another order, and nothing else."""
SINGLE = Bounds(1e-5, 1e-4)
"""float32: the same; AdamW turns noise in tiny gradients into visible steps."""


def bounds_of(recipe: Recipe) -> Bounds:
    """The bounds of a recipe's dtype."""
    return EXACT if recipe.dtype == "float64" else SINGLE


def relative(got: Tensor, want: Tensor) -> float:
    """max|a-b| / max(max|b|, 1e-6) per tensor."""
    if not want.numel():
        return 0.0
    got, want = got.double(), want.double()
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-6))


def differences(got: Record, want: Record, bounds: Bounds) -> list[str]:
    """Everything outside the bounds, and everything missing on either side, one line each."""
    found: list[str] = []

    def scalars(what: str, a: list[float], b: list[float]) -> None:
        if len(a) != len(b):
            found.append(f"{what}: {len(a)} values instead of {len(b)}")
            return
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            error = relative(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64))
            if not error <= bounds.scalars:
                found.append(f"{what} {step}: {x!r} instead of {y!r}, relative {error:.2e}")

    def tensors(what: str, a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
        if a.keys() != b.keys():
            found.append(f"{what}: missing {sorted(b.keys() - a.keys())}, unknown {sorted(a.keys() - b.keys())}")
        for name in a.keys() & b.keys():
            if a[name].shape != b[name].shape:
                found.append(f"{what} {name}: shape {tuple(a[name].shape)} instead of {tuple(b[name].shape)}")
            elif not (error := relative(a[name], b[name])) <= bounds.tensors:
                found.append(f"{what} {name}: relative {error:.2e}")

    scalars("loss", got.losses, want.losses)
    scalars("norm", got.norms, want.norms)
    tensors("parameter", got.parameters, want.parameters)
    tensors("moment", _flat(got), _flat(want))
    if got.gradients and len(got.gradients) != len(want.gradients):
        found.append(f"gradients: {len(got.gradients)} steps instead of {len(want.gradients)}")
    for step, (a, b) in enumerate(zip(got.gradients, want.gradients, strict=False)):
        tensors(f"gradient in step {step} of", a, b)
    return found


def _flat(record: Record) -> dict[str, Tensor]:
    return {f"{name}/{key}": value for name, state in record.moments.items() for key, value in state.items()}


def assert_parity(got: Record, want: Record, bounds: Bounds) -> None:
    """Fail with the list of what differs (the first thirty lines of it)."""
    found = differences(got, want, bounds)
    assert not found, f"{len(found)} differences from the dense run:\n" + "\n".join(found[:30])
