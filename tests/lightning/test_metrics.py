"""Logged values, torchmetrics and gathered tensors: every replica counts once, tensor-parallel peers never twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy

from tests.lightning.rigs import (
    Degrees,
    EndState,
    Regression,
    Worlds,
    assert_same,
    loader,
    make_trainer,
    replica_of,
    rows,
)


class _Logs(Regression):
    """Logs numbers that tell the replicas apart: replica r logs 1 + 2 r."""

    def __init__(self, degrees: tuple[int, ...]) -> None:
        super().__init__(lr=0.0)
        self.value = 1.0 + 2.0 * replica_of(degrees)
        self.on_step: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for fx in ("sum", "mean", "max", "min"):
            self.log(fx, self.value, reduce_fx=fx, sync_dist=True, on_step=True, on_epoch=True)
        self.log("whole", torch.tensor(3, dtype=torch.int64).float(), sync_dist=True, reduce_fx="sum")
        self.log("apart", self.value)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.on_step.append(float(self.trainer.callback_metrics["mean_step"]))


def _log(degrees: tuple[int, ...]) -> Any:
    module = _Logs(degrees)
    trainer = make_trainer(degrees)
    trainer.fit(module, loader(degrees, 8))
    return {k: float(v) for k, v in trainer.callback_metrics.items()}, module.on_step


def test_logged_values_are_reduced_over_replicas(world: Worlds) -> None:
    """Two batches each; sums would be 2 * (1 + 1 + 3) if tensor-parallel peers counted."""
    sides = world(3).run(_log, (2, 1))
    for rank, (metrics, on_step) in enumerate(sides):
        own = [1.0, 1.0, 3.0][rank]
        assert metrics["sum_step"] == 4.0 and metrics["sum_epoch"] == metrics["sum"] == 8.0
        assert metrics["mean_step"] == metrics["mean_epoch"] == 2.0 and on_step == [2.0, 2.0]
        assert metrics["max_step"] == metrics["max_epoch"] == 3.0
        assert metrics["min_step"] == metrics["min_epoch"] == 1.0
        assert metrics["whole"] == 6.0
        assert metrics["apart"] == own


class _LogsLoss(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss


def _uneven_loss(degrees: Degrees) -> float:
    trainer = make_trainer(degrees, use_distributed_sampler=False)
    batches = [[0, 1, 2, 3, 4]] if degrees is None else [[[0, 1, 2], [3, 4]][replica_of(degrees)]]
    trainer.fit(_LogsLoss(), DataLoader(rows(5), batch_sampler=batches))
    return float(trainer.callback_metrics["loss"])


def test_the_epoch_mean_of_batches_of_different_sizes_is_the_dense_mean(world: Worlds) -> None:
    """3 rows here, 2 there: Lightning divides by the mean number of rows, which is no whole number."""
    truth = _uneven_loss(None)
    assert_same(world(3).run(_uneven_loss, (2, 1)), [truth] * 3)


class _Measures(Regression):
    """Metrics of every kind of state: sums, maxima, lists; in a collection, too."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = BinaryAccuracy()
        self.mean, self.total, self.all = MeanMetric(), SumMetric(), CatMetric()
        self.more = MetricCollection({"max": MaxMetric(), "second_mean": MeanMetric()})
        self.values: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        with torch.no_grad():
            wrong = F.mse_loss(self.net(x), y, reduction="none").mean(-1)
        self.accuracy(torch.sigmoid(x[:, 0]), (y[:, 0] > 0).long())
        self.mean(wrong)
        self.all(x[:, 0])
        self.total(x[:, 0].abs())
        self.more(wrong)
        self.log("accuracy", self.accuracy)
        self.log("mean", self.mean)
        self.log_dict(self.more)

    def on_validation_epoch_end(self) -> None:
        self.values = sorted(self.all.compute().tolist())
        self.log("total", self.total.compute())
        self.all.reset()
        self.total.reset()


def _measure(degrees: Degrees) -> Any:
    module = _Measures()
    trainer = make_trainer(degrees)
    (logged,) = trainer.validate(module, loader(degrees, 12), verbose=False)
    return logged, module.values


@pytest.mark.parametrize("degrees", [(2, 1), (3,)])
def test_torchmetrics_in_the_module_give_the_single_process_value(world: Worlds, degrees: tuple[int, ...]) -> None:
    truth = _measure(None)
    assert truth[0].keys() == {"accuracy", "mean", "total", "max", "second_mean"} and len(truth[1]) == 12
    for side in world(3).run(_measure, degrees):
        # counted in float32 by torchmetrics
        assert_same(side, truth, 1e-6)


class _Gathers(Regression):
    """The loss is made of what all replicas have, gradients included."""

    shapes: list[Any]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        self.shapes = [tuple(self.all_gather(t).shape) for t in (out, out.mean(), x[:0])]
        self.shapes.append({k: v.tolist() for k, v in self.all_gather({"slot": replica_of(degrees_of(self))}).items()})
        everyone = self.all_gather(out, sync_grads=True)
        assert everyone.requires_grad
        everyone = everyone.flatten(0, 1) if everyone.dim() == 3 else everyone
        # a contrast: no mean over samples, so it needs the others
        return everyone.std(0).sum() * everyone.pow(2).mean()


def degrees_of(module: Regression) -> Degrees:
    return getattr(module.trainer.strategy, "degrees", None)


def _gather(degrees: Degrees) -> Any:
    module, end = _Gathers(), EndState()
    make_trainer(degrees, callbacks=[end]).fit(module, loader(degrees, 12))
    return end.parameters, module.gradients, module.shapes


def test_all_gather_has_one_row_per_replica_and_gradients_flow_back(world: Worlds) -> None:
    sides = world(3).run(_gather, (2, 1))
    truth = _gather(None)
    assert_same(sides[0][:2], truth[:2])
    for _, _, shapes in sides:
        assert shapes == [(2, 2, 2), (2,), (2, 0, 6), {"slot": [0, 1]}]
