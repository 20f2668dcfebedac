"""What the ranks of these tests train: small float64 models under a Trainer that writes nothing.

Every run takes ``degrees``. None means the truth it is compared with: the same module under Lightning's own
single-device strategy, in one process, with the batches of all replicas in one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.harness import World

Worlds = Callable[..., World]
Degrees = tuple[int, ...] | None

FEATURES = 6
EXACT = 1e-10
"""float64, relative to a tensor's largest value: sums in another order, and nothing else."""


class FeedForward(nn.Module):
    """down(gelu(up(x))), with dropout between them if asked for."""

    def __init__(self, size: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up_proj = nn.Linear(size, hidden)
        self.down_proj = nn.Linear(hidden, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.dropout(F.gelu(self.up_proj(x))))


class Net(nn.Module):
    """Norm, feed-forward block with 7 hidden columns, and a head: (batch, 6) to (batch, 2)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.mlp = FeedForward(FEATURES, 7, dropout)
        self.head = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.mlp(self.norm(x)))


def seeded(build: Callable[[], nn.Module], seed: int) -> Any:
    """Build a module with the weights of a seed, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class Regression(LightningModule):
    """Trains :class:`Net` on mean squared error.

    Args:
        seed: Of the initial weights.
        lr: Learning rate.
        build: Makes the net.

    Attributes:
        gradients: The unsharded gradients before every optimizer step, by name; on rank 0 only.
    """

    def __init__(self, seed: int = 0, lr: float = 0.1, build: Callable[[], nn.Module] = Net) -> None:
        super().__init__()
        self.net = seeded(build, seed)
        self.lr = lr
        self.gradients: list[dict[str, Tensor | None]] = []

    def configure_tp_plan(self) -> dict[str, Any]:
        return {"net.mlp": "mlp"}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))


def gradients_of(module: LightningModule) -> dict[str, Tensor | None]:
    """Unsharded gradients by name, under any strategy; empty except on rank 0."""
    strategy: Any = module.trainer.strategy
    if hasattr(strategy, "full_gradients"):
        found = strategy.full_gradients()
    else:
        found = {n: p.grad for n, p in module.named_parameters()}
    return {n: None if g is None else g.detach().clone() for n, g in found.items()}


class EndState(Callback):
    """Keeps the unsharded parameters and optimizer states as they are when training ends; on rank 0 only."""

    parameters: dict[str, Tensor]
    optimizers: list[dict[str, Any]]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.parameters = {n: t.detach().clone() for n, t in state.items() if isinstance(t, Tensor)}
        self.optimizers = [_cloned(trainer.strategy.optimizer_state(o)) for o in trainer.optimizers]


def _cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _cloned(v) for k, v in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value


def slot() -> int:
    """This rank's slot; 0 outside of a world."""
    return int(os.environ.get("LIGHTNING_NTP_SLOT", "0"))


def replica_of(degrees: Degrees) -> int:
    """The replica of this rank's slot."""
    return 0 if degrees is None else next(r for r in range(len(degrees)) if slot() < sum(degrees[: r + 1]))


def make_trainer(degrees: Degrees, strategy: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A Trainer for this rank, or the one of the single-process truth.

    Args:
        degrees: Of the world; None for the truth.
        strategy: More settings of NTPStrategy.
        options: Of the Trainer.
    """
    if degrees is not None:
        from lightning_ntp import NTPStrategy

        options["strategy"] = NTPStrategy(degrees=degrees, **(strategy or {}))
    if "plugins" not in options:
        options.setdefault("precision", "64-true")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(
        accelerator="cpu",
        devices=1 if degrees is None else sum(degrees),
        **{"enable_model_summary": False, "max_epochs": 1, **quiet, **options},
    )


def rows(count: int, seed: int = 5) -> TensorDataset:
    """Samples (6 numbers) and targets (2 numbers), float64."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, FEATURES, generator=generator, dtype=torch.float64),
        torch.randn(count, 2, generator=generator, dtype=torch.float64),
    )


def loader(degrees: Degrees, count: int, per_replica: int = 2, replicas: int = 2, **options: Any) -> DataLoader:
    """Batches of ``per_replica`` rows for a world; for the truth the global batches of ``replicas`` replicas.

    In order, for the truth does not shuffle: the sampler that Lightning adds would.
    """
    data = rows(count)
    if degrees is None:
        return DataLoader(data, batch_size=per_replica * replicas, **options)
    sampler = DistributedSampler(data, len(degrees), replica_of(degrees), shuffle=False)
    return DataLoader(data, batch_size=per_replica, sampler=sampler, **options)


def relative(got: Tensor, want: Tensor) -> float:
    """max|a-b| / max(max|b|, 1e-6)."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-6))


def assert_same(got: Any, want: Any, bound: float = EXACT, where: str = "") -> None:
    """Compare any nesting of dicts, sequences, tensors and numbers.

    Raises:
        AssertionError: Naming the first value that is missing or outside the bound.
    """
    if isinstance(want, dict):
        assert got.keys() == want.keys(), f"{where}: keys {sorted(map(str, got))} instead of {sorted(map(str, want))}"
        for key in want:
            assert_same(got[key], want[key], bound, f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), f"{where}: {len(got)} values instead of {len(want)}"
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, bound, f"{where}[{k}]")
    elif isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{where}: {got!r} instead of a tensor"
        assert want.numel() == 0 or relative(got, want) <= bound, f"{where}: relative {relative(got, want):.2e}"
    elif isinstance(want, float):
        assert abs(got - want) <= bound * max(abs(want), 1e-6), f"{where}: {got!r} instead of {want!r}"
    else:
        assert got == want, f"{where}: {got!r} instead of {want!r}"


def largest_difference(got: Any, want: Any) -> float:
    """The largest relative difference of what :func:`assert_same` has found alike."""
    if isinstance(want, dict):
        return max((largest_difference(got[key], want[key]) for key in want), default=0.0)
    if isinstance(want, list | tuple):
        return max((largest_difference(a, b) for a, b in zip(got, want, strict=True)), default=0.0)
    if isinstance(want, Tensor):
        return relative(got, want) if want.numel() else 0.0
    return abs(got - want) / max(abs(want), 1e-6) if isinstance(want, float) else 0.0


def firsts(degrees: tuple[int, ...]) -> Iterator[int]:
    """The first slot of every replica."""
    for replica in range(len(degrees)):
        yield sum(degrees[:replica])
