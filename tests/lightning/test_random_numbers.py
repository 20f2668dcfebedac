"""Tensor-parallel peers draw the same numbers outside sharded blocks, and never get out of step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.lightning.rigs import FEATURES, FeedForward, Net, Regression, Worlds, make_trainer, slot
from tests.models import Attention, GPTConfig


def _seed(how: str) -> None:
    """Seed this rank: all alike, each in its own way, or not at all (the harness starts ranks in different states)."""
    if how == "everything":
        seed_everything(7, verbose=False)
    elif how == "workers":
        seed_everything(7, workers=True, verbose=False)
    elif how == "by slot":
        torch.manual_seed(slot())
        np.random.seed(slot())
        random.seed(slot())


class _Ones(Dataset):
    """Rows of ones and the numbers a data worker drew for them: whatever differs then was drawn at random."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.ones(FEATURES, dtype=torch.float64), torch.tensor(drawn, dtype=torch.float64), index


class _Dropping(Regression):
    """Dropout before, inside and after a feed-forward and an attention block."""

    def __init__(self) -> None:
        super().__init__(build=lambda: Net(dropout=0.5))
        config = GPTConfig(hidden=FEATURES, heads=5, kv_heads=1, head_dim=2, dropout=0.5)
        self.attention = Attention(config)
        self.seen: list[Any] = []
        self.states: list[Any] = []
        self.inside: list[Tensor] = []
        self.net.mlp.dropout.register_forward_hook(lambda m, args, out: self.inside.append((out == 0).double()))

    def configure_tp_plan(self) -> dict[str, Any]:
        return {"net.mlp": "mlp", "attention": "attention"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, drawn, index = batch
        masked = F.dropout(torch.ones(4, 8, dtype=torch.float64), 0.5)
        y = self.net(x * masked[: len(x), :FEATURES])
        after = F.dropout(torch.ones(4, 8, dtype=torch.float64), 0.5)
        y = y.sum() + self.attention(x[None]).pow(2).sum()
        last = F.dropout(torch.ones(4, 8, dtype=torch.float64), 0.5)
        self.seen.append((masked.tolist(), after.tolist(), last.tolist(), drawn.tolist(), index.tolist()))
        return y

    def on_train_batch_end(self, *_: Any) -> None:
        self.states.append((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))  # type: ignore[index]


def _draw(degrees: tuple[int, ...], how: str, workers: int = 0) -> Any:
    _seed(how)
    module = _Dropping()
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    make_trainer(degrees, max_epochs=2).fit(module, DataLoader(_Ones(), batch_size=2, shuffle=True, **options))
    return module.seen, module.states, [m.tolist() for m in module.inside]


@pytest.mark.parametrize("how", ["everything", "by slot", "not at all"])
def test_peers_draw_the_same_masks_and_samples_outside_blocks_whatever_the_seeds(world: Worlds, how: str) -> None:
    first, peer, other = world(3).run(_draw, (2, 1), how)
    assert first[0] == peer[0], "masks before, between and after blocks, and the data's own random numbers"
    assert first[1] == peer[1], "the states after every step, although peers draw different amounts inside"
    assert first[0] != other[0], "replicas see other samples"
    masks = [step[0] for step in first[0]]
    assert all(a != b for a, b in zip(masks, masks[1:], strict=False)), "every step draws anew"


def test_indices_draw_different_masks_inside_a_block(world: Worlds) -> None:
    """Else columns of two shards would be dropped together. Index 0 holds four of the seven columns, index 1 three."""
    first, peer = world(2).run(_draw, (2,), "everything")
    masks = [(torch.tensor(a)[:, :3], torch.tensor(b)) for a, b in zip(first[2], peer[2], strict=True)]
    assert masks[0][0].shape == masks[0][1].shape
    assert not all(torch.equal(a, b) for a, b in masks)
    assert 0.3 < float(torch.stack([torch.stack(m) for m in masks]).mean()) < 0.7


@pytest.mark.parametrize("how", ["workers", "everything", "not at all"])
def test_data_workers_of_peers_augment_alike(world: Worlds, how: str) -> None:
    first, peer, other = world(3).run(_draw, (2, 1), how, 2)
    drawn, index = ([step[k] for step in first[0]] for k in (3, 4))
    assert drawn == [step[3] for step in peer[0]] and index == [step[4] for step in peer[0]]
    if how == "workers":
        assert not {str(n) for step in drawn for row in step for n in row} & {
            str(n) for step in other[0] for row in step[3] for n in row
        }, "replicas augment differently"


class _Prepares(_Dropping):
    """Rank 0 alone draws numbers: it downloads and splits data, and makes up a name for the run."""

    def prepare_data(self) -> None:
        torch.rand(100)
        np.random.rand(3)

    def on_fit_start(self) -> None:
        pass


def _prepare(degrees: tuple[int, ...]) -> Any:
    module = _Prepares()
    make_trainer(degrees, max_epochs=1).fit(module, DataLoader(_Ones(), batch_size=2, shuffle=True))
    return module.seen, module.states


def test_numbers_drawn_on_rank_zero_alone_in_prepare_data_do_no_harm(world: Worlds) -> None:
    first, peer = world(2).run(_prepare, (2,))
    assert first == peer


class _Loose(Regression):
    """Dropout between a colwise and a rowwise layer, without a block around them."""

    def __init__(self) -> None:
        super().__init__()
        self.net.mlp = FeedForward(FEATURES, 7, 0.5)

    def configure_tp_plan(self) -> dict[str, Any]:
        return {"net.mlp.up_proj": "colwise", "net.mlp.down_proj": "rowwise"}


def _loose(degrees: tuple[int, ...]) -> None:
    from tests.lightning.rigs import loader

    make_trainer(degrees).fit(_Loose(), loader(degrees, 8))


@pytest.mark.parametrize("degrees", [(2,), (2, 1)])
def test_dropout_in_a_sharded_region_that_is_no_block_is_an_error_on_all_ranks(
    world: Worlds, degrees: tuple[int, ...]
) -> None:
    for outcome in world(sum(degrees)).start(_loose, degrees).wait():
        assert outcome.state == "raised" and "PeerMismatchError" in outcome.error, outcome.error
        assert "`attention` or `mlp`" in outcome.error
