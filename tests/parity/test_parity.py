"""Training at any mix of degrees is the dense run over the same global batches, through the actual Trainer.

The sizes of the model divide by none of the degrees (25 heads over 5 KV heads, hidden 31, FFN 37, vocabulary 53), and
every rank starts from another seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.harness import World
from tests.models import GPTConfig
from tests.parity.compare import assert_parity, bounds_of, relative
from tests.parity.runs import train_in_world
from tests.reference import Recipe, Record, train

pytestmark = pytest.mark.parity

Worlds = Callable[..., World]

DEGREES = [(1,), (2,), (3,), (4, 4), (4, 3), (4, 2, 3), (3, 1)]
_CLIPPED = Recipe(clip_norm=0.5)
_SGD = Recipe(optimizer="sgd", lr=0.1)


def _name(degrees: tuple[int, ...]) -> str:
    return "-".join(map(str, degrees))


def _check(
    world: Worlds, recipe: Recipe, degrees: tuple[int, ...], manual: bool = False, gradients: bool = False
) -> None:
    recipe = replace(recipe, replicas=len(degrees))
    got = train_in_world(world(sum(degrees)), recipe, degrees, manual=manual, gradients=gradients)
    assert_parity(got, train(recipe), bounds_of(recipe))


@pytest.mark.parametrize(
    ("degrees", "dtype"),
    [
        # float32 of the large worlds by `make chaos`
        pytest.param(degrees, dtype, marks=[pytest.mark.chaos] * (dtype == "float32" and sum(degrees) > 7))
        for degrees in DEGREES
        for dtype in ("float64", "float32")
    ],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
def test_adamw_with_clipping_follows_the_dense_run(world: Worlds, degrees: tuple[int, ...], dtype: str) -> None:
    recipe = replace(_CLIPPED, dtype=dtype)
    reference = train(replace(recipe, replicas=len(degrees)))
    assert min(reference.norms) > 0.5, "every step of the reference must clip, or the test shows less than it says"
    _check(world, recipe, degrees)


@pytest.mark.parametrize(
    "degrees", [pytest.param(d, marks=[pytest.mark.chaos] * (sum(d) > 7)) for d in DEGREES], ids=_name
)
def test_raw_gradients_under_sgd_are_the_dense_ones(world: Worlds, degrees: tuple[int, ...]) -> None:
    """Adam hides errors of scale; SGD's parameters and the gradients themselves do not."""
    _check(world, _SGD, degrees, gradients=True)


_VARIANTS = {
    "everything-biased-and-tied": GPTConfig(
        heads=7, kv_heads=7, qk_norm=True, attention_bias=True, output_bias=True, mlp_bias=True, tied=True
    ),
    "one-kv-head": GPTConfig(heads=7, kv_heads=1, qk_norm=True, attention_bias=True),
    "fewer-kv-heads-than-ranks": GPTConfig(heads=6, kv_heads=2),
    "15-heads-of-3-groups": GPTConfig(heads=15, kv_heads=3, qk_norm=True),
    "gpt2": GPTConfig(
        heads=5, kv_heads=5, norm="layer", positions="learned", mlp="fc", mlp_bias=True, output_bias=True, tied=True
    ),
    "packed": GPTConfig(packed=True, qk_norm=True, attention_bias=True, mlp_bias=True),
    "plain-mlp": GPTConfig(heads=5, kv_heads=1, mlp="gelu", mlp_bias=True, norm="layer"),
}


@pytest.mark.parametrize("degrees", [pytest.param((2,), marks=pytest.mark.chaos), (4, 3)], ids=_name)
@pytest.mark.parametrize("variant", _VARIANTS)
def test_raw_gradients_of_every_model_variant_are_the_dense_ones(
    world: Worlds, variant: str, degrees: tuple[int, ...]
) -> None:
    _check(world, replace(_SGD, model=_VARIANTS[variant], steps=5), degrees, gradients=True)


@pytest.mark.parametrize(
    "variant",
    [
        "everything-biased-and-tied",
        pytest.param("fewer-kv-heads-than-ranks", marks=pytest.mark.chaos),
        pytest.param("gpt2", marks=pytest.mark.chaos),
    ],
)
def test_adamw_follows_the_dense_run_for_other_models(world: Worlds, variant: str) -> None:
    _check(world, replace(_CLIPPED, model=_VARIANTS[variant]), (4, 3))


@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        pytest.param((4, 3), {"dataset_size": 37}, id="smaller-last-batch"),
        pytest.param(
            (4, 3),
            {"dataset_size": 29, "padded": False, "shuffle": False},
            id="last-batches-of-3-and-2",
            marks=pytest.mark.chaos,
        ),
        pytest.param((4, 3), {"dataset_size": 50, "batch_sizes": (5, 2), "shuffle": False}, id="batches-of-5-and-2"),
        pytest.param(
            (4, 2, 3),
            {"dataset_size": 49, "batch_sizes": (5, 1, 3), "shuffle": False},
            id="5-1-and-3",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            (3, 1), {"dataset_size": 29, "padded": False, "shuffle": False, "accumulate": 3}, id="in-a-window-of-3"
        ),
    ],
)
def test_uneven_batches_weigh_every_sample_alike(
    world: Worlds, degrees: tuple[int, ...], changes: dict[str, object]
) -> None:
    _check(world, replace(_SGD, **changes), degrees, gradients=True)


@pytest.mark.parametrize("degrees", [pytest.param((2,), marks=pytest.mark.chaos), (4, 3)], ids=_name)
def test_accumulated_micro_batches_are_one_step(world: Worlds, degrees: tuple[int, ...]) -> None:
    """Seven or eight micro-batches to an epoch: its last window is a short one."""
    _check(world, replace(_CLIPPED, accumulate=3, dataset_size=29 * len(degrees), steps=12), degrees)
    _check(world, replace(_SGD, accumulate=3, dataset_size=29 * len(degrees), steps=4), degrees, gradients=True)


def test_clipping_by_value_clips_the_dense_gradient(world: Worlds) -> None:
    _check(world, Recipe(optimizer="sgd", lr=0.1, clip_value=0.01), (4, 3))


@pytest.mark.parametrize("degrees", [pytest.param((2,), marks=pytest.mark.chaos), (4, 3)], ids=_name)
def test_manual_optimization_follows_the_dense_run(world: Worlds, degrees: tuple[int, ...]) -> None:
    _check(world, _CLIPPED, degrees, manual=True)
    _check(world, replace(_SGD, steps=4), degrees, manual=True, gradients=True)


@pytest.mark.parametrize("degrees", [pytest.param((2,), marks=pytest.mark.chaos), (4, 3)], ids=_name)
def test_bf16_mixed_is_as_near_to_float32_as_the_dense_run_is(world: Worlds, degrees: tuple[int, ...]) -> None:
    """bf16 keeps 8 bits, and another order of sums rounds otherwise: so two bf16 runs do not agree, but both err alike.

    A sum of partial results in bf16 adds one rounding per index, hence the factor.
    """
    factor = 3.0
    recipe = replace(_SGD, dtype="float32", autocast=True, replicas=len(degrees), lr=0.05)
    truth, dense = train(replace(recipe, autocast=False)), train(recipe)
    got = train_in_world(world(sum(degrees)), recipe, degrees, gradients=True)
    assert _worst(got.losses, truth.losses) <= factor * _worst(dense.losses, truth.losses)
    assert _worst(got.norms, truth.norms) <= factor * _worst(dense.norms, truth.norms)
    assert _distance(got.parameters, truth.parameters) <= factor * _distance(dense.parameters, truth.parameters)
    # Only in the first step do all three start from the same parameters.
    assert got.gradients[0].keys() == truth.gradients[0].keys()
    for name, gradient in truth.gradients[0].items():
        error = float((got.gradients[0][name] - gradient).norm() / gradient.norm())
        usual = float((dense.gradients[0][name] - gradient).norm() / gradient.norm())
        assert error <= factor * usual, f"{name}: {error:.2e} against the dense run's {usual:.2e}"


def _worst(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.stack([(a[n] - b[n]).norm() for n in b]).norm())


@pytest.mark.parametrize("degrees", [(4, 3), pytest.param((4, 2, 3), marks=pytest.mark.chaos)], ids=_name)
def test_copies_stay_equal_bit_by_bit_through_50_clipped_steps(world: Worlds, degrees: tuple[int, ...]) -> None:
    recipe = replace(_CLIPPED, dtype="float32", steps=50, replicas=len(degrees))
    got = train_in_world(world(sum(degrees)), recipe, degrees, copies_equal=True)
    assert len(got.norms) == 50 and min(got.norms) > 0.5


def test_two_runs_are_the_same_bit_by_bit(world: Worlds) -> None:
    def once() -> Record:
        return train_in_world(world(7), replace(_CLIPPED, dtype="float32", replicas=2, steps=5), (4, 3))

    a, b = once(), once()
    assert a.losses == b.losses and a.norms == b.norms
    assert all(torch.equal(a.parameters[n], b.parameters[n]) for n in a.parameters)


def test_the_bounds_would_see_a_norm_weight_summed_over_its_copies() -> None:
    """What goes wrong silently elsewhere is far outside the bounds: they are not the reason why the tests pass."""
    gradient = train(replace(_SGD, steps=1)).gradients[0]["norm.weight"]
    assert relative(2 * gradient, gradient) > 0.5
