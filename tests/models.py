"""Models under test: a GPT in plain torch whose sizes divide by nothing, and a LightningModule that records.

Nothing here knows of tensor parallelism: a plan finds the modules by their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and variants of :class:`GPT`. The defaults divide by none of 2, 3, 4; ``heads`` only by ``kv_heads``."""

    vocab: int = 53
    hidden: int = 31
    layers: int = 2
    heads: int = 25
    kv_heads: int = 5
    head_dim: int = 4
    ffn: int = 37
    context: int = 12
    """Length of the learned positions; rotary ones have no limit."""
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rotary", "learned", "none"] = "rotary"
    qk_norm: bool = False
    """RMSNorm over head_dim with one weight for all heads: a ``partial`` gradient where heads are split."""
    attention_bias: bool = False
    output_bias: bool = False
    mlp: Literal["swiglu", "gelu", "fc"] = "swiglu"
    """``gelu`` names its children up_proj/down_proj, ``fc`` names them fc1/fc2."""
    mlp_bias: bool = False
    tied: bool = False
    packed: bool = False
    """One qkv_proj (rows of q, k, v stacked) and one gate_up_proj instead of separate ones."""
    dropout: float = 0.0


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with a weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape ending in ``size``; the same shape out."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def _rotate(x: Tensor) -> Tensor:
    """Rotary embedding of (batch, heads, time, head_dim), halves rotated together."""
    half = x.size(-1) // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.size(-2), device=x.device, dtype=torch.float64), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention. Views use -1 heads, so it works on any share of the heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.heads
        self.num_kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.rotary = config.positions == "rotary"
        self.dropout = config.dropout
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim) if config.qk_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, hidden) in and out."""
        return self.o_proj(self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention proper on (batch, time, heads * head_dim) projections."""
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        dropout = self.dropout if self.training else 0.0
        grouped = q.size(1) != k.size(1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(2)


class PackedAttention(Attention):
    """The same with one projection whose rows are q, k and v, stacked."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        del self.q_proj, self.k_proj, self.v_proj
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden, rows, bias=config.attention_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, hidden) in and out."""
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        return self.o_proj(self.attend(*self.qkv_proj(x).split((q, kv, kv), dim=-1)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, hidden) in and out."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PackedSwiGLU(nn.Module):
    """The same with one projection whose rows are gate and up, stacked."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden, 2 * config.ffn, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, hidden) in and out."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class GeluMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, hidden) in and out."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class FcMLP(nn.Module):
    """The same under GPT-2's names: fc2(gelu(fc1(x)))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.fc2 = nn.Linear(config.ffn, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, hidden) in and out."""
        return self.fc2(F.gelu(self.fc1(x)))


def _norm(config: GPTConfig) -> nn.Module:
    return RMSNorm(config.hidden) if config.norm == "rms" else nn.LayerNorm(config.hidden)


def _mlp(config: GPTConfig) -> nn.Module:
    if config.mlp == "swiglu":
        return PackedSwiGLU(config) if config.packed else SwiGLU(config)
    return GeluMLP(config) if config.mlp == "gelu" else FcMLP(config)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = PackedAttention(config) if config.packed else Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = _mlp(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, hidden) in and out."""
        x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Decoder-only language model: tokens (batch, time) to logits (batch, time, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.hidden)
        self.pos_embeddings = nn.Embedding(config.context, config.hidden) if config.positions == "learned" else None
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.lm_head.weight = self.tok_embeddings.weight
        # Biases and norm weights start at 0 and 1, where an error in their handling could hide: move them off.
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) integers to (batch, time, vocab) logits."""
        x = self.tok_embeddings(tokens)
        if self.pos_embeddings is not None:
            x = x + self.pos_embeddings(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build(config: GPTConfig, seed: int) -> GPT:
    """The model of a seed, in float32, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config)


def language_model_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross entropy of predicting each next token; ``rows`` is (batch, time + 1)."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype is torch.bfloat16 else logits.flatten(0, 1), rows[:, 1:].flatten()
    )


def make_optimizer(
    kind: Literal["adamw", "sgd"], parameters: Iterator[nn.Parameter], lr: float, weight_decay: float = 0.1
) -> torch.optim.Optimizer:
    """The optimizer of a recipe."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95))


class LitGPT(LightningModule):
    """:class:`GPT` as a LightningModule that records what a parity test compares.

    Args:
        config: of the model.
        seed: of the initialisation.
        optimizer: ``adamw`` or ``sgd``.
        lr: learning rate, constant.
        record_gradients: keep the full raw gradients (after the sync, before clipping) of every step. Needs a strategy
            with ``full_gradients()``.
        record_norms: keep the norm of the raw gradients of every step. Needs a strategy with ``grad_norm()``.

    Attributes:
        losses: (loss of this rank's micro-batch, number of its samples), one per micro-batch.
        norms: one per optimizer step.
        gradients: one dict per optimizer step, by parameter name (empty except on rank 0).
    """

    def __init__(
        self,
        config: GPTConfig,
        seed: int = 0,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        lr: float = 1e-2,
        record_gradients: bool = False,
        record_norms: bool = False,
    ) -> None:
        super().__init__()
        self.model = build(config, seed)
        self.optimizer_kind = optimizer
        self.lr = lr
        self.record_gradients = record_gradients
        self.record_norms = record_norms
        self.losses: list[tuple[float, int]] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def configure_tp_plan(self) -> dict[str, str]:
        """Which module is split how."""
        return {
            "model.tok_embeddings": "embedding_rowwise",
            "model.layers.*.attention": "attention",
            "model.layers.*.mlp": "mlp",
            "model.lm_head": "colwise_gather_output",
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer over all parameters, in the order of their names."""
        return make_optimizer(self.optimizer_kind, self.parameters(), self.lr)

    def loss(self, batch: Any) -> Tensor:
        """Loss of this rank's batch, recorded."""
        (rows,) = batch
        loss = language_model_loss(self.model, rows)
        self.losses.append((float(loss.detach()), rows.size(0)))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Automatic optimization."""
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are synchronised here and not clipped yet."""
        self.record()

    def record(self) -> None:
        """Keep norm and gradients of this step; a collective, so every rank calls it."""
        strategy: Any = self.trainer.strategy
        if self.record_norms:
            self.norms.append(float(strategy.grad_norm()))
        if self.record_gradients:
            self.gradients.append({k: v.detach().clone() for k, v in strategy.full_gradients().items()})


class ManualLitGPT(LitGPT):
    """The same under manual optimization, clipping by hand.

    Args:
        clip_norm: maximal gradient norm, None for no clipping.
    """

    def __init__(self, *args: Any, clip_norm: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.clip_norm = clip_norm

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Loss, backward, record, clip, step."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.record()
        if self.clip_norm is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip_norm, gradient_clip_algorithm="norm")
        optimizer.step()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Recorded in the step already: here the gradients are clipped."""
