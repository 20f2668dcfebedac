"""``python returning_script.py STRATEGY DIRECTORY``: the ranks' results come back to the caller."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(6, 7), "down_proj": nn.Linear(7, 1)})

    def configure_tp_plan(self) -> dict[str, str]:
        return {"mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp["down_proj"](torch.relu(self.mlp["up_proj"](x))).squeeze(-1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self(batch) - batch.sum(-1)).pow(2).mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", (self(batch) - batch.sum(-1)).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(strategy: str, directory: str) -> None:
    pl.seed_everything(1)
    faults = []
    if strategy.endswith("+loss"):
        from lightning_ntp.callbacks import FaultInjector

        strategy = strategy.removesuffix("+loss")
        faults = [FaultInjector([{"kind": "kill", "slot": 0, "step": 2, "phase": "backward"}])]

    def trainer(**more: Any) -> pl.Trainer:
        return pl.Trainer(
            accelerator="cpu",
            devices=4,
            precision="64-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
            strategy=strategy,
            **more,
        )

    net, data = Net(), DataLoader(torch.randn(64, 6, dtype=torch.float64), batch_size=8)
    fitted = trainer(max_epochs=2, callbacks=faults)
    fitted.fit(net, data)
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    total = sum(float(p.double().sum()) for p in net.parameters())
    print(f"loss {float(fitted.callback_metrics['loss_epoch']):.12f} sum {total:.9f} shapes {sorted(shapes.values())}")
    tested = trainer().test(net, data, verbose=False)
    print(f"tested {tested[0]['test_loss']:.12f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
