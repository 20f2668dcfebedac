"""One rank in one process, whose collectives are interrupted on demand, and all that a training run leaves behind."""

from __future__ import annotations

import csv
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision, BinaryRecall

from lightning_ntp.comm.interruption import Interrupted
from lightning_ntp.engine.recovery import Outcome
from lightning_ntp.lightning.steps.deferred_rows import DeferredRows
from lightning_ntp.lightning.steps.transaction import Transaction

Fault = tuple[str, int]
"""A phase and the how-manieth time it is reached, counted from 0 and over replays."""

BATCHES, BATCH_SIZE, FEATURES = 5, 8, 6


class Faults:
    """Interrupts at given points.

    Args:
        faults: Where.
        sticky: Whether, once interrupted, everything raises until the rank has recovered, as real groups do.
    """

    def __init__(self, *faults: Fault, sticky: bool = False) -> None:
        self.planned, self.sticky = set(faults), sticky
        self.hits: Counter[str] = Counter()
        self.fired: list[Fault] = []
        self.broken = False

    def at(self, phase: str) -> None:
        fault = (phase, self.hits[phase])
        self.hits[phase] += 1
        if fault in self.planned:
            self.fired.append(fault)
            self.broken = self.sticky
            raise Interrupted(f"injected at {fault}")
        if self.broken:
            raise Interrupted("still broken")


class Survivors:
    """Stands in for the recovery.

    Args:
        faults: Healed by an agreement.
        outcome: What is agreed while this rank is ready.
    """

    def __init__(self, faults: Faults, outcome: Outcome = Outcome.REPLAY) -> None:
        self.committed, self.ready = 0, False
        self.calls: list[str] = []
        self.on_complete: Callable[[], None] = lambda: None
        self._faults, self._outcome = faults, outcome

    def agree(self, error: Interrupted) -> Outcome:
        assert isinstance(error, Interrupted) and error.__traceback__ is None
        self._faults.broken = False
        self.calls.append("agree")
        return self._outcome if self.ready else Outcome.REPLAY

    def complete(self) -> None:
        self.calls.append("complete")
        self.on_complete()


class FaultyRank(SingleDeviceStrategy):
    """Lightning's own strategy with the transaction around its steps, as :class:`NTPStrategy` has it.

    Args:
        faults: Where it is interrupted.
        outcome: What is agreed on in the vote.
    """

    def __init__(self, faults: Faults, outcome: Outcome = Outcome.REPLAY) -> None:
        super().__init__(device="cpu")
        self.faults, self.survivors = faults, Survivors(faults, outcome)
        self.transaction: Transaction | None = None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            rows = DeferredRows()
            self.transaction = Transaction(trainer, self.survivors, partial(self.faults.at, "vote"), rows)
            self.transaction.install()
            rows.install(trainer.loggers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.transaction is not None
        return self.transaction.training_step(partial(super().training_step, *args, **kwargs))

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert self.transaction is not None
        self.transaction.before_backward()
        result = super().backward(closure_loss, optimizer, *args, **kwargs)
        self.faults.at("sync")
        return result

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        assert self.transaction is not None
        return self.transaction.optimizer_step(partial(super().optimizer_step, optimizer, closure, model, **kwargs))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.transaction is not None:
            self.transaction.check_may_communicate("reduce_boolean_decision")
        return decision

    def teardown(self) -> None:
        if self.transaction is not None:
            self.transaction.uninstall()
        super().teardown()


class Net(nn.Module):
    """Everything with a memory: batch statistics, dropout, a buffer that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(20_000.0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.layers(x).squeeze(-1) + 0 * self.table[0]


class Learner(LightningModule):
    """Logs in all ways, draws from all random streams, and is interrupted where ``faults`` say."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.net = Net()
        self.own_steps = 0
        self.activations: list[weakref.ref[Tensor]] = []
        self.mean = MeanMetric()
        self.all = CatMetric()
        self.scores = MetricCollection([BinaryAccuracy(), BinaryPrecision(), BinaryRecall()])

    def ntp_snapshot(self) -> Any:
        return self.own_steps

    def ntp_restore(self, state: Any) -> None:
        self.own_steps = state

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        self.faults.at("before_forward")
        out = self.net(x)
        self.activations.append(weakref.ref(out))
        if out.requires_grad:
            out.register_hook(lambda grad: self.faults.at("backward"))
        loss = F.binary_cross_entropy_with_logits(out.float(), y) + 0.01 * random.random() + 0.01 * np.random.rand()
        self.mean.update(loss.detach())
        self.all.update(out.detach())
        self.scores.update(out.detach(), y.int())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("sum", loss, on_epoch=True, on_step=False, reduce_fx="sum")
        self.log("max", out.max(), on_epoch=True, on_step=False, reduce_fx="max")
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        if self.trainer.logger is not None:
            self.trainer.logger.log_metrics(
                {"direct": loss}, step=1000 + self.trainer.fit_loop.epoch_loop.total_batch_idx
            )
        self.faults.at("after_forward")
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.own_steps += 1
        return self.loss_of(*batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("noise", torch.rand(()))
        self.faults.at("hook")

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.faults.at("clip")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.faults.at("clipped")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # between the micro-batches of a window, outside of the transaction
        self.log("between", torch.rand(()), on_epoch=True, on_step=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(BATCHES * BATCH_SIZE, FEATURES, generator=generator)
    y = (x.sum(1) > 0).float()
    return DataLoader(TensorDataset(x, y), BATCH_SIZE, shuffle=True, num_workers=0)


def train(
    path: Path,
    build: Callable[[Faults], LightningModule] = Learner,
    faults: Iterable[Fault] = (),
    outcome: Outcome = Outcome.REPLAY,
    sticky: bool = False,
    precision: str = "32",
    epochs: int = 2,
    prepare: Callable[[Trainer], None] = lambda trainer: None,
    **trainer_kwargs: Any,
) -> tuple[Trainer, dict[str, Any]]:
    """Train, and give all that is left: compare it with another run's by :func:`assert_same`."""
    seed_everything(3, verbose=False)
    injected = Faults(*faults, sticky=sticky)
    strategy = FaultyRank(injected, outcome)
    plugins = None if precision == "32" else [MixedPrecision(precision, "cpu")]  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        plugins=plugins,
        max_epochs=epochs,
        logger=CSVLogger(path, name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_kwargs,
    )
    module = build(injected)
    prepare(trainer)
    trainer.fit(module, data())
    assert set(injected.fired) == injected.planned, f"never reached: {injected.planned - set(injected.fired)}"
    alive = [ref for ref in getattr(module, "activations", []) if ref() is not None]
    assert not alive, f"{len(alive)} activations are still alive"
    return trainer, remains(trainer, module, path)


def remains(trainer: Trainer, module: LightningModule, path: Path) -> dict[str, Any]:
    """Everything that a step may have changed."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    rows = []
    if (path / "metrics.csv").exists():
        with open(path / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
    return {
        "rows": rows,
        "parameters": {k: v.clone() for k, v in module.state_dict().items()},
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "logged": dict(trainer.callback_metrics),
        "progress": trainer.fit_loop.state_dict(),
        "steps": trainer.global_step,
        "states": {
            name: {"count": m._update_count, **{k: getattr(m, k) for k in m._defaults}}
            for name, m in module.named_modules()
            if hasattr(m, "_defaults")
        },
        "random": (random.random(), float(np.random.rand()), torch.rand(3)),
        "own": getattr(module, "own_steps", None),
        "scaler": scaler.state_dict() if scaler is not None else None,
        "gradients": {n: p.grad for n, p in module.named_parameters()},
        "frozen": {n: p.requires_grad for n, p in module.named_parameters()},
        "committed": trainer.strategy.survivors.committed,
    }


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Bit for bit."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and found.dtype == expected.dtype, where
        assert torch.equal(found, expected), f"{where}: {found} is not {expected}"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{where}: {found.keys() ^ expected.keys()}"
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{where}: {len(found)} is not {len(expected)}"
        for k, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}[{k}]")
    else:
        assert found == expected, f"{where}: {found!r} is not {expected!r}"
