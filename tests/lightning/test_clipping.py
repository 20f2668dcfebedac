"""Clipping sees the gradient of the whole model, however it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lightning.rigs import Degrees, EndState, Regression, Worlds, assert_same, loader, make_trainer

BOUND = 0.05


class _Overridden(Regression):
    """Clips more and more, by calling ``self.clip_gradients`` as Lightning's documentation shows."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        value = BOUND / (1 + self.trainer.global_step)
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")
        self.gradients.append({"norm": torch.as_tensor(value)})


class _Measured(Regression):
    """Looks at the gradients after clipping."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.on_before_optimizer_step(args[0])


def _clip(degrees: Degrees, kind: type[Regression], **options: Any) -> Any:
    module, end = kind(), EndState()
    make_trainer(degrees, callbacks=[end], **options).fit(module, loader(degrees, 12))
    return end.parameters, module.gradients


@pytest.mark.parametrize("degrees", [(2, 1), (3,)])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipped_gradients_are_the_dense_ones(world: Worlds, degrees: tuple[int, ...], algorithm: str) -> None:
    options = {"gradient_clip_val": BOUND, "gradient_clip_algorithm": algorithm}
    truth = _clip(None, _Measured, **options)
    raw, clipped = truth[1][0], truth[1][1]
    assert not torch.equal(raw["net.head.weight"], clipped["net.head.weight"]), "the truth must clip"
    if len(degrees) == 2:
        assert_same(world(sum(degrees)).run(_clip, degrees, _Measured, **options)[0], truth)
    else:
        single = world(sum(degrees)).run(_single, degrees, _Measured, **options)[0]
        assert_same(single, _single(None, _Measured, **options))


def _single(degrees: Degrees, kind: type[Regression], **options: Any) -> Any:
    """One replica: its batches are the global ones."""
    module, end = kind(), EndState()
    make_trainer(degrees, callbacks=[end], **options).fit(module, loader(degrees, 6, replicas=1))
    return end.parameters, module.gradients


def test_an_overridden_clipping_hook_that_calls_clip_gradients_clips_the_whole_models_norm(world: Worlds) -> None:
    assert_same(world(3).run(_clip, (2, 1), _Overridden)[0], _clip(None, _Overridden))


def _norms(degrees: Degrees) -> list[Any]:
    module, found = Regression(), []

    def measure(optimizer: Any) -> None:
        strategy: Any = module.trainer.strategy
        for kind in (2.0, 1.0, float("inf")):
            if degrees is None:
                gradients = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
                found.append(torch.linalg.vector_norm(gradients, kind))
            else:
                found.append(strategy.grad_norm(optimizer, kind))

    module.on_before_optimizer_step = measure  # type: ignore[method-assign]
    make_trainer(degrees).fit(module, loader(degrees, 8))
    return found


def test_norms_of_any_kind_are_the_dense_ones_and_the_same_bits_everywhere(world: Worlds) -> None:
    sides = world(3).run(_norms, (2, 1))
    assert_same(sides[0], _norms(None))
    for side in sides[1:]:
        assert_same(side, sides[0], 0.0)
