"""What a plan cannot do is refused before anything is cut, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from lightning_ntp.parallel import PlanError, ShardedModel, TensorParallelContext, parallelize
from lightning_ntp.plan import LayoutFamily


def cut(module: nn.Module, plan: Any) -> ShardedModel:
    """Cut a model for index 0 of 2."""
    model = parallelize(module, plan, TensorParallelContext(LayoutFamily(2), 2, 0))
    model.cut()
    return model


def refusal(module: nn.Module, plan: Any) -> str:
    with pytest.raises(PlanError) as refused:
        parallelize(module, plan, TensorParallelContext(LayoutFamily(2), 2, 0))
    return str(refused.value)


class FeedForward(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], Any] = lambda linear: linear) -> None:
        super().__init__()
        self.up_proj = wrap(nn.Linear(6, 8))
        self.down_proj = wrap(nn.Linear(8, 6))


class Attention(nn.Module):
    """Any projections and attributes: 4 query heads of 2, 2 key/value heads."""

    def __init__(self, packed: str | None = None, **attributes: Any) -> None:
        super().__init__()
        if packed is None:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(6, 4)
        else:
            setattr(self, packed, nn.Linear(6, 24))
        self.o_proj = nn.Linear(8, 6)
        for name, value in attributes.items():
            setattr(self, name, value)


def model(**children: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


@pytest.mark.parametrize(
    "wrap",
    [
        weight_norm,
        spectral_norm,
        lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
        lambda linear: prune.random_unstructured(linear, "bias", 0.5),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
    ],
)
@pytest.mark.parametrize("plan", [{"mlp": "mlp"}, {"mlp.up_proj": "colwise"}, {"mlp.down_proj": "rowwise"}])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_computed_weights_are_refused(wrap: Any, plan: Any) -> None:
    assert "is computed from other tensors" in refusal(model(mlp=FeedForward(wrap)), plan)


def test_a_computed_embedding_and_a_lazy_layer_are_refused() -> None:
    embedding = parametrizations.weight_norm(nn.Embedding(8, 4))
    assert "is computed from other tensors" in refusal(model(emb=embedding), {"emb": "embedding_rowwise"})
    assert "no sizes yet" in refusal(model(up=nn.LazyLinear(8)), {"up": "colwise"})


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"layer.self_attn": "attention"}, "nn.MultiheadAttention 'layer.self_attn'"),
        ({"layer.self_attn.out_proj": "rowwise"}, "F.scaled_dot_product_attention"),
        ({"layer": "attention"}, "'layer.linear1': 'colwise', 'layer.linear2': 'rowwise'"),
        ({"layer": {"style": "mlp", "up": "linear1", "down": "linear2"}}, "'layer.linear1': 'colwise'"),
    ],
)
def test_torchs_fused_blocks_are_refused_by_name(plan: Any, words: str) -> None:
    assert words in refusal(model(layer=nn.TransformerEncoderLayer(8, 2, 16)), plan)


def test_a_planned_encoder_layer_does_not_take_weights_past_their_modules_in_inference() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    cut(encoder, {"layers.0.linear1": "colwise", "layers.0.linear2": "rowwise"})
    with torch.no_grad(), pytest.raises(ValueError, match="group"):
        encoder(torch.randn(2, 3, 8))  # no process group here: that the sum is asked for is the claim


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"mlp.up_porj": "colwise"}, "did you mean 'mlp.up_proj'?"),
        ({"mpl.*": "colwise"}, "matches no module"),
        ({"mlp.up_proj": "colwize"}, "did you mean 'colwise'?"),
        ({3: "mlp"}, "the plan has the key 3"),
        ({"mlp.up_proj": ColwiseParallel()}, "write 'colwise'"),
        ({"mlp.up_proj": SequenceParallel()}, "known are attention"),
    ],
)
def test_slips_of_the_pen_are_told_with_what_was_meant(plan: Any, words: str) -> None:
    assert words in refusal(model(mlp=FeedForward()), plan)


def test_a_pattern_with_a_star_is_compared_with_starred_names() -> None:
    root = model(layers=nn.ModuleList([model(mlp=FeedForward()), model(mlp=FeedForward())]))
    assert "did you mean 'layers.*.mlp'?" in refusal(root, {"layer.*.mlp": "mlp"})


@pytest.mark.parametrize("style", ["colwise_gather_output", "rowwise"])
def test_what_delivers_whole_values_cannot_lie_in_a_block(style: str) -> None:
    block = FeedForward()
    block.extra = nn.Linear(8, 8)
    message = refusal(model(mlp=block), {"mlp": "mlp", "mlp.extra": style})
    assert f"'mlp.extra' is '{style}'" in message and "inside of the block 'mlp'" in message


def test_an_embedding_cannot_lie_in_a_block() -> None:
    block = FeedForward()
    block.extra = nn.Embedding(8, 8)
    assert "is 'embedding_rowwise'" in refusal(model(mlp=block), {"mlp": "mlp", "mlp.extra": "embedding_rowwise"})


def _tied(vocabulary: int) -> nn.Module:
    root = model(emb=nn.Embedding(vocabulary, 6), head=nn.Linear(6, vocabulary, bias=False))
    root.head.weight = root.emb.weight
    return root


def test_a_tied_head_that_the_plan_forgets_is_named() -> None:
    assert "add 'head': 'colwise_gather_output'" in refusal(_tied(16), {"emb": "embedding_rowwise"})
    assert "add 'emb': 'embedding_rowwise'" in refusal(_tied(16), {"head": "colwise_gather_output"})


def test_a_tied_head_is_dealt_out_as_its_embedding_is_whatever_the_vocabulary() -> None:
    for vocabulary in (53, 1024):  # single rows, blocks of 8
        root = _tied(vocabulary)
        sharded = cut(root, {"emb": "embedding_rowwise", "head": "colwise_gather_output"})
        assert len(sharded.parameters) == 1 and root.head.weight.shape[0] < vocabulary


def test_a_module_may_appear_twice() -> None:
    shared = nn.Linear(6, 8)
    cut(model(a=shared, b=shared), {"a": "colwise"})


def test_query_key_value_must_be_said_to_be_interleaved_or_not() -> None:
    block = Attention("query_key_value", num_heads=4)
    assert "interleaved: true" in refusal(model(attention=block), {"attention": "attention"})
    plan = {"attention": {"style": "attention", "interleaved": True, "kv_heads": 2}}
    block.query_key_value = nn.Linear(6, 16)
    assert "as many key/value heads as query heads" in refusal(model(attention=block), plan)


def test_key_value_heads_that_are_not_found_are_asked_for() -> None:
    message = refusal(model(attention=Attention(num_heads=4, groups=2)), {"attention": "attention"})
    assert "kv_heads: NAME" in message
    cut(model(attention=Attention(num_heads=4, groups=2)), {"attention": {"style": "attention", "kv_heads": "groups"}})


def _attention(heads: object) -> dict[str, Any]:
    return {"attention": {"style": "attention", "heads": heads, "kv_heads": 2}}


def test_the_one_attribute_equal_to_a_number_of_heads_is_kept_local() -> None:
    block = Attention(nh=4)
    cut(model(attention=block), _attention(4))
    assert block.nh == 2


@pytest.mark.parametrize("attributes", [{"nh": 4, "other": 4}, {"head_dim": 4}, {"layer_idx": 4}])
def test_a_number_of_heads_that_may_stand_under_several_names_is_refused(attributes: dict[str, int]) -> None:
    assert "heads: NAME" in refusal(model(attention=Attention(**attributes)), _attention(4))


def test_a_number_of_heads_that_stands_nowhere_is_taken() -> None:
    cut(model(attention=Attention(width=6)), _attention(4))


def test_a_missing_number_of_heads_is_asked_for_by_name() -> None:
    message = refusal(model(attention=Attention()), {"attention": "attention"})
    assert "heads: NAME" in message and "or give the number" in message


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"down": "rowwise"}, "'down' is 'rowwise' in the plan and holds 4 of its input features, but is given 8"),
        ({"up": "colwise"}, "'down' is not in the plan, so it takes 8 whole features, but it is given 4"),
    ],
)
def test_half_a_pair_is_told_in_the_first_forward(plan: dict[str, str], words: str) -> None:
    root = model(up=nn.Linear(6, 8), down=nn.Linear(8, 6))
    cut(root, plan)
    with pytest.raises(PlanError, match=words):
        root.down(root.up(torch.randn(2, 6)))


def test_a_pair_must_be_dealt_out_in_the_same_units() -> None:
    plan: dict[str, Any] = {"mlp.up_proj": {"style": "colwise", "units": 4}, "mlp.down_proj": "rowwise"}
    assert "takes 8 features in 8 units, but 'mlp.up_proj' delivers them in 4" in refusal(
        model(mlp=FeedForward()), plan
    )
    cut(model(mlp=FeedForward()), {**plan, "mlp.down_proj": {"style": "rowwise", "units": 4}})


def test_the_look_at_whole_inputs_ends_with_the_first_forward() -> None:
    root = model(up=nn.Linear(6, 8), head=nn.Linear(6, 2))
    cut(root, {"up": "colwise"})
    assert len(root.head._forward_pre_hooks) == 1
    root.head(torch.randn(2, 6))
    assert not root.head._forward_pre_hooks


@pytest.mark.parametrize("row", [-1, 16])
def test_a_number_that_is_no_row_is_refused_as_the_whole_embedding_refuses_it(row: int) -> None:
    root = model(emb=nn.Embedding(16, 6))
    cut(root, {"emb": "embedding_rowwise"})
    with pytest.raises(IndexError):
        root.emb(torch.tensor([0, row]))


def test_a_surrounding_style_leaves_what_the_plan_says_of_an_inner_module() -> None:
    sharded = cut(model(mlp=FeedForward()), {"mlp": "replicated_with_grad_allreduce", "mlp.up_proj": "colwise"})
    assert sharded.by_name()["mlp.up_proj.weight"].sharding.dim == 0
    assert sharded.by_name()["mlp.down_proj.weight"].sharding.dim is None
