"""Parameters that are used sometimes, somewhere, or never; layers frozen and thawed on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lightning.rigs import (
    FEATURES,
    Degrees,
    EndState,
    FeedForward,
    Net,
    Regression,
    Worlds,
    assert_same,
    loader,
    make_trainer,
    replica_of,
    seeded,
)


class _Spare(Net):
    """A net with a block, a norm and a head more than it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = FeedForward(FEATURES, 7)
        self.spare_norm = nn.LayerNorm(FEATURES)


class _Sparse(Regression):
    """AdamW with decay: a parameter that gets a gradient of zeros instead of None would move."""

    def __init__(self) -> None:
        super().__init__(build=_Spare)
        self.missing: list[list[str]] = []

    def configure_tp_plan(self) -> dict[str, Any]:
        return {"net.mlp": "mlp", "net.spare": "mlp"}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.missing.append([n for n, p in self.named_parameters() if p.grad is None])


class _UsedInOneReplica(_Sparse):
    """Rows 0, 2, 4, ... (replica 0's) go through the spare block, the others do not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        degrees = getattr(self.trainer.strategy, "degrees", None)
        if degrees is not None:
            used = torch.full((len(x),), replica_of(degrees) == 0)
        else:
            used = torch.arange(len(x)) % 2 == 0
        z = x
        if used.any():
            z = x + used[:, None] * self.net.spare(self.net.spare_norm(x))
        return (self.net(z) - y).pow(2).mean()


def _train(degrees: Degrees, kind: type[_Sparse], count: int = 12, **options: Any) -> Any:
    module, end = kind(), EndState()
    make_trainer(degrees, callbacks=[end], **options).fit(module, loader(degrees, count))
    return end.parameters, end.optimizers, module.gradients, module.missing


@pytest.mark.parametrize("degrees", [(2, 1), (1, 1), (2,)])
def test_a_parameter_nobody_uses_keeps_no_gradient(world: Worlds, degrees: tuple[int, ...]) -> None:
    for side in world(sum(degrees)).run(_train, degrees, _Sparse):
        spare = [f"net.{n}" for n, _ in seeded(_Spare, 0).named_parameters() if n.startswith("spare")]
        assert side[3] == [spare] * len(side[3])
        if side[0]:
            start = {f"net.{n}": p.double() for n, p in seeded(_Spare, 0).named_parameters()}
            assert all(torch.equal(side[0][n], start[n]) for n in spare)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 1), (2, 2)])
def test_a_parameter_used_on_one_replica_only_gets_the_sum_everywhere(world: Worlds, degrees: tuple[int, ...]) -> None:
    """Also where that replica's rows are only some of the batch's: the gradient is the dense one."""
    sides = world(sum(degrees)).run(_train, degrees, _UsedInOneReplica)
    truth = _train(None, _UsedInOneReplica)
    assert_same(sides[0], truth)
    assert all(not any(side[3]) for side in sides)


class _Thawing(_Sparse):
    """Starts with a frozen block; thaws it before the third batch and freezes the head instead."""

    def __init__(self) -> None:
        super().__init__()
        self.net.mlp.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net.mlp.requires_grad_(True)
            self.net.head.requires_grad_(False)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 1)])
def test_layers_may_be_frozen_and_thawed_while_training(world: Worlds, degrees: tuple[int, ...]) -> None:
    got, truth = world(sum(degrees)).run(_train, degrees, _Thawing, 16)[0], _train(None, _Thawing, 16)
    assert "net.mlp.up_proj.weight" in truth[3][0] and "net.head.weight" in truth[3][-1]
    assert_same(got, truth)
