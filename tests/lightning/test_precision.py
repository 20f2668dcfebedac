"""16-bit and 64-bit training; an overflow anywhere is an overflow everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from tests.lightning.rigs import Degrees, EndState, Regression, Worlds, assert_same, loader, make_trainer, slot

OVERFLOW_STEP = 1


class _Scaled(Regression):
    """Records the scale and the weights of every step; one rank's gradient overflows in the second.

    Args:
        where: The slot, and the parameter, that overflows; of the local shard only its first element.
    """

    def __init__(self, where: tuple[int, str] | None) -> None:
        super().__init__(lr=0.01)
        self.where = where
        self.scales: list[float] = []
        self.moved: list[bool] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([t.float() for t in batch], batch_idx)

    def on_after_backward(self) -> None:
        # after the sync: nobody else's gradient shows it
        if self.where is not None and self.where[0] == slot() and self.steps == OVERFLOW_STEP:
            gradient = self.get_parameter(self.where[1]).grad
            assert gradient is not None
            gradient.view(-1)[0] = float("inf")
        self.steps += 1
        self.before = [p.detach().clone() for p in self.parameters()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]
        self.moved.append(any(not torch.equal(a, b) for a, b in zip(self.before, self.parameters(), strict=True)))

    def on_train_end(self) -> None:
        self.trainer.strategy.assert_copies_equal()  # type: ignore[attr-defined]


def _scaler() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2))


def _overflow(degrees: tuple[int, ...], where: Any, clip: float | None) -> Any:
    module = _Scaled(where)
    make_trainer(degrees, plugins=[_scaler()], gradient_clip_val=clip).fit(module, loader(degrees, 16))
    return module.scales, module.moved


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("degrees", "where"),
    [
        ((2, 1), (1, "net.mlp.up_proj.weight")),
        ((2, 1), (2, "net.head.weight")),
        ((3,), (2, "net.mlp.down_proj.weight")),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    world: Worlds, degrees: tuple[int, ...], where: Any, clip: float | None
) -> None:
    for scales, moved in world(3).run(_overflow, degrees, where, clip):
        assert len(moved) >= 4 and moved == [k != OVERFLOW_STEP for k in range(len(moved))]
        # halved by the overflow, doubled after two good steps
        assert scales[:4] == [16.0, 8.0, 8.0, 16.0]


class _Half(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([t.to(self.net.head.weight.dtype) for t in batch], batch_idx)


def _train(degrees: Degrees, precision: str) -> Any:
    module, end = _Half(), EndState()
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        options = {"plugins": [_scaler()]}
    trainer = make_trainer(degrees, callbacks=[end], **options)
    trainer.fit(module, loader(degrees, 16))
    return end.parameters, module.gradients


@pytest.mark.parametrize(
    ("precision", "dtype", "bound"),
    [
        ("64-true", torch.float64, 1e-10),
        ("32-true", torch.float32, 1e-5),
        # 8 and 11 bits: each of some ten roundings on the way of a gradient may fall to the other side
        ("bf16-true", torch.bfloat16, 10 * 2**-8),
        ("bf16-mixed", torch.float32, 10 * 2**-8),
        ("16-mixed", torch.float32, 10 * 2**-11),
    ],
)
def test_every_precision_trains_like_the_dense_run(
    world: Worlds, precision: str, dtype: torch.dtype, bound: float
) -> None:
    got, truth = world(3).run(_train, (2, 1), precision)[0], _train(None, precision)
    assert {t.dtype for t in got[0].values()} == {t.dtype for t in truth[0].values()} == {dtype}
    assert_same(got, truth, bound)
