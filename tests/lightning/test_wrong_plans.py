"""A plan that gives a parameter the wrong gradient class would train on with wrong numbers: it is told in the first
step, with the line that the plan lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lightning.rigs import (
    FEATURES,
    Degrees,
    EndState,
    FeedForward,
    Regression,
    Worlds,
    assert_same,
    loader,
    make_trainer,
)


class _NormInside(FeedForward):
    """Normalises each hidden column on its own, between the two projections."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 7)
        self.scale = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.scale(F.gelu(self.up_proj(x)).unsqueeze(-1)).squeeze(-1))


class _ScaleAfter(FeedForward):
    """Scales its output, after the sum over the shards (layer scale, as in CaiT)."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 7)
        self.layer_scale = nn.LayerNorm(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_scale(super().forward(x))


class _Planned(Regression):
    def __init__(self, block: type[nn.Module], plan: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net.mlp = block()
        self.plan = plan

    def configure_tp_plan(self) -> dict[str, Any]:
        return self.plan


INSIDE = {"net.mlp.up_proj": "colwise", "net.mlp.down_proj": "rowwise"}
AFTER = {"net.mlp": "mlp"}


def _fit(degrees: Degrees, block: type[nn.Module], plan: dict[str, Any]) -> Any:
    module, end = _Planned(block, plan), EndState()
    make_trainer(degrees, callbacks=[end]).fit(module, loader(degrees, 8))
    return end.parameters, module.gradients


@pytest.mark.parametrize("degrees", [(2,), (2, 1), (3,)])
@pytest.mark.parametrize(
    ("block", "plan", "parameter", "advice"),
    [
        (_NormInside, INSIDE, "'net.mlp.scale.", "add 'net.mlp.scale': 'replicated_with_grad_allreduce'"),
        (_ScaleAfter, AFTER, "'net.mlp.layer_scale.", "add 'net.mlp.layer_scale': 'replicated'"),
    ],
)
def test_a_wrong_gradient_class_is_told_in_the_first_step_on_all_ranks(
    world: Worlds, degrees: tuple[int, ...], block: Any, plan: Any, parameter: str, advice: str
) -> None:
    for outcome in world(sum(degrees)).start(_fit, degrees, block, plan).wait(grace=20):
        assert outcome.state == "raised" and "PlanError" in outcome.error, (outcome.error, outcome.stacks)
        assert parameter in outcome.error and advice in outcome.error, outcome.error


@pytest.mark.parametrize(
    ("block", "plan", "advice"),
    [
        (_NormInside, INSIDE, {"net.mlp.scale": "replicated_with_grad_allreduce"}),
        (_ScaleAfter, AFTER, {"net.mlp.layer_scale": "replicated"}),
    ],
)
def test_with_the_advice_taken_the_gradients_are_the_dense_ones(
    world: Worlds, block: Any, plan: Any, advice: dict[str, str]
) -> None:
    corrected = {**plan, **advice}
    assert_same(world(3).run(_fit, (2, 1), block, corrected)[0], _fit(None, block, corrected))


class _LaterHalf(Regression):
    """Two optimizers; the wrong one of two blocks is trained second only."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.net.late = _ScaleAfter()
        self.automatic_optimization = False
        self.toggles = toggles

    def configure_tp_plan(self) -> dict[str, Any]:
        return {"net.mlp": "mlp", "net.late": "mlp"}

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.net.mlp, self.net.late)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, block in zip(self.optimizers(), (self.net.mlp, self.net.late), strict=True):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            self.manual_backward(block(batch[0]).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def _later(toggles: bool) -> None:
    make_trainer((2,)).fit(_LaterHalf(toggles), loader((2,), 8))


@pytest.mark.parametrize("toggles", [True, False])
def test_a_half_that_is_trained_later_is_checked_then(world: Worlds, toggles: bool) -> None:
    for outcome in world(2).start(_later, toggles).wait(grace=20):
        assert outcome.state == "raised" and "add 'net.late.layer_scale': 'replicated'" in outcome.error, outcome.error
