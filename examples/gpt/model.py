"""A decoder-only GPT in plain torch, and the LightningModule that trains it.

Nothing in it knows about tensor parallelism but one thing: the attention takes its head counts from the sizes it finds
(``-1`` in the views), because under a plan a rank holds only some of the heads. ``configure_tp_plan`` names the modules
to split.

Shapes: B samples, T tokens of context, D = ``dim``, H query heads, K key/value heads, E = D / ``num_heads``.
"""

import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale by the root mean square of the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_table(length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al., arXiv 2104.09864), each (length, head_dim)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features of ``x`` (B, heads, T, E) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., arXiv 2305.13245): H / K query heads share one key/value head."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.q_proj = nn.Linear(dim, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, heads * E) -> (B, heads, T, E) for however many heads there are here."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer, arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention, then the feed-forward layer, each behind a norm and around a residual connection."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, num_heads, num_kv_heads)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Decoder-only language model: tokens (B, T) -> logits (B, T, vocab_size).

    Args:
        vocab_size: number of tokens.
        dim: width of the residual stream; a multiple of ``2 * num_heads`` (the rotary embedding turns pairs).
        num_layers: number of blocks.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides ``num_heads``.
        hidden: width of the feed-forward layers.
        max_seq_len: longest context the rotary table covers.
        tie_embeddings: let ``lm_head`` use the token embedding's weight.

    Raises:
        ValueError: when the heads do not fit the width or the key/value heads.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocab_size: int,
        dim: int = 96,
        num_layers: int = 2,
        num_heads: int = 6,
        num_kv_heads: int = 3,
        hidden: int = 250,
        max_seq_len: int = 256,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            raise ValueError(f"dim={dim} is no multiple of 2 * num_heads = {2 * num_heads}; choose another width.")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}; choose a divisor.")
        self.max_seq_len = max_seq_len
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, num_heads, num_kv_heads, hidden) for _ in range(num_layers))
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        cos, sin = rotary_table(max_seq_len, dim // num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The projections that write to the residual stream start smaller, so that depth does not inflate it.
                scale = math.sqrt(2 * num_layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / scale if name.startswith("layers.") else 0.02)
        if tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.7) -> Tensor:
        """Append ``count`` sampled tokens to ``tokens`` (B, T). Needs the whole model, not a rank's part of it."""
        for _ in range(count):
            logits = self(tokens[:, -self.max_seq_len :])[:, -1] / temperature
            tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        return tokens


class LanguageModel(pl.LightningModule):
    """Trains a :class:`GPT` to predict the next token, with AdamW, a warm-up and a cosine schedule.

    Args:
        lr: peak learning rate.
        warmup_steps: steps until the peak.
        weight_decay: applied to matrices only.

    The other arguments are those of :class:`GPT`.
    """

    def __init__(
        self,
        vocab_size: int = 97,
        dim: int = 96,
        num_layers: int = 2,
        num_heads: int = 6,
        num_kv_heads: int = 3,
        hidden: int = 250,
        max_seq_len: int = 256,
        tie_embeddings: bool = False,
        lr: float = 6e-3,
        warmup_steps: int = 20,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.warmup_steps, self.weight_decay = lr, warmup_steps, weight_decay
        self.model = GPT(vocab_size, dim, num_layers, num_heads, num_kv_heads, hidden, max_seq_len, tie_embeddings)

    def configure_tp_plan(self) -> dict[str, str]:
        """Say which modules tensor parallelism splits, and how: module name pattern -> style."""
        return {
            "model.tok_embeddings": "embedding_rowwise",
            "model.layers.*.attention": "attention",
            "model.layers.*.mlp": "mlp",
            "model.lm_head": "colwise_gather_output",
        }

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in nats of the tokens ``batch[1]`` (B, T) that follow the tokens ``batch[0]`` (B, T)."""
        tokens, following = batch
        return F.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        vectors = [p for p in self.parameters() if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        total = max(int(self.trainer.estimated_stepping_batches), 1)

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(step / total, 1.0)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
