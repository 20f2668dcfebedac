"""What a rank knows about its place, and that training starts from rank 0's values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.lightning.rigs import Net, Regression, Worlds, loader, make_trainer, slot


class _Buffered(Regression):
    """Parameters and buffers, all made from this rank's own random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(100 + slot())
        self.net = Net()
        self.net.register_buffer("scale", torch.rand(3))
        self.net.register_buffer("steps", torch.randint(1000, ()))
        self.start: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        state: dict[str, Any] = self.trainer.strategy.lightning_module_state_dict()
        self.start = {n: t.clone() for n, t in state.items()}
        self.buffers_here = {n: b.clone() for n, b in self.named_buffers()}
        self.trainer.strategy.assert_copies_equal()


def _start(degrees: tuple[int, ...]) -> Any:
    module = _Buffered()
    own = {n: t.double() if t.is_floating_point() else t for n, t in copy.deepcopy(module.state_dict()).items()}
    make_trainer(degrees, max_steps=1).fit(module, loader(degrees, 8))
    return own, module.start, module.buffers_here


@pytest.mark.parametrize("degrees", [(2, 1), (1, 1)])
def test_parameters_and_buffers_start_from_rank_zeros_values(world: Worlds, degrees: tuple[int, ...]) -> None:
    sides = world(sum(degrees)).run(_start, degrees)
    own, start, _ = sides[0]
    assert own.keys() == start.keys()
    assert all(torch.equal(own[n], start[n]) for n in own)
    for other, _, buffers in sides[1:]:
        assert not torch.equal(other["net.head.weight"], own["net.head.weight"]), "the ranks must differ to begin with"
        assert all(torch.equal(buffers[n], own[n]) for n in buffers)


class _Configured(Regression):
    """Builds its net in configure_model, where it looks at the mesh."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.net: nn.Module | None = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            mesh = self.device_mesh
            self.seen = {name: (mesh[name].size(), mesh[name].get_local_rank()) for name in mesh.mesh_dim_names}
            self.net = Net()


def _identity(degrees: tuple[int, ...]) -> dict[str, Any]:
    module, trainer = _Configured(), make_trainer(degrees, max_steps=1)
    before = trainer.strategy.degrees
    trainer.fit(module, loader(degrees, 8))
    return {
        "mesh": module.seen,
        "world_size": trainer.world_size,
        "global_rank": trainer.global_rank,
        "module_rank": module.global_rank,
        "zero": trainer.is_global_zero,
        "rank_zero_only": rank_zero_only.rank,
        "degrees": (before, trainer.strategy.degrees),
        "replica": trainer.strategy.replica,
        "sampler": trainer.distributed_sampler_kwargs,
    }


def test_every_rank_knows_its_place(world: Worlds) -> None:
    sides = world(3).run(_identity, (2, 1))
    for rank, side in enumerate(sides):
        replica, index, degree = [(0, 0, 2), (0, 1, 2), (1, 0, 1)][rank]
        assert side == {
            "mesh": {"data_parallel": (2, replica), "tensor_parallel": (degree, index)},
            "world_size": 3,
            "global_rank": rank,
            "module_rank": rank,
            "zero": rank == 0,
            "rank_zero_only": rank,
            "degrees": ((2, 1), (2, 1)),
            "replica": replica,
            "sampler": {"num_replicas": 2, "rank": replica},
        }


class _CopyModule(Callback):
    """Copies the module while it trains, as weight averaging and pruning do."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.copied = copy.deepcopy(pl_module)
        x = torch.ones(2, 6, dtype=torch.float64)
        with torch.no_grad():
            self.same = torch.equal(self.copied.net(x), pl_module.net(x))


class _WithMetric(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()


def _copy(degrees: tuple[int, ...]) -> Any:
    module, callback = _WithMetric(), _CopyModule()
    make_trainer(degrees, max_steps=2, callbacks=[callback]).fit(module, loader(degrees, 8))
    others = callback.copied.net.head.weight is not module.net.head.weight
    return callback.same, others


def test_a_module_can_be_deep_copied_while_it_trains(world: Worlds) -> None:
    assert world(2).run(_copy, (2,)) == [(True, True)] * 2


def _refit(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    module = Regression()
    make_trainer(first, max_steps=1).fit(module, loader(first, 8))
    make_trainer(second, max_steps=1).fit(module, loader(second, 8))


def test_a_module_cut_for_other_degrees_is_refused(world: Worlds) -> None:
    for outcome in world(2).start(_refit, (2,), (1, 1)).wait():
        assert outcome.state == "raised" and "was cut for tensor-parallel degree 2" in outcome.error, outcome.error


def _grow_head() -> None:
    module = Regression()
    make_trainer((2,), max_steps=1).fit(module, loader((2,), 8))
    module.net.head = nn.Linear(6, 2).double()
    make_trainer((2,), max_steps=1).fit(module, loader((2,), 8))


def test_a_layer_replaced_after_the_cut_is_refused_by_name(world: Worlds) -> None:
    for outcome in world(2).start(_grow_head).wait():
        assert outcome.state == "raised" and "net.head.weight" in outcome.error, outcome.error
