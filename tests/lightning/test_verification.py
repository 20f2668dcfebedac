"""The first step is verified against the unsharded model: what trains on silently with wrong numbers is told before the
first update, and what is right is trained as if nobody had looked."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_ntp.lightning.verification as verification
from tests.lightning.rigs import (
    FEATURES,
    EndState,
    FeedForward,
    Net,
    Regression,
    Worlds,
    assert_same,
    loader,
    make_trainer,
    replica_of,
    rows,
    slot,
)

# ---- what is wrong is told ------------------------------------------------------------------------------------------


class _KeepsHidden(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = F.gelu(self.up_proj(x))
        return self.down_proj(self.hidden)


class _FixedHeads(nn.Module):
    """Attention that takes its number of heads from a constant: (batch, time, 8) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _OverFeatures(nn.Module):
    """Attends over the features: (batch, 6) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.attention, self.out = nn.Linear(1, 8), _FixedHeads(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(self.into(x.unsqueeze(-1)))).squeeze(-1)


class _Wrong(Regression):
    """Trains a net with another block, before it a layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        torch.manual_seed(3)
        self.before = nn.Linear(FEATURES, FEATURES)
        self.block = _OverFeatures() if kind == "heads" else _KeepsHidden(FEATURES, 8)

    def configure_tp_plan(self) -> dict[str, Any]:
        more: dict[str, dict[str, Any]] = {
            "heads": {"block.attention": {"style": "attention", "heads": 4}},
            "ungathered": {"block": "mlp", "net.head": "colwise"},
        }
        return more.get(self.kind, {"block": "mlp"})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        before = self.before(x)
        out = self.net(before + self.block(before))
        if self.kind == "ungathered":
            return out.square().mean()
        loss = F.mse_loss(out, y)
        if self.kind == "hidden":
            loss = loss + self.block.hidden.square().mean()
        elif self.kind == "weights":
            loss = loss + 0.1 * sum(p.square().sum() for p in self.parameters())
        return loss


def _fit_wrong(degrees: tuple[int, ...], kind: str, verify: Any) -> list[Any]:
    module = _Wrong(kind)
    make_trainer(degrees, {"verify": verify}).fit(module, loader(degrees, 16))
    return module.gradients


@pytest.mark.parametrize("degrees", [(2,), (2, 1)])
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("hidden", "the loss"),
        ("weights", "The gradients are right: only the number itself is wrong"),
        ("ungathered", "the loss"),
        ("heads", "the gradients of 'block.attention."),
    ],
)
def test_what_differs_from_the_unsharded_model_is_told_on_all_ranks_before_the_first_update(
    world: Worlds, degrees: tuple[int, ...], kind: str, found: str
) -> None:
    outcomes = world(sum(degrees)).start(_fit_wrong, degrees, kind, "auto").wait(grace=20)
    for outcome in outcomes:
        assert outcome.state == "raised" and "VerificationError" in outcome.error, (outcome.error, outcome.stacks)
        assert found in outcome.error and "NTPStrategy(verify=False)" in outcome.error, outcome.error
    assert len({outcome.error.partition("VerificationError")[2] for outcome in outcomes}) == 1


def test_it_can_be_switched_off(world: Worlds) -> None:
    assert len(world(3).run(_fit_wrong, (2, 1), "weights", False)[0]) == 4


def _too_large(degrees: tuple[int, ...]) -> int:
    before, verification.AUTO_BYTES = verification.AUTO_BYTES, 1000
    try:
        return len(_fit_wrong(degrees, "weights", "auto"))
    finally:
        verification.AUTO_BYTES = before


def test_a_large_model_is_not_verified_unless_asked(world: Worlds) -> None:
    assert world(2).run(_too_large, (2,))[0] == 8


# ---- what is right is trained as if nobody had looked ----------------------------------------------------------------


class _Busy(Regression):
    """Does in its step what leaves traces.

    Args:
        draws: What of random numbers: "outside" of blocks, "dropout" in them and outside, or "" for nothing.
    """

    def __init__(self, draws: str = "", weighs: bool = False) -> None:
        super().__init__(build=lambda: Net(0.5 if draws == "dropout" else 0.0))
        self.batch_norm = nn.BatchNorm1d(FEATURES)
        self.drop = nn.Dropout(0.3 if draws == "dropout" else 0.0)
        self.metric = MeanMetric()
        self.draws = draws
        self.outputs: list[Tensor] = []
        self.by_size: dict[int, list[float]] = {}
        self.count = 0
        self.average = torch.zeros((), dtype=torch.float64)
        if weighs:
            self.ntp_batch_weight = lambda batch: 3.0 + float(batch[0].abs().sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        calls.append(batch_idx)
        batch[0].mul_(2.0)  # users do
        x, y = batch
        if self.draws:
            x = x + 0.1 * torch.randn_like(x)
        x = self.drop(self.batch_norm(x.to(self.batch_norm.weight.dtype)))
        hidden = x + checkpoint(self.net.mlp, self.net.norm(x), use_reentrant=False)
        loss = F.mse_loss(self.net.head(hidden), y.to(x.dtype))
        self.metric(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.outputs.append(loss)
        self.by_size.setdefault(len(x), []).append(float(loss))
        self.count += 1
        self.average += loss.detach().double()
        self.last = loss  # keeps the graph alive
        graphs[:] = [*graphs[-2:], loss]
        return loss


calls: list[int] = []
"""Of training_step in this process; nothing puts it back."""
graphs: list[Tensor] = []
"""Losses that the user keeps, where nobody looks."""


def _train(verify: Any, draws: str, precision: str, options: dict[str, Any], weighs: bool, uneven: bool) -> Any:
    degrees = (2, 1)
    torch.manual_seed(11)
    calls.clear()
    module, end = _Busy(draws, weighs), EndState()
    options = {"precision": precision, **options}
    if precision == "16-mixed":
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))]
        del options["precision"]
    trainer = make_trainer(degrees, {"verify": verify}, callbacks=[end], max_epochs=2, **options)
    data = loader(degrees, 24, per_replica=3)
    if uneven:
        batches = [[[0, 1, 2], [3, 4], [5, 6, 7]], [[8, 9], [10, 11, 12], [13, 14]]][replica_of(degrees)]
        data = DataLoader(rows(15), batch_sampler=batches)
        trainer = make_trainer(
            degrees, {"verify": verify}, callbacks=[end], max_epochs=2, use_distributed_sampler=False, **options
        )
    trainer.fit(module, data)
    logged = {k: float(v) for k, v in trainer.callback_metrics.items()}
    state = [module.outputs, module.by_size, module.count, module.average, dict(module.named_buffers())]
    drawn = [torch.rand(2), trainer.precision_plugin.state_dict()]
    return (
        len(calls),
        [getattr(end, "parameters", None), getattr(end, "optimizers", None), module.gradients],
        [
            logged,
            _detached(state),
            drawn,
            module.drop.p,
        ],
    )


def _detached(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _detached(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_detached(v) for v in value]
    return value.detach() if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    ("draws", "precision", "options", "weighs", "uneven"),
    [
        ("", "64-true", {}, False, False),
        ("outside", "64-true", {"accumulate_grad_batches": 2}, False, False),
        ("dropout", "32-true", {"gradient_clip_val": 0.1}, False, False),
        ("", "64-true", {}, True, False),
        ("dropout", "64-true", {}, False, True),
        ("", "bf16-mixed", {}, False, False),
        ("", "16-mixed", {}, False, False),
    ],
)
def test_a_verified_run_has_the_same_bits_as_another(
    world: Worlds, draws: str, precision: str, options: dict[str, Any], weighs: bool, uneven: bool
) -> None:
    with_it = world(3).run(_train, True, draws, precision, options, weighs, uneven)
    without = world(3).run(_train, False, draws, precision, options, weighs, uneven)
    for one, other in zip(with_it, without, strict=True):
        assert one[0] == other[0] + 2, "one more forward in each mode"
        assert_same(one[1:], other[1:], bound=0.0)


# ---- when it cannot be compared --------------------------------------------------------------------------------------


class _NoiseInside(FeedForward):
    """Draws numbers of the size of its shard."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up_proj(x)
        return self.down_proj(F.gelu(hidden + 0.1 * torch.randn_like(hidden)))


class _Odd(Regression):
    """Draws numbers in its block, or fails on one rank while it is unsharded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "draws":
            self.net.mlp = _NoiseInside(FEATURES, 8)
            self.net.mlp.dropout.p = 1e-12  # so that the block has random numbers of its own

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "fails" and slot() == 1 and len(self.net.mlp.up_proj.weight) == 7:
            raise torch.OutOfMemoryError("no room for whole activations")
        return self.loss(batch)


def _fit_odd(degrees: tuple[int, ...], kind: str, verify: Any) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_ntp")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        make_trainer(degrees, {"verify": verify}).fit(_Odd(kind), loader(degrees, 8))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in said if "verified" in line]


def test_random_numbers_inside_of_blocks_prove_nothing_and_are_told_once(world: Worlds) -> None:
    said = world(3).run(_fit_odd, (2, 1), "draws", True)
    assert [len(lines) for lines in said] == [1, 0, 0] and "draws different random numbers" in said[0][0], said


class _NothingToLearn(Regression):
    """Replica 1 has no targets in its first batch, so its loss there is 0 / 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        nothing = replica_of((2, 1)) == 1 and batch_idx == 0
        return F.mse_loss(self.net(x)[:0], y[:0]) if nothing else F.mse_loss(self.net(x), y)


def _undefined() -> int:
    trainer = make_trainer((2, 1), {"verify": True}, detect_anomaly=False, max_steps=1)
    trainer.fit(_NothingToLearn(), loader((2, 1), 8))
    return trainer.global_step


def test_a_loss_that_is_undefined_for_the_unsharded_model_too_proves_nothing(world: Worlds) -> None:
    assert world(3).run(_undefined) == [1, 1, 1]


def test_a_rank_without_room_for_the_whole_model_lets_all_go_on(world: Worlds) -> None:
    said = world(3).run(_fit_odd, (2, 1), "fails", "auto")
    assert "was not verified" in said[0][0] and "no room" in said[1][0] and not said[2], said


def test_a_rank_without_room_fails_all_if_the_user_insists(world: Worlds) -> None:
    for outcome in world(3).start(_fit_odd, (2, 1), "fails", True).wait(grace=20):
        assert outcome.state == "raised" and "verify=True, but the unsharded model fails" in outcome.error


class _Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def _manual() -> None:
    make_trainer((2,), {"verify": True}).fit(_Manual(), loader((2,), 8))


def test_manual_optimization_cannot_be_verified(world: Worlds) -> None:
    for outcome in world(2).start(_manual).wait(grace=20):
        assert outcome.state == "raised" and "with manual optimization" in outcome.error, outcome.error


def test_other_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="verify='yes' is none of 'auto', True, False"):
        make_trainer((1, 1), {"verify": "yes"})


# ---- when a rank dies meanwhile --------------------------------------------------------------------------------------


class _Dies(Regression):
    """Slot 1 dies in one of its first calls of training_step: sharded, unsharded, or the step itself."""

    def __init__(self, call: int | None) -> None:
        super().__init__()
        self.call = call

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        calls.append(batch_idx)
        if len(calls) == self.call and slot() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.loss(batch)


def _die(call: int | None) -> Any:
    calls.clear()
    module, end = _Dies(call), EndState()
    make_trainer((2, 2), callbacks=[end]).fit(module, loader((2, 2), 16))
    return getattr(end, "parameters", {}), module.gradients[-1], len(calls)


@pytest.mark.parametrize("call", [1, 2])
def test_a_rank_that_dies_in_the_verification_is_survived(world: Worlds, call: int) -> None:
    outcomes = world(4).start(_die, call).survive(grace=20)
    assert [o.state for o in outcomes] == ["returned", "died", "returned", "returned"], [o.error for o in outcomes]
    truth = world(4).run(_die, None)[0]
    assert_same(outcomes[0].value[:2], truth[:2])
    # the verification is repeated as a whole, on all ranks alike
    assert all(o.value[2] > truth[2] for o in outcomes if o.state == "returned")


# ---- copies after the first updates ----------------------------------------------------------------------------------


class _OwnClip(Regression):
    """Clips by the norm of its own shards."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        optimizer.step()
        return None


class _RateByShape(Regression):
    """Divides the learning rate by the width of a parameter, as it is on the rank (muP, done wrong)."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": 0.1 / p.shape[0]} for p in self.parameters()]
        return torch.optim.SGD(groups, lr=0.1)


def _update(degrees: tuple[int, ...], kind: str, verify: Any, count: int) -> int:
    module = _RateByShape() if kind == "rate" else _OwnClip(kind == "manual")
    trainer = make_trainer(degrees, {"verify": verify})
    trainer.fit(module, loader(degrees, count))
    return trainer.global_step


@pytest.mark.parametrize("count", [16, 4])
@pytest.mark.parametrize("kind", ["clip", "manual", "rate"])
def test_an_update_that_differs_on_ranks_is_told_after_the_first_step(world: Worlds, kind: str, count: int) -> None:
    """Also if that is the last one."""
    for outcome in world(3).start(_update, (2, 1), kind, "auto", count).wait(grace=20):
        assert outcome.state == "raised" and "CopiesDifferError" in outcome.error, (outcome.error, outcome.stacks)
        assert "after step 1" in outcome.error and "gradient_clip_val" in outcome.error, outcome.error


def test_copies_are_not_compared_if_switched_off(world: Worlds) -> None:
    assert world(3).run(_update, (2, 1), "clip", False, 16) == [4, 4, 4]
