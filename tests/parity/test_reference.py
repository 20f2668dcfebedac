"""The reference itself: the same as Lightning's DDP where that can do it, and as its own definition elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DistributedSampler

from tests.harness import World
from tests.models import GPTConfig, build, language_model_loss
from tests.parity.compare import EXACT, SINGLE, assert_parity, differences
from tests.parity.runs import RankRecord, combine, train_with
from tests.reference import Recipe, dataset, epoch_batches, train, windows

pytestmark = pytest.mark.parity


class _RecordingDDP(DDPStrategy):
    """DDP with the methods that a recording module asks its strategy for."""

    def full_gradients(self) -> dict[str, Tensor]:
        module = self.lightning_module
        assert module is not None
        return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    def grad_norm(self) -> float:
        return float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in self.full_gradients().values()])))


def _train_ddp(recipe: Recipe, manual: bool) -> RankRecord:
    slot = int(os.environ["LIGHTNING_NTP_SLOT"])
    strategy = _RecordingDDP(process_group_backend="gloo")
    return train_with(strategy, recipe, recipe.replicas, slot, slot, manual, gradients=slot == 0)


_SMALL = Recipe(GPTConfig(layers=1, heads=4, kv_heads=2), replicas=2, steps=8, clip_norm=0.5)


@pytest.mark.parametrize(
    ("recipe", "manual"),
    [
        pytest.param(_SMALL, False, id="adamw-clipped"),
        pytest.param(replace(_SMALL, dtype="float32"), False, id="float32"),
        pytest.param(
            replace(_SMALL, optimizer="sgd", clip_norm=None, clip_value=0.01), False, id="sgd-clipped-by-value"
        ),
        pytest.param(replace(_SMALL, dataset_size=37, accumulate=3, steps=5), False, id="accumulation-padded"),
        pytest.param(replace(_SMALL, model=GPTConfig(layers=1, tied=True)), True, id="manual-tied"),
    ],
)
def test_reference_trains_as_lightning_ddp_does(world: Callable[..., World], recipe: Recipe, manual: bool) -> None:
    # Without this, rank 0 would host a store on the port where the harness has one.
    ranks = world(2).run(_train_ddp, recipe, manual, env={"TORCHELASTIC_USE_AGENT_STORE": "True"})
    bounds = EXACT if recipe.dtype == "float64" else SINGLE
    assert_parity(combine(ranks, (1, 1)), train(recipe), bounds)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("size", [72, 37])
def test_replicas_take_what_a_distributed_sampler_gives_them(replicas: int, size: int) -> None:
    recipe = Recipe(replicas=replicas, dataset_size=size)
    for epoch in (0, 1):
        batches = epoch_batches(recipe, epoch)
        for r in range(replicas):
            sampler = DistributedSampler(range(size), num_replicas=replicas, rank=r)
            sampler.set_epoch(epoch)
            assert [i for batch in batches for i in batch[r]] == list(sampler)


def test_unpadded_batches_use_every_row_once_and_differ_in_size() -> None:
    batches = epoch_batches(Recipe(replicas=2, dataset_size=29, padded=False, shuffle=False), 0)
    assert sorted(i for batch in batches for share in batch for i in share) == list(range(29))
    assert [[len(share) for share in batch] for batch in batches] == [[4, 4]] * 3 + [[3, 2]]


def test_batches_of_given_sizes_use_every_row_once_and_leave_no_replica_empty() -> None:
    batches = epoch_batches(Recipe(replicas=3, dataset_size=22, batch_sizes=(5, 3, 1), shuffle=False), 0)
    assert sorted(i for batch in batches for share in batch for i in share) == list(range(22))
    assert [[len(share) for share in batch] for batch in batches] == [[5, 3, 1], [5, 3, 1], [2, 1, 1]]


def test_an_epochs_end_closes_an_accumulation_window() -> None:
    recipe = Recipe(dataset_size=20, accumulate=2, steps=4)
    assert [len(window) for window in windows(recipe)] == [2, 2, 1, 2]


def test_the_loss_of_a_concatenated_batch_is_the_weighted_sum_of_its_shares() -> None:
    recipe = Recipe(replicas=2, dataset_size=29, padded=False, shuffle=False)
    model, rows = build(recipe.model, 0).double(), dataset(recipe)
    a, b = epoch_batches(recipe, 0)[-1]
    whole = language_model_loss(model, rows[a + b])
    shares = [language_model_loss(model, rows[share]) * len(share) / 5 for share in (a, b)]
    torch.testing.assert_close(whole, sum(shares), rtol=1e-12, atol=0)


def test_the_reference_learns_and_the_comparison_sees_a_wrong_scale() -> None:
    recipe = replace(_SMALL, steps=20)
    right = train(recipe)
    assert right.losses[-1] < right.losses[0] - 0.1
    assert not differences(right, right, EXACT)
    wrong = differences(train(replace(recipe, lr=recipe.lr * (1 + 1e-6))), right, EXACT)
    assert any(line.startswith("parameter") for line in wrong) and any(line.startswith("loss") for line in wrong)


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(),
        GPTConfig(heads=7, kv_heads=1, qk_norm=True, attention_bias=True, output_bias=True, mlp_bias=True, tied=True),
        GPTConfig(norm="layer", positions="learned", mlp="fc", mlp_bias=True),
        GPTConfig(positions="none", mlp="gelu", packed=True),
        GPTConfig(packed=True, qk_norm=True, attention_bias=True),
    ],
)
def test_every_parameter_of_every_variant_gets_a_gradient(config: GPTConfig) -> None:
    recipe = Recipe(config, steps=1)
    (gradients,) = train(recipe).gradients
    assert all(float(g.abs().max()) > 1e-8 for g in gradients.values()), gradients
    assert gradients.keys() == {n for n, _ in build(config, 0).named_parameters()}


def test_packed_and_separate_projections_are_the_same_model() -> None:
    plain = build(GPTConfig(attention_bias=True), 0)
    packed = build(GPTConfig(attention_bias=True, packed=True), 0)
    state = plain.state_dict()
    for i in range(2):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"layers.{i}.attention.{p}_proj.{kind}") for p in "qkv"]
            state[f"layers.{i}.attention.qkv_proj.{kind}"] = torch.cat(parts)
        parts = [state.pop(f"layers.{i}.mlp.{p}_proj.weight") for p in ("gate", "up")]
        state[f"layers.{i}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    packed.load_state_dict(state)
    tokens = torch.arange(18).view(2, 9)
    torch.testing.assert_close(packed(tokens), plain(tokens))
