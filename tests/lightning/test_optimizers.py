"""Optimizers that would compute something else on shards are refused by name, early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lightning.rigs import EndState, Regression, Worlds, assert_same, loader, make_trainer


class RowFactored(torch.optim.Optimizer):
    """Keeps one second moment per row: of a sharded matrix it would see parts of the rows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2:
                    self.state[p]["row_factors"] = p.grad.detach().pow(2).mean(1)
                    p.data.sub_(group["lr"] * p.grad / (self.state[p]["row_factors"].sqrt()[:, None] + 1.0))
        return loss


class MyLamb(torch.optim.SGD):
    pass


class Lamb(MyLamb):
    """A third party's optimizer, known by its name."""


class _With(Regression):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.steps = 0

    def configure_optimizers(self) -> Any:
        return self.make([p for p in self.parameters() if p.dim() == 2])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1


def _fit(degrees: tuple[int, ...] | None, make: Any) -> dict[str, Tensor]:
    module, end = _With(make), EndState()
    try:
        make_trainer(degrees, callbacks=[end]).fit(module, loader(degrees, 8))
    except TypeError as error:
        raise TypeError(f"{error} [after {module.steps} steps]") from error
    return end.parameters


def muon(params: Any) -> Any:
    return torch.optim.Muon(params)


def adafactor(params: Any) -> Any:
    return torch.optim.Adafactor(params)


def lbfgs(params: Any) -> Any:
    return torch.optim.LBFGS(params, max_iter=3)


def lamb(params: Any) -> Any:
    return Lamb(params, lr=0.1)


@pytest.mark.parametrize(("make", "name"), [(muon, "Muon"), (adafactor, "Adafactor"), (lbfgs, "LBFGS"), (lamb, "Lamb")])
def test_optimizers_that_need_whole_parameters_are_refused_before_the_first_step(
    world: Worlds, make: Any, name: str
) -> None:
    for outcome in world(2).start(_fit, (2,), make).wait():
        assert (
            outcome.state == "raised" and f"TypeError: {name} " in outcome.error and "[after 0 steps]" in outcome.error
        )
        assert "AdamW" in outcome.error, "it says what to use instead"


def test_an_optimizer_with_other_state_than_the_parameters_shape_is_refused_after_one_step(world: Worlds) -> None:
    for outcome in world(2).start(_fit, (2,), RowFactored).wait():
        assert outcome.state == "raised" and "[after 1 steps]" in outcome.error, outcome.error
        assert "RowFactored keeps 'row_factors' of shape" in outcome.error and "net." in outcome.error


def test_an_optimizer_with_several_closure_calls_is_refused_at_every_degree(world: Worlds) -> None:
    for outcome in world(2).start(_fit, (1, 1), lbfgs).wait():
        assert outcome.state == "raised" and "TypeError: LBFGS runs forward and backward several" in outcome.error


@pytest.mark.parametrize("make", [muon, adafactor, lamb, RowFactored])
def test_without_tensor_parallelism_every_optimizer_trains_like_the_dense_run(world: Worlds, make: Any) -> None:
    bound = 1e-6 if make is muon else 1e-10  # Muon orthogonalises in bfloat16
    assert_same(world(2).run(_fit, (1, 1), make)[0], _fit(None, make), bound)


class _Foreign(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.zeros(3, 5))], lr=0.1)


def _foreign() -> None:
    make_trainer((2,)).fit(_Foreign(), loader((2,), 4))


def test_a_parameter_that_is_not_the_modules_is_refused(world: Worlds) -> None:
    for outcome in world(2).start(_foreign).wait():
        assert (
            outcome.state == "raised" and "a parameter of shape (3, 5) that is not the _Foreign's own" in outcome.error
        )
