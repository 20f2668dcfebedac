"""The model of the steady-state benchmark: examples/gpt at a size where communication counts, and its DTensor twin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from examples.gpt.model import LanguageModel


@dataclass(frozen=True)
class Size:
    """Of the model and of the global batch. Heads, widths and vocabulary divide by 4, or DTensor could not follow."""

    dim: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 704
    vocab: int = 1024
    tokens: int = 128
    samples: int = 8
    """In the global batch."""

    def wider(self, factor: int) -> Size:
        """The same with larger matrices."""
        return replace(self, dim=self.dim * factor, hidden=self.hidden * factor)


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens without end."""

    def __init__(self, size: Size) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(size.vocab, (64, size.tokens + 1), generator=generator)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        row = self._tokens[number % len(self._tokens)]
        return row[:-1], row[1:]


class BenchmarkModel(LanguageModel):
    """The example's model; AdamW walks all parameters at once (foreach), as it does on a GPU."""

    def __init__(self, size: Size) -> None:
        super().__init__(
            vocab_size=size.vocab,
            dim=size.dim,
            num_layers=size.layers,
            num_heads=size.heads,
            num_kv_heads=size.kv_heads,
            hidden=size.hidden,
            max_seq_len=size.tokens,
        )
        self.tiny = False
        """Whether batches are cut to a few tokens, so that activations take no memory."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.tiny:
            batch = (batch[0][:1, :8], batch[1][:1, :8])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        matrices = [p for p in self.parameters() if p.dim() == 2]
        vectors = [p for p in self.parameters() if p.dim() != 2]
        return torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, foreach=True
        )


class DTensorModel(BenchmarkModel):
    """The same model, made parallel with torch's own tools as Lightning's documentation shows."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        tensor, data = mesh["tensor_parallel"], mesh["data_parallel"]
        whole = Replicate()
        for layer in self.model.layers:
            parallelize_module(
                layer,
                tensor,
                {
                    # one entry for the whole block: one all-reduce in its backward instead of one per projection
                    "attention": PrepareModuleInput(
                        input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
                    ),
                    "attention.q_proj": ColwiseParallel(),
                    "attention.k_proj": ColwiseParallel(),
                    "attention.v_proj": ColwiseParallel(),
                    "attention.o_proj": RowwiseParallel(),
                    "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
                    "mlp.gate_proj": ColwiseParallel(),
                    "mlp.up_proj": ColwiseParallel(),
                    "mlp.down_proj": RowwiseParallel(),
                },
            )
        parallelize_module(
            self.model,
            tensor,
            {
                "tok_embeddings": RowwiseParallel(input_layouts=whole),
                "lm_head": ColwiseParallel(output_layouts=whole),
            },
        )
        if data.size() > 1:
            fully_shard(self.model, mesh=data)


def loader(size: Size, replicas: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """The global batch dealt out to ``replicas``."""
    return DataLoader(Tokens(size), batch_size=size.samples // replicas)
