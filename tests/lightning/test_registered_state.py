"""Per-parameter state outside of optimizers moves with the shards: a moving average survives a kill exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_ntp.callbacks import Fault, FaultInjector
from tests.lightning.rigs import Regression, Worlds, assert_same, loader, make_trainer
from tests.lightning.test_rank_zero_moves import EXACT

DEGREES = (3, 2)


class Adam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Manual(Adam):
    """Two updates a step: a replay finds the average changed already."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(self.loss(batch))
            optimizer.step()  # type: ignore[union-attr]


class Average(Callback):
    """Keeps a moving average of every parameter, and how often it was updated."""

    def __init__(self) -> None:
        self.full: dict[str, dict[str, Any]] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state: dict[Tensor, dict[str, Any]] = {
            p: {"average": p.detach().clone(), "updates": torch.tensor(0)} for p in pl_module.parameters()
        }
        trainer.strategy.register_state(self.state)  # type: ignore[attr-defined]
        trainer.strategy.register_state(self.state)  # type: ignore[attr-defined]
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self.update)

    @torch.no_grad()
    def update(self, *_: Any) -> None:
        for parameter, values in self.state.items():
            values["average"].lerp_(parameter, 0.3)
            values["updates"] += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        # as a checkpoint would hold it: what is put together and cut again is what is here
        self.full = strategy.full_state(self.state)
        everywhere = strategy.broadcast(self.full)
        again = strategy.local_state(everywhere)
        assert again.keys() == self.state.keys()
        for parameter, values in self.state.items():
            for key, value in values.items():
                assert torch.equal(again[parameter][key], value)


def train(module: str, faults: list[Fault]) -> dict[str, dict[str, Any]]:
    average = Average()
    kind = {"automatic": Adam, "manual": Manual}[module]
    trainer = make_trainer(DEGREES, max_epochs=2, callbacks=[average, FaultInjector(faults)])
    trainer.fit(kind(), loader(DEGREES, 16))
    trainer.strategy.assert_copies_equal()  # type: ignore[attr-defined]
    return average.full


@pytest.mark.parametrize(
    ("module", "faults"),
    [
        ("automatic", [Fault("kill", 1, 3, "backward"), Fault("kill", 4, 5, "update")]),
        ("automatic", [Fault("kill", 0, 2, "vote")]),
        ("manual", [Fault("kill", 1, 3, "vote")]),
    ],
    ids=["twice", "rank zero", "manual"],
)
def test_a_moving_average_survives_a_kill_exactly(module: str, faults: list[Fault], world: Worlds) -> None:
    whole = world(sum(DEGREES)).run(train, module, [])[0]
    assert {values["updates"].item() for values in whole.values()} == {8 if module == "automatic" else 16}
    outcomes = world(sum(DEGREES)).start(train, module, faults).survive()
    dead = {fault.slot for fault in faults}
    for outcome in outcomes:
        expected = "died" if outcome.slot in dead else "returned"
        assert outcome.state == expected, f"slot {outcome.slot}: {outcome.state}\n{outcome.error}\n{outcome.output}"
    first = min(o.slot for o in outcomes if o.slot not in dead)
    assert_same(outcomes[first].value, whole, EXACT)


class Registers(Callback):
    def __init__(self, state: Any) -> None:
        self.state = state

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weight = pl_module.net.mlp.up_proj.weight  # type: ignore[union-attr]
        trainer.strategy.register_state(self.state(weight))  # type: ignore[attr-defined]


def refused(kind: str) -> str:
    state = {
        "shape": lambda weight: {weight: {"average": torch.zeros(7, 6)}},
        "key": lambda weight: {nn.Parameter(torch.zeros(3)): {"average": torch.zeros(3)}},
    }[kind]
    with pytest.raises(ValueError) as error:
        make_trainer((2,), callbacks=[Registers(state)]).fit(Regression(), loader((2,), 4))
    return str(error.value)


def test_state_that_cannot_be_moved_is_refused_by_name(world: Worlds) -> None:
    messages = world(2).run(refused, "shape")
    assert "'average' of shape (7, 6) for the parameter 'net.mlp.up_proj.weight'" in messages[1]
    assert "shard has the shape (3, 6)" in messages[1]
    assert "which is no parameter of Regression" in world(2).run(refused, "key")[0]


def test_before_the_model_is_cut_there_is_nothing_to_register() -> None:
    from lightning_ntp import NTPStrategy

    with pytest.raises(RuntimeError, match="call this in on_fit_start or later"):
        NTPStrategy(degrees=(2, 1)).register_state({})
