"""Blocks of every make give the dense gradients, or say in the first step why they would not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class Net(nn.Module):
    """A rowwise embedding, whose gradient only the block's border makes whole, then a block and a head.

    Args:
        block: Gets what ``hand_over`` makes of (batch, 6) activations, and returns such.
        hand_over: How the block is called.
    """

    def __init__(self, block: nn.Module, hand_over: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.emb = nn.Embedding(1024, FEATURES)
        self.block = block
        self.head = nn.Linear(FEATURES, 1024, bias=False)
        self.head.weight = self.emb.weight
        self.hand_over = hand_over

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb((x[:, :3].abs() * 300).long().clamp(max=1023)).sum(1)
        return self.head(self.hand_over(self.block, h))[:, :2]


class Planned(Regression):
    def __init__(self, name: str) -> None:
        block, self.plan, hand_over = CASES[name]
        super().__init__(build=lambda: Net(block(), hand_over))
        self.name = name

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) if self.name != "penalty" else 0.0, sync_dist=True)

    def configure_tp_plan(self) -> dict[str, Any]:
        return {"net.emb": "embedding_rowwise", "net.head": "colwise_gather_output", **self.plan}

    def loss(self, batch: Any) -> Tensor:
        if not self.name.startswith("penalty"):
            return super().loss(batch)
        # summed over samples: a mean would weigh replicas' shares by their squares
        h = self.net.emb(torch.arange(2).repeat(len(batch[0])))
        out = self.net.head(self.net.block(h)).tanh()
        (g,) = torch.autograd.grad(out.pow(2).mean(1).sum(), h, create_graph=True)
        return 0.1 * g.pow(2).sum(1).mean() + super().loss(batch)


class Interleaved(nn.Module):
    """Self-attention over (batch, 6) taken as 3 tokens of 2 features; packed head by head, as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = 5
        self.query_key_value = nn.Linear(2, 3 * 5 * 4)
        self.dense = nn.Linear(5 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (3, 2))
        qkv = self.query_key_value(x).unflatten(-1, (self.num_attention_heads, 12)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*qkv.chunk(3, -1))
        return self.dense(y.transpose(1, 2).flatten(2)).flatten(1)


class PackedGLU(FeedForward):
    def __init__(self) -> None:
        super().__init__(FEATURES, 7)
        self.up_proj = nn.Linear(FEATURES, 14)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class LoRA(FeedForward):
    def __init__(self) -> None:
        super().__init__(FEATURES, 8)
        self.lora_A, self.lora_B = nn.Linear(FEATURES, 3, bias=False), nn.Linear(3, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x) + self.lora_B(self.lora_A(x))))


class Taking(FeedForward):
    """Takes its input out of something."""

    def __init__(self, take: Callable[[Any], Tensor]) -> None:
        super().__init__(FEATURES, 7)
        self.take = take

    def forward(self, x: Any) -> Tensor:
        return super().forward(self.take(x))


class Pair(NamedTuple):
    name: str
    x: Tensor


@dataclass
class Held:
    x: Tensor


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Residual(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class PostNorm(Residual):
    def __init__(self) -> None:
        super().__init__(FEATURES, 7)
        self.norm = nn.LayerNorm(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class FurtherOutput(FeedForward):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": super().forward(x), "size": x.pow(2).mean()}


def _plain() -> nn.Module:
    return FeedForward(FEATURES, 7)


def _hooked() -> nn.Module:
    block = _plain()
    block.register_forward_hook(lambda _, args, output: output + args[0])
    return block


def _call(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _recomputed(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda block, x: checkpoint(block, x, use_reentrant=reentrant)


MLP = {"net.block": "mlp"}
RIGHT: dict[str, Any] = {
    "interleaved": (Interleaved, {"net.block": {"style": "attention", "interleaved": True}}, _call),
    "packed-glu": (PackedGLU, {"net.block": {"style": "mlp", "gate_up": "up_proj"}}, _call),
    "encoder-layer": (
        lambda: nn.TransformerEncoderLayer(2, 2, 7, dropout=0.0, batch_first=True),
        {"net.block.linear1": "colwise", "net.block.linear2": "rowwise"},
        lambda block, x: block(x.unflatten(-1, (3, 2))).flatten(1),
    ),
    "lora-b-colwise": (LoRA, {**MLP, "net.block.lora_B": "colwise"}, _call),
    "mapping": (lambda: Taking(lambda given: given["x"]["y"]), MLP, lambda block, x: block({"x": {"y": x}})),
    "named-tuple": (lambda: Taking(lambda given: given.x), MLP, lambda block, x: block(Pair("", x))),
    "dataclass": (lambda: Taking(lambda given: given.x), MLP, lambda block, x: block(x=Held(x))),
    "penalty": (_plain, MLP, _call),
}
REFUSED: dict[str, Any] = {
    "residual": (lambda: Residual(FEATURES, 7), MLP, _call),
    "residual-recomputed": (lambda: Residual(FEATURES, 7), MLP, _recomputed(False)),
    "residual-reentrant": (lambda: Residual(FEATURES, 7), MLP, _recomputed(True)),
    "post-norm": (PostNorm, {**MLP, "net.block.norm": "replicated"}, _call),
    "hook": (_hooked, MLP, _call),
    "further-output": (lambda: FurtherOutput(FEATURES, 7), MLP, lambda block, x: block(x)["y"]),
}
HIDDEN = {"opaque": (lambda: Taking(lambda given: given.x), MLP, lambda block, x: block(Opaque(x)))}
CASES = {**RIGHT, **REFUSED, **HIDDEN}


def _fit(degrees: Degrees, name: str) -> Any:
    module, end = Planned(name), EndState()
    trainer = make_trainer(degrees, callbacks=[end])
    trainer.fit(module, loader(degrees, 8), loader(degrees, 8))
    return end.parameters, module.gradients, float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_the_dense_ones(world: Worlds, name: str) -> None:
    assert_same(world(4).run(_fit, (3, 1), name)[0], _fit(None, name))


@pytest.mark.parametrize("name", REFUSED)
def test_a_path_around_the_output_projection_is_refused_in_the_first_forward(world: Worlds, name: str) -> None:
    for outcome in world(2).start(_fit, (2,), name).wait(grace=20):
        assert outcome.state == "raised" and "PlanError" in outcome.error, (outcome.error, outcome.stacks)
        assert "depends on its input past the output projection" in outcome.error, outcome.error


def test_a_tensor_hidden_in_an_object_is_refused(world: Worlds) -> None:
    for outcome in world(2).start(_fit, (2,), "opaque").wait(grace=20):
        assert outcome.state == "raised" and "is given a Opaque whose 'x'" in outcome.error, outcome.error
