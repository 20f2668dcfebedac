"""What these jobs train: small modules that log in every way, one per kind of optimization."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanMetric

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
