"""Manual optimization: several optimizers, several backward passes, and the mistakes that are told."""

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
    gradients_of,
    loader,
    make_trainer,
    seeded,
)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.LayerNorm(FEATURES), FeedForward(FEATURES, 7))
        self.critic = nn.Sequential(FeedForward(FEATURES, 5), nn.Linear(FEATURES, 1))


class _Gan(Regression):
    """Generator and critic in turn, each toggled while the other holds still. The critic steps twice as often."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(_Pair, 0)
        self.automatic_optimization = False
        self.kept: list[bool] = []

    def configure_tp_plan(self) -> dict[str, Any]:
        return {"net.generator.1": "mlp", "net.critic.0": "mlp"}

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.net.critic.parameters(), lr=1e-2, momentum=0.9),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        generator, critic = self.optimizers()
        if batch_idx % 2:
            self.toggle_optimizer(generator)
            generator.zero_grad()
            self.manual_backward(-self.net.critic(self.net.generator(x)).mean())
            generator.step()
            self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        critic.zero_grad()
        real = x + F.pad(y, (0, FEATURES - 2))
        self.manual_backward((self.net.critic(self.net.generator(x).detach()) - self.net.critic(real)).pow(2).mean())
        self.clip_gradients(critic, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        critic.step()
        self.untoggle_optimizer(critic)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def _train(degrees: Degrees, kind: type[Regression], count: int = 16, **options: Any) -> Any:
    module, end = kind(), EndState()
    make_trainer(degrees, callbacks=[end], **options).fit(module, loader(degrees, count))
    return end.parameters, end.optimizers, module.gradients


@pytest.mark.parametrize("degrees", [(2, 1), (1, 1)])
def test_a_gan_with_toggled_optimizers_follows_the_dense_run(world: Worlds, degrees: tuple[int, ...]) -> None:
    truth = _train(None, _Gan)
    assert_same(world(sum(degrees)).run(_train, degrees, _Gan)[0], truth)


class _Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(gradients_of(self))


class _ManyBackwards(_Manual):
    """Three synced backward passes before one step; the head's gradient comes from two of them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.net.mlp(x).pow(2).mean())
        self.manual_backward(0.5 * self.loss((x.flip(-1), y)))
        optimizer.step()


class _BlockedSync(_Manual):
    """Two local backward passes, then a synced one; a window over two batches, too."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        if degrees_of(self) is None:
            self.manual_backward(self.loss(batch))
            self.manual_backward(self.net.mlp(x).pow(2).mean())
        else:
            with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
                self.manual_backward(self.loss(batch))
                self.manual_backward(self.net.mlp(x).pow(2).mean())
        self.manual_backward(0.5 * self.loss((x.flip(-1), y)))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class _AlternatelyBlocked(_Manual):
    """The last backward of the window reaches the head only: what the others left must be synced with it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if degrees_of(self) is None:
            self.manual_backward(self.loss(batch))
        else:
            with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
                self.manual_backward(self.loss(batch))
        self.manual_backward(F.mse_loss(self.net.head(x), y))
        optimizer.step()


def degrees_of(module: Regression) -> Degrees:
    return getattr(module.trainer.strategy, "degrees", None)


@pytest.mark.parametrize("kind", [_ManyBackwards, _BlockedSync, _AlternatelyBlocked])
@pytest.mark.parametrize("degrees", [(2, 1), (1, 1)])
def test_gradients_of_several_backward_passes_add_up(
    world: Worlds, kind: type[Regression], degrees: tuple[int, ...]
) -> None:
    assert_same(world(sum(degrees)).run(_train, degrees, kind)[0], _train(None, kind))


class _FrozenWhileLocal(_Manual):
    """The block has local gradients when a backward without it, frozen, is synced: they must not pass for synced."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if degrees_of(self) is None:
            self.manual_backward(self.loss(batch))
        else:
            with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
                self.manual_backward(self.loss(batch))
        self.net.mlp.requires_grad_(False)
        self.manual_backward(F.mse_loss(self.net.head(x), y))
        self.net.mlp.requires_grad_(True)
        self.manual_backward(self.net.mlp(x).pow(2).mean())
        optimizer.step()


@pytest.mark.parametrize("bucket", [25, 1e-4])
def test_gradients_that_were_local_while_frozen_are_synced_later(world: Worlds, bucket: float) -> None:
    """With one bucket for all, and with one for every parameter or two."""
    got = world(3).run(_train, (2, 1), _FrozenWhileLocal, strategy={"bucket_cap_mb": bucket})[0]
    assert_same(got, _train(None, _FrozenWhileLocal))


class _Forgetful(_Manual):
    """Calls loss.backward() itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()


class _StillBlocked(_Manual):
    """Takes the step although no backward was synced."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(self.loss(batch))
        self.optimizers().step()


@pytest.mark.parametrize("kind", [_Forgetful, _StillBlocked])
def test_a_step_on_gradients_that_were_not_synced_is_an_error(world: Worlds, kind: type[Regression]) -> None:
    for outcome in world(3).start(_train, (2, 1), kind).wait():
        assert outcome.state == "raised" and "was not synced over the replicas" in outcome.error, outcome.error
        assert "manual_backward" in outcome.error and "'net." in outcome.error


class _TwoOptimizersOneLocal(_Manual):
    """Steps the head while the block still accumulates locally: no business of the head's optimizer."""

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.head.parameters(), lr=0.1),
            torch.optim.SGD([*self.net.mlp.parameters(), *self.net.norm.parameters()], lr=0.1),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        head, block = self.optimizers()
        with self.trainer.strategy.block_backward_sync() if degrees_of(self) else torch.enable_grad():  # type: ignore
            self.manual_backward(self.net.mlp(self.net.norm(x)).pow(2).mean())
        self.net.mlp.requires_grad_(False)
        self.net.norm.requires_grad_(False)
        self.manual_backward(F.mse_loss(self.net.head(x), y))
        self.net.mlp.requires_grad_(True)
        self.net.norm.requires_grad_(True)
        head.step()
        head.zero_grad()
        self.manual_backward(self.net.mlp(self.net.norm(x)).pow(2).mean())
        block.step()
        block.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class _LocalBetween(_TwoOptimizersOneLocal):
    """The head's gradient is synced already when the block accumulates locally; then the head steps."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        head, block = self.optimizers()
        self.manual_backward(F.mse_loss(self.net.head(x), y))
        with self.trainer.strategy.block_backward_sync() if degrees_of(self) else torch.enable_grad():  # type: ignore
            self.manual_backward(self.net.mlp(self.net.norm(x)).pow(2).mean())
        head.step()
        head.zero_grad()
        self.manual_backward(0.5 * self.net.mlp(self.net.norm(x.flip(-1))).pow(2).mean())
        block.step()
        block.zero_grad()


class _Discards(_Manual):
    """Throws local gradients away, with synced ones below them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        with self.trainer.strategy.block_backward_sync() if degrees_of(self) else torch.enable_grad():  # type: ignore
            self.manual_backward(self.loss((x.flip(-1), y)))
        optimizer.zero_grad()
        self.manual_backward(0.5 * self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [_TwoOptimizersOneLocal, _LocalBetween, _Discards])
@pytest.mark.parametrize("degrees", [(2, 1), (1, 1)])
def test_local_gradients_neither_mix_with_synced_ones_nor_hold_up_another_optimizer(
    world: Worlds, kind: type[Regression], degrees: tuple[int, ...]
) -> None:
    assert_same(world(sum(degrees)).run(_train, degrees, kind)[0], _train(None, kind))


class _Accumulated(Regression):
    """The block is used in the first micro-batch of every window only, the head in all."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(batch) if batch_idx % 2 == 0 else F.mse_loss(self.net.head(x), y)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 1)])
def test_a_gradient_from_an_earlier_micro_batch_counts_although_the_last_one_has_none(
    world: Worlds, degrees: tuple[int, ...]
) -> None:
    options = {"accumulate_grad_batches": 2}
    assert_same(
        world(sum(degrees)).run(_train, degrees, _Accumulated, **options)[0], _train(None, _Accumulated, **options)
    )
