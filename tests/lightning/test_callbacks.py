"""Callbacks that decide something decide the same on all ranks; the collectives of the strategy are the replicas'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

from tests.lightning.rigs import (
    Degrees,
    Regression,
    Worlds,
    assert_same,
    loader,
    make_trainer,
    replica_of,
    slot,
)


class _Scripted(Regression):
    """Every replica logs a validation value of its own; only their mean improves for three epochs."""

    def __init__(self, degrees: Degrees) -> None:
        super().__init__(lr=1e-3)
        self.replica = None if degrees is None else replica_of(degrees)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        epoch = self.current_epoch
        mean = [3.0, 2.0, 1.0, 1.5, 1.25, 1.125][epoch]
        offset = 0.0 if self.replica is None else (-1) ** (epoch + self.replica) * 5.0
        self.log("val", mean + offset, sync_dist=True)


def _early(degrees: Degrees, directory: str) -> Any:
    keep = ModelCheckpoint(directory, filename="{epoch}", monitor="val", save_top_k=1)
    stop = EarlyStopping("val", patience=2)
    trainer = make_trainer(degrees, max_epochs=6, callbacks=[keep, stop], enable_checkpointing=True)
    trainer.fit(_Scripted(degrees), loader(degrees, 8), loader(degrees, 8))
    return trainer.current_epoch, stop.stopped_epoch, Path(keep.best_model_path).name, float(keep.best_model_score)


def test_early_stopping_and_the_best_checkpoint_follow_the_mean_over_replicas(world: Worlds, tmp_path: Path) -> None:
    truth = _early(None, str(tmp_path / "truth"))
    assert truth == (5, 4, "epoch=2.ckpt", 1.0)
    assert world(3).run(_early, (2, 1), str(tmp_path / "world")) == [truth] * 3


class _Collectives(Callback):
    """Uses every collective of the strategy once, with values that tell the ranks apart."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        replica = strategy.replica
        value = torch.tensor([1.0 + replica, -2.0 * replica])
        whole = torch.tensor(3 + replica)
        flag = torch.tensor(replica == 0)
        self.found = {
            "broadcast": [strategy.broadcast({"from": rank}, src) for src in range(trainer.world_size)],
            "any": [strategy.reduce_boolean_decision(rank == r, all=False) for r in range(trainer.world_size)],
            "all": [strategy.reduce_boolean_decision(rank != r, all=True) for r in range(trainer.world_size)],
            "all true": strategy.reduce_boolean_decision(True, all=True),
            **{op: strategy.reduce(value, reduce_op=op).tolist() for op in ("mean", "sum", "max", "min", "product")},
            "enum": strategy.reduce(value, reduce_op=torch.distributed.ReduceOp.SUM).tolist(),
            "none": strategy.reduce(value, reduce_op=None).tolist(),
            "whole mean": strategy.reduce(whole, reduce_op="mean").item(),
            "whole sum": strategy.reduce(whole, reduce_op="sum").item(),
            "flag": strategy.reduce(flag, reduce_op="max").item(),
            "no tensor": strategy.reduce("text"),
            "input": value.tolist() == [1.0 + replica, -2.0 * replica],
        }
        strategy.barrier("done")


def _collect(degrees: tuple[int, ...]) -> Any:
    callback = _Collectives()
    make_trainer(degrees, max_steps=1, callbacks=[callback]).fit(Regression(), loader(degrees, 8))
    return callback.found


def test_collectives_of_the_strategy(world: Worlds) -> None:
    for found in world(3).run(_collect, (2, 1)):
        assert found == {
            "broadcast": [{"from": 0}, {"from": 1}, {"from": 2}],
            "any": [True, True, True],
            "all": [False, False, False],
            "all true": True,
            "mean": [1.5, -1.0],
            "sum": [3.0, -2.0],
            "max": [2.0, 0.0],
            "min": [1.0, -2.0],
            "product": [2.0, 0.0],
            "enum": [3.0, -2.0],
            "none": [3.0, -2.0],
            "whole mean": 3.5,
            "whole sum": 7,
            "flag": True,
            "no tensor": "text",
            "input": True,
        }


def _wrong_operation() -> None:
    trainer = make_trainer((2,), max_steps=1)
    module = Regression()
    module.on_train_start = lambda: trainer.strategy.reduce(torch.ones(1), reduce_op="median")  # type: ignore
    trainer.fit(module, loader((2,), 4))


def test_an_unknown_reduction_is_named(world: Worlds) -> None:
    for outcome in world(2).start(_wrong_operation).wait():
        assert outcome.state == "raised" and "reduce_op='median'" in outcome.error


def _averaged(degrees: Degrees) -> Any:
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
    trainer = make_trainer(degrees, max_epochs=4, callbacks=[swa])
    module = Regression()
    trainer.fit(module, loader(degrees, 8))
    return {n: p.detach().clone() for n, p in trainer.strategy.lightning_module_state_dict().items()}


def test_weight_averaging_works_where_nothing_is_cut(world: Worlds) -> None:
    assert_same(world(2).run(_averaged, (1, 1))[0], _averaged(None))
    world(2).run(_moving_average, (1, 1))


def _moving_average(degrees: tuple[int, ...]) -> None:
    make_trainer(degrees, callbacks=[EMAWeightAveraging()]).fit(Regression(), loader(degrees, 8))


@pytest.mark.parametrize("average", [_averaged, _moving_average])
def test_weight_averaging_is_refused_where_the_module_is_cut(world: Worlds, average: Any) -> None:
    for outcome in world(2).start(average, (2,)).wait():
        assert outcome.state == "raised" and "Averaging averages a copy of the whole module" in outcome.error


@pytest.mark.parametrize("count", [9, 10])
def test_predictions_come_back_per_replica(world: Worlds, count: int) -> None:
    sides = world(3).run(_predict, (2, 1), count)
    assert sides[0] == sides[1]
    assert sorted(sides[0] + sides[2]) == list(range(count)), "no row twice, none missing"


def _predict(degrees: tuple[int, ...], count: int) -> list[int]:
    from torch.utils.data import DataLoader

    module = Regression()
    module.predict_step = lambda batch, batch_idx: batch  # type: ignore[method-assign]
    found = make_trainer(degrees).predict(module, DataLoader(range(count), batch_size=2))  # type: ignore[arg-type]
    return torch.cat(found).tolist()  # type: ignore[arg-type]


def _unequal_validation(degrees: tuple[int, ...]) -> Any:
    """Replica 0 has two validation batches more than replica 1."""
    from torch.utils.data import DataLoader

    from tests.lightning.rigs import rows

    module = _Scripted(degrees)
    count = 8 if replica_of(degrees) == 0 else 4
    trainer = make_trainer(degrees, use_distributed_sampler=False, max_epochs=2)
    trainer.fit(module, DataLoader(rows(4), batch_size=2), DataLoader(rows(count), batch_size=2))
    return slot(), trainer.global_step


def test_replicas_may_have_different_numbers_of_validation_batches(world: Worlds) -> None:
    assert world(3).run(_unequal_validation, (2, 1)) == [(0, 4), (1, 4), (2, 4)]
