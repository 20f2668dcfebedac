"""What these jobs train: small modules that log in every way, one per kind of optimization."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanMetric

from tests.lightning.rigs import slot as own_slot
from tests.models import Attention, GeluMLP, GPTConfig

HIDDEN, CONTEXT = 6, 3
_CONFIG = GPTConfig(
    hidden=HIDDEN, heads=6, kv_heads=3, head_dim=2, ffn=9, mlp="gelu", mlp_bias=True, attention_bias=True
)


class Net(nn.Module):
    """A transformer block and a head: (batch, 3, 6) to (batch, 2). Nothing divides by 4; key/value heads are shared."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(_CONFIG), GeluMLP(_CONFIG)
        self.batch_norm = nn.BatchNorm1d(CONTEXT * HIDDEN) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch_norm(x.flatten(1)).view_as(x)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.dropout(x.mean(1)))


class Automatic(LightningModule):
    """Mean squared error, AdamW, logged on step and on epoch, as mean, sum and maximum, by value and by torchmetrics.

    Args:
        batch_norm: Whether it has buffers that every forward changes.
        schedule: Whether a scheduler changes the learning rate after every step.
        sgd: SGD, which shows gradients of a wrong scale.

    Attributes:
        ids: The samples of the running step, by number of the batch. The last run of a batch counts.
    """

    def __init__(self, batch_norm: bool = False, schedule: bool = False, sgd: bool = False) -> None:
        super().__init__()
        self.net = Net(batch_norm)
        self.metric = MeanMetric()
        self.schedule, self.sgd = schedule, sgd
        self.ids: dict[int, list[int]] = {}

    def configure_tp_plan(self) -> dict[str, Any]:
        return {"net.attention": "attention", "net.mlp": "mlp"}

    def extra_callbacks(self, directory: str) -> list[Callback]:
        return []

    @staticmethod
    def plugins() -> list[Any]:
        """More for the Trainer: objects that cannot be sent to the ranks."""
        return []

    def configure_optimizers(self) -> Any:
        if self.sgd:
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, ids = batch
        self.ids[batch_idx] = ids.tolist()
        dtype = self.net.head.weight.dtype
        return F.mse_loss(self.net(x.to(dtype)), y.to(dtype))

    def note(self, loss: Tensor, batch: Any) -> None:
        size = len(batch[2])
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=size)
        self.log("all_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=size)
        self.log("samples", float(size), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.metric.update(loss.detach(), size)
        self.log("metric", self.metric, on_step=False, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, batch_idx)
        self.note(loss, batch)
        return {"loss": loss}


class Manual(Automatic):
    """Two optimizers, each for half of the parameters, both in one training step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        block = [p for n, p in self.named_parameters() if "attention" in n]
        rest = [p for n, p in self.named_parameters() if "attention" not in n]
        return torch.optim.AdamW(block, lr=0.02), torch.optim.Adam(rest, lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        loss = self.loss(batch, batch_idx)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.zero_grad()
        again = self.loss(batch, batch_idx)
        self.manual_backward(again)
        second.step()
        self.note(again, batch)
        return {"loss": again.detach()}


class Settles(Automatic):
    """Asks for every slot's own place once all are back."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 6 and own_slot() == 1:
            self.trainer.strategy.relayout()


class Half(Automatic):
    """Float16 with a scaler that overflows in the first steps and grows soon."""

    def __init__(self) -> None:
        super().__init__(sgd=True)

    @staticmethod
    def plugins() -> list[Any]:
        return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2))]


class Keeps(Automatic):
    """Keeps graphs alive from one step to the next: its loss, and undetached predictions in a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanAbsoluteError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.last = output["loss"]
        self.log("error", self.error(self.net(batch[0]), batch[1]), on_step=True, on_epoch=True)
        return output


class DiesAgain(Automatic):
    """A slot dies when it does a step for the second time.

    Args:
        slot, step: Which slot, and in which step, counted from 0.
        where: "forward", or "backward" once its gradients are synced.
    """

    def __init__(self, slot: int, step: int, where: str = "forward", **settings: Any) -> None:
        super().__init__(**settings)
        self._victim, self._fatal, self._where = slot, step, where
        self._count = _Count()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._count.steps.append(self.trainer.global_step)
        if self._where == "forward":
            self._die()
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self._where == "backward":
            self._die()

    def _die(self) -> None:
        if own_slot() == self._victim and self._count.steps.count(self._fatal) == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class _Count:
    """Holds what no snapshot puts back."""

    def __init__(self) -> None:
        self.steps: list[int] = []


class Interferes(Automatic):
    """Changes something between two steps.

    Args:
        kind: "clamped" (parameters) or "unfrozen" (one of them).
        step: After this many steps.
    """

    def __init__(self, kind: str, step: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._kind, self._step = kind, step
        if kind == "unfrozen":
            self.net.head.bias.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self._step:
            if self._kind == "unfrozen":
                self.net.head.bias.requires_grad_(True)
            else:
                with torch.no_grad():
                    for parameter in self.parameters():
                        parameter.clamp_(-0.3, 0.3)


class Averages(Automatic):
    """Keeps a moving average of its parameters, changed after every update, and logs it."""

    def on_fit_start(self) -> None:
        self._averages: dict[Tensor, dict[str, Any]] = {p: {"mean": p.detach().clone()} for p in self.parameters()}
        self.trainer.strategy.register_state(self._averages)
        self.trainer.optimizers[0].register_step_post_hook(self._average)

    @torch.no_grad()
    def _average(self, *_: Any) -> None:
        for parameter, state in self._averages.items():
            state["mean"].mul_(0.8).add_(parameter, alpha=0.2)

    def on_train_epoch_end(self) -> None:
        bias = self._averages[self.net.head.bias]["mean"]
        self.log("average", bias.sum())


class NoRoom(Automatic):
    """On a machine whose memory is used up."""

    def on_fit_start(self) -> None:
        raise AssertionError("copies that do not fit are refused before")

    def configure_optimizers(self) -> Any:
        from lightning_ntp.lightning import redundancy

        redundancy.available_bytes = lambda: 0
        return super().configure_optimizers()


class AsksForTheImpossible(Automatic):
    """Asks for leaves that cannot be."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for slot, told in (
            (7, "slot 7 is not alive; live slots are [0, 1, 2, 3]"),
            ("2", "is no slot's number"),
            (1, "would fall below min_tensor_parallel_size=2"),
        ):
            try:
                self.trainer.strategy.drain(slot, "no reason")
            except ValueError as error:
                assert told in str(error), error
            else:
                raise AssertionError(f"slot {slot} may leave")
