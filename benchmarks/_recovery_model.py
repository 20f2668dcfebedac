"""What the recovery benchmark trains: sizes of the GPT of examples/gpt, which needs no Lightning, batches and AdamW."""

from __future__ import annotations

import importlib
import sys
import types

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCAB, DIM, LAYERS, HEADS, HIDDEN, TOKENS = 512, 192, 4, 12, 512, 32
SAMPLES = 8
"""In the global batch."""
SIZES = {
    "vocab_size": VOCAB,
    "dim": DIM,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    # a head shared by several ranks may be lost once and needed by two
    "num_kv_heads": HEADS,
    "hidden": HIDDEN,
    "max_seq_len": TOKENS,
}


def plain_gpt() -> nn.Module:
    """The model in a process that has not imported Lightning: a plain script would not wait for that at its restart."""
    lightning = types.ModuleType("lightning")
    stand_in = types.ModuleType("lightning.pytorch")
    stand_in.LightningModule = nn.Module  # type: ignore[attr-defined]
    lightning.pytorch = stand_in  # type: ignore[attr-defined]
    sys.modules |= {"lightning": lightning, "lightning.pytorch": stand_in}
    model: nn.Module = importlib.import_module("examples.gpt.model").GPT(**SIZES)
    return model


def token_row(number: int) -> tuple[Tensor, Tensor]:
    """Sample ``number``: random tokens, and those that follow them."""
    row = torch.randint(VOCAB, (TOKENS + 1,), generator=torch.Generator().manual_seed(number))
    return row[:-1], row[1:]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples without end."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return token_row(number)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, foreach=True)
