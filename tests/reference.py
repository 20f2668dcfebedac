"""The truth that parity tests compare with: one dense process, plain torch, no Lightning, the same global batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from tests.models import GPT, GPTConfig, build, language_model_loss, make_optimizer


@dataclass(frozen=True)
class Recipe:
    """One training run, told so completely that the reference and a world train the same."""

    model: GPTConfig = GPTConfig()
    replicas: int = 1
    steps: int = 20
    dataset_size: int = 72
    """Rows; divides evenly into batches of four for one, two and three replicas."""
    time: int = 9
    """Tokens predicted per row."""
    batch_size: int = 4
    """Per replica, as in Lightning."""
    batch_sizes: tuple[int, ...] | None = None
    """Per replica, where they differ: then replicas take consecutive rows instead of every R-th."""
    padded: bool = True
    """Repeat rows, as DistributedSampler does, so that all replicas get equally many; else last batches differ."""
    shuffle: bool = True
    seed: int = 11
    dtype: Literal["float64", "float32"] = "float64"
    autocast: bool = False
    """bf16-mixed."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-3
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None

    @property
    def plain_loader(self) -> bool:
        """Whether an ordinary DataLoader with Lightning's own DistributedSampler gives the batches."""
        return self.padded and self.batch_sizes is None


@dataclass
class Record:
    """What a run leaves behind, all of it unsharded and by the plain model's parameter names."""

    losses: list[float] = field(default_factory=list)
    """Of the global batch, one per micro-batch."""
    norms: list[float] = field(default_factory=list)
    """Of the raw gradient, one per step."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Raw (before clipping), one dict per step."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """At the end."""
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Optimizer state at the end: name -> key (exp_avg, exp_avg_sq, step) -> tensor."""


def dataset(recipe: Recipe) -> Tensor:
    """Rows of tokens, (dataset_size, time + 1). Neighbours are related, so that there is something to learn."""
    generator = torch.Generator().manual_seed(recipe.seed + 1000)
    noise = torch.randint(0, 3, (recipe.dataset_size, recipe.time + 1), generator=generator)
    start = torch.randint(0, recipe.model.vocab, (recipe.dataset_size, 1), generator=generator)
    return (start + (2 + noise).cumsum(1)) % recipe.model.vocab


def epoch_batches(recipe: Recipe, epoch: int) -> list[list[list[int]]]:
    """Row numbers of one epoch by micro-batch and replica. The order is that of torch's DistributedSampler."""
    n, r = recipe.dataset_size, recipe.replicas
    if recipe.shuffle:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).tolist()
    else:
        order = list(range(n))
    if recipe.batch_sizes is not None:
        sizes, batches, at = recipe.batch_sizes, [], 0
        while at + r <= n:  # every replica needs at least one row
            batch = []
            for i, size in enumerate(sizes):
                take = min(size, n - at - (r - 1 - i))
                batch.append(order[at : at + take])
                at += take
            batches.append(batch)
        return batches
    if recipe.padded:
        order += order[: -n % r]
    shares = [order[i::r] for i in range(r)]
    b = recipe.batch_size
    return [[share[k * b : (k + 1) * b] for share in shares] for k in range(math.ceil(min(map(len, shares)) / b))]


def windows(recipe: Recipe) -> Iterator[list[list[list[int]]]]:
    """Micro-batches of each optimizer step; an epoch's end closes a window early, as in Lightning."""
    done = 0
    for epoch in count():
        batches = epoch_batches(recipe, epoch)
        for at in range(0, len(batches), recipe.accumulate):
            if done == recipe.steps:
                return
            yield batches[at : at + recipe.accumulate]
            done += 1


@lru_cache(maxsize=64)
def train(recipe: Recipe) -> Record:
    """Run a recipe densely. The result is cached: do not change it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(recipe)
    finally:
        torch.set_num_threads(threads)


def _train(recipe: Recipe) -> Record:
    record, rows = Record(), dataset(recipe)
    model: GPT = build(recipe.model, recipe.seed).to(getattr(torch, recipe.dtype))
    optimizer = make_optimizer(recipe.optimizer, model.parameters(), recipe.lr)
    autocast = torch.autocast("cpu", torch.bfloat16) if recipe.autocast else contextlib.nullcontext()
    for window in windows(recipe):
        optimizer.zero_grad()
        for batch in window:
            # The mean over the concatenated rows is sum_r (b_r / B) mean_r.
            with autocast:
                loss = language_model_loss(model, rows[[i for share in batch for i in share]])
            record.losses.append(loss.item())
            (loss / recipe.accumulate).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        record.gradients.append(gradients)
        record.norms.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients.values()]))))
        if recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        if recipe.clip_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), recipe.clip_value)
        optimizer.step()
    record.parameters = {n: p.detach().clone() for n, p in model.state_dict().items()}  # a tied weight under both names
    record.moments = moments_by_name(optimizer.state_dict(), [n for n, _ in model.named_parameters()])
    return record


def moments_by_name(state_dict: dict, names: list[str]) -> dict[str, dict[str, Tensor]]:
    """torch's optimizer state, numbered in the order of the optimizer's parameters, by their names."""
    numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
    return {
        name: {k: v.clone() for k, v in state_dict["state"].get(number, {}).items() if isinstance(v, Tensor)}
        for number, name in zip(numbers, names, strict=True)
    }
