"""A recovery gives parameters other shapes: torch refuses that while anything holds the graph of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_ntp.engine.recovery import Outcome
from tests.lightning.faulty_rank import FEATURES, Faults, train


class Shrinking(LightningModule):
    """Loses its last hidden unit at every recovery, as a shard may change; hands out its graph where it can."""

    def __init__(self, faults: Faults, automatic: bool = True) -> None:
        super().__init__()
        self.faults, self.automatic_optimization = faults, automatic
        self.up, self.down = nn.Linear(FEATURES, 8), nn.Linear(8, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        hidden = self.up(x)
        hidden.register_hook(lambda grad: self.faults.at("backward"))
        out = self.down(F.gelu(hidden)).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(out, y)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            self.optimizers().step()  # type: ignore[union-attr]
        return {"loss": loss, "out": out}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    @torch.no_grad()
    def shrink(self) -> None:
        left = self.up.out_features = self.down.in_features = self.up.out_features - 1
        state = self.trainer.optimizers[0].state
        for parameter, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.narrow(dim, 0, left).clone()
            parameter.grad = None if gradient is None else gradient.narrow(dim, 0, left).clone()
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state.get(parameter, {}):
                    state[parameter][name] = state[parameter][name].narrow(dim, 0, left).clone()


class ManualShrinking(Shrinking):
    def __init__(self, faults: Faults) -> None:
        super().__init__(faults, automatic=False)


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("kind", [Shrinking, ManualShrinking])
def test_parameters_may_change_shape_in_a_recovery(
    kind: type[LightningModule], outcome: Outcome, tmp_path: Path
) -> None:
    def prepare(trainer: Trainer) -> None:
        trainer.strategy.survivors.on_complete = lambda: trainer.lightning_module.shrink()  # type: ignore[attr-defined]

    trainer, _ = train(
        tmp_path, kind, faults=[("backward", 1), ("vote", 3), ("sync", 6)], outcome=outcome, prepare=prepare
    )
    assert trainer.lightning_module.up.out_features == 5  # type: ignore[union-attr]
    assert trainer.strategy.survivors.committed == 10  # type: ignore[attr-defined]


@pytest.mark.parametrize("phase", ["backward", "vote"])
def test_parameters_may_change_shape_inside_a_window(phase: str, tmp_path: Path) -> None:
    def prepare(trainer: Trainer) -> None:
        trainer.strategy.survivors.on_complete = lambda: trainer.lightning_module.shrink()  # type: ignore[attr-defined]

    faults = [(phase, 1), (phase, 2)]
    trainer, _ = train(tmp_path, Shrinking, faults=faults, prepare=prepare, accumulate_grad_batches=2)
    assert trainer.lightning_module.up.out_features == 6  # type: ignore[union-attr]
