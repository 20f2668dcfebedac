"""A plan that gives a parameter the wrong gradient class would train on with wrong numbers: it is told in the first
step, with the line that the plan lacks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ntp.engine import FirstStepCheck
from lightning_ntp.lightning.model_plan import plan_of
from lightning_ntp.parallel import PlanError, TensorParallelContext, parallelize
from lightning_ntp.plan import LayoutFamily
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
    slot,
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


class _Gated(FeedForward):
    """Scales its hidden columns, from some step on, or once a gate has left 0."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 7)
        self.gate = nn.Linear(1, 1, bias=False)
        self.scale = nn.Linear(1, 3, bias=False)
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up_proj(x))
        if self.used:
            hidden = hidden * (1 + self.gate.weight.sum() * self.scale.weight.mean())
        return self.down_proj(hidden)


class _LateScale(_Planned):
    """The wrong class of ``scale`` shows from the given step on only."""

    def __init__(self, closed: bool, first: int) -> None:
        super().__init__(_Gated, {**INSIDE, "net.mlp.gate": "replicated_with_grad_allreduce"})
        if closed:
            nn.init.zeros_(self.net.mlp.gate.weight)
        self.closed, self.first = closed, first

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.mlp.used = self.closed or batch_idx >= self.first
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.closed and batch_idx < self.first - 1:
            nn.init.zeros_(self.net.mlp.gate.weight)  # a warm-up from 0


def _late(closed: bool, first: int) -> None:
    make_trainer((2, 1)).fit(_LateScale(closed, first), loader((2, 1), 4 * max(2 * first, 5)))


@pytest.mark.parametrize(("closed", "first"), [(False, 3), (True, 3), (False, 20)])
def test_what_has_no_gradient_in_the_first_steps_is_checked_when_it_has_one(
    world: Worlds, closed: bool, first: int
) -> None:
    for outcome in world(3).start(_late, closed, first).wait(grace=20):
        assert outcome.state == "raised" and "add 'net.mlp.scale'" in outcome.error, outcome.error


def test_what_never_has_a_gradient_costs_overlap_in_few_steps_only() -> None:
    class _Nobody:
        topology = SimpleNamespace(full_degree=2)

    model = parallelize(nn.Linear(2, 2), {}, TensorParallelContext(LayoutFamily(2), 2, 0))
    check = FirstStepCheck(model, _Nobody())  # type: ignore[arg-type]
    assert [k for k in range(1, 200) if check.begin()] == [*range(1, FirstStepCheck.PATIENCE + 1), 32, 64, 128]


class _DrawsAlone(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if slot() == 0:
            torch.randn(1)
        return F.mse_loss(self.net.drop(self.net(batch[0])), batch[1])


def _draw_alone() -> None:
    make_trainer((2,)).fit(_DrawsAlone(), loader((2,), 8))


def test_other_masks_are_told_rather_than_the_gradients_that_differ_by_them(world: Worlds) -> None:
    for outcome in world(2).start(_draw_alone).wait(grace=20):
        assert outcome.state == "raised" and "different random states" in outcome.error, outcome.error


class _LocalHead(Regression):
    def configure_tp_plan(self) -> dict[str, Any]:
        return {"net.mlp.up_proj": "colwise", "net.mlp.down_proj": "rowwise"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net.mlp(batch[0])
        return (out * (1 + self.trainer.strategy.device_mesh["tensor_parallel"].get_local_rank())).mean()


def _local_head() -> None:
    make_trainer((2,)).fit(_LocalHead(), loader((2,), 8))


def test_a_sharded_module_is_not_advised_to_be_summed(world: Worlds) -> None:
    for outcome in world(2).start(_local_head).wait(grace=20):
        assert "'net.mlp.down_proj.bias'" in outcome.error and "what follows computes on shards" in outcome.error
        assert "replicated_with_grad_allreduce" not in outcome.error, outcome.error


@pytest.mark.parametrize(("returned", "words"), [(None, "is its `return` missing?"), (["mlp"], "is a list, not")])
def test_a_plan_that_is_none_is_told_with_what_a_plan_is(returned: Any, words: str) -> None:
    module = _Planned(_ScaleAfter, returned)
    with pytest.raises(PlanError, match=re.escape(words)):
        plan_of(module, None)
