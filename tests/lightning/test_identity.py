"""What a newcomer must have in common with the job, and how a difference is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ntp.lightning.arrivals.identity import describe_job, differences
from lightning_ntp.parallel import TensorParallelContext, parallelize
from lightning_ntp.plan import LayoutFamily


class Small(LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(2, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Describes(Callback):
    found: dict[str, str]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = parallelize(pl_module, {}, TensorParallelContext(LayoutFamily(1), 1))
        self.found = describe_job(trainer, model)


def described(width: int = 3, samples: int = 4, lr: float = 0.1, **options: Any) -> dict[str, str]:
    """What a fit of these settings says of itself."""
    module, callback = Small(width), Describes()
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=lr)  # type: ignore[method-assign]
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, DataLoader(torch.ones(samples, 2), batch_size=2))
    return callback.found


def test_the_same_script_says_the_same() -> None:
    first = described()
    assert differences(first, described()) == ""
    assert first[f"file {Path(__file__)}"].startswith("version ")
    assert first["package torch"] == torch.__version__
    assert not any("site-packages" in name or "/lightning_ntp/lightning_ntp/" in name for name in first)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": 4}, "parameter layer.weight is (4, 2), torch.float32, trainable, whole here and (3, 2), "),
        ({"samples": 6}, "number of training batches is 3 here and 2 there"),
        ({"lr": 0.2}, "lr=0.2"),
        ({"max_epochs": 2}, "Trainer(max_epochs) is 2 here and 1 there"),
    ],
)
def test_a_difference_is_named(settings: dict[str, Any], said: str) -> None:
    assert said in differences(described(**settings), described())


def test_of_many_differences_a_few_are_told() -> None:
    here, there = {str(n): "a" for n in range(9)}, {str(n): "b" for n in range(8)}
    told = differences(here, there)
    assert told == "0 is a here and b there; 1 is a here and b there; 2 is a here and b there; and 6 more differences"
    assert differences({"x": "1"}, {}) == "x is 1 here and missing there"
