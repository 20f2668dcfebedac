"""Checkpoints are the unsharded model's: one file, its names and shapes, at any degrees, on any number of devices."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lightning.rigs import (
    Degrees,
    EndState,
    Regression,
    Worlds,
    assert_same,
    loader,
    make_trainer,
    rows,
)
from tests.models import GPTConfig, LitGPT, build

TINY = GPTConfig(vocab=13, hidden=6, layers=1, heads=6, kv_heads=2, head_dim=2, ffn=7, qk_norm=True, tied=True)


class Scheduled(LitGPT):
    """A GPT (tied, with shared KV heads) under AdamW, a schedule and its own hyperparameters."""

    def __init__(self, seed: int = 0, lr: float = 1e-2) -> None:
        self.save_hyperparameters()
        super().__init__(TINY, seed=seed, lr=lr)
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def tokens() -> Tensor:
    """12 rows of 6 tokens."""
    return torch.randint(TINY.vocab, (12, 6), generator=torch.Generator().manual_seed(3))


def _token_loader(replicas_here: int) -> DataLoader:
    return DataLoader(torch.utils.data.TensorDataset(tokens()), batch_size=4 // replicas_here)


def _fit(
    degrees: tuple[int, ...], epochs: int, save: str | None = None, resume: str | None = None
) -> tuple[Any, Any, list[float], list[float]]:
    module, end = Scheduled(seed=1), EndState()
    trainer = make_trainer(degrees, max_epochs=epochs, callbacks=[end])
    trainer.fit(module, _token_loader(len(degrees)), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return end.parameters, end.optimizers, module.rates, [loss for loss, _ in module.losses]


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((3,), (2,)), ((1,), (3,))])
def test_training_resumed_at_other_degrees_is_the_uninterrupted_run(
    world: Worlds, tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    path = str(tmp_path / "half.ckpt")
    whole = world(sum(before)).run(_fit, before, 3)[0]
    half = world(sum(before)).run(_fit, before, 2, save=path)[0]
    rest = world(sum(after)).run(_fit, after, 3, resume=path)[0]
    assert_same(rest[:2], whole[:2])
    assert half[2] + rest[2] == whole[2] and len(set(whole[2])) > 3, "the schedule goes on, and does something"
    assert_same(half[3] + rest[3], whole[3])


def _saved(degrees: tuple[int, ...], directory: str) -> None:
    module = Scheduled(seed=1)
    trainer = make_trainer(degrees, max_epochs=1)
    trainer.fit(module, _token_loader(len(degrees)))
    trainer.save_checkpoint(f"{directory}/full.ckpt")
    trainer.save_checkpoint(f"{directory}/weights.ckpt", weights_only=True)


@pytest.fixture
def saved(world: Worlds, tmp_path: Path) -> Path:
    """A directory with checkpoints of a run at (2, 1)."""
    world(3).run(_saved, (2, 1), str(tmp_path))
    return tmp_path


def test_a_checkpoint_is_one_file_with_the_unsharded_names_and_shapes(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == ["full.ckpt", "weights.ckpt"]
    assert all(p.is_file() for p in saved.iterdir())
    full = torch.load(saved / "full.ckpt", weights_only=True)
    plain = build(TINY, 0)
    assert {n: t.shape for n, t in full["state_dict"].items()} == {
        f"model.{n}": t.shape for n, t in plain.state_dict().items()
    }
    (optimizer,) = full["optimizer_states"]
    names = [n for n, _ in plain.named_parameters()]
    shapes = {n: p.shape for n, p in plain.named_parameters()}
    assert optimizer["param_groups"][0]["params"] == list(range(len(names)))
    for number, state in optimizer["state"].items():
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == shapes[names[number]]
        assert state["step"].dim() == 0 and float(state["step"]) == 3


def test_tied_weights_are_stored_once(saved: Path) -> None:
    state = torch.load(saved / "full.ckpt", weights_only=True)["state_dict"]
    embedding, head = state["model.tok_embeddings.weight"], state["model.lm_head.weight"]
    assert embedding.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()


def test_weights_only_leaves_the_training_state_out(saved: Path) -> None:
    full = torch.load(saved / "full.ckpt", weights_only=True)
    weights = torch.load(saved / "weights.ckpt", weights_only=True)
    assert not {"optimizer_states", "lr_schedulers", "callbacks"} & weights.keys()
    assert_same(weights["state_dict"], full["state_dict"], 0.0)


def _outputs(degrees: tuple[int, ...], path: str) -> list[Tensor]:
    class_ = Scheduled.load_from_checkpoint(path, map_location="cpu")
    class_.predict_step = lambda batch, batch_idx: class_.model(batch[0][:, :-1])  # type: ignore[method-assign]
    return make_trainer(degrees).predict(class_, DataLoader(torch.utils.data.TensorDataset(tokens()), batch_size=12))


def test_load_from_checkpoint_on_one_device_gives_the_same_outputs(world: Worlds, saved: Path) -> None:
    module = Scheduled.load_from_checkpoint(saved / "full.ckpt", map_location="cpu")
    assert module.hparams["seed"] == 1
    module.double().eval()
    with torch.no_grad():
        alone = module.model(tokens()[:, :-1])
    for outputs in world(2).run(_outputs, (2,), str(saved / "full.ckpt")):
        (sharded,) = outputs
        assert_same(sharded, alone)


class Validated(Regression):
    """Regression with a validation and a test loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def _best(degrees: Degrees, directory: str) -> Any:
    """Learning rate far too high from the second epoch on: the first checkpoint is the best."""
    module = Validated(lr=0.05)
    keep = ModelCheckpoint(directory, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = make_trainer(degrees, max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    module.on_train_epoch_end = lambda: _burn(module)  # type: ignore[method-assign]
    trainer.fit(module, loader(degrees, 8), loader(degrees, 8))
    name, score, last = os.path.basename(keep.best_model_path), float(keep.best_model_score), keep.last_model_path
    (best,) = trainer.test(module, loader(degrees, 8), ckpt_path="best", verbose=False)
    (after,) = trainer.test(module, loader(degrees, 8), ckpt_path=last, verbose=False)
    return name, score, best["test_loss"], after["test_loss"]


def _burn(module: LightningModule) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["lr"] = 2.0


def test_the_best_and_the_last_checkpoint_are_tested_after_fit_with_the_cut_model(
    world: Worlds, tmp_path: Path
) -> None:
    truth = _best(None, str(tmp_path / "truth"))
    for side in world(3).run(_best, (2, 1), str(tmp_path / "world")):
        assert_same(side, truth)
    assert truth[1] == truth[2] < truth[3], "the best and the last must differ"
    names = {p.name for p in (tmp_path / "world").iterdir()}
    assert names == {p.name for p in (tmp_path / "truth").iterdir()}


def _twice(degrees: Degrees) -> Any:
    module, end = Regression(), EndState()
    make_trainer(degrees).fit(module, loader(degrees, 8))
    make_trainer(degrees, callbacks=[end]).fit(module, loader(degrees, 8))
    return end.parameters


def test_a_second_fit_goes_on_from_the_cut_weights(world: Worlds) -> None:
    assert_same(world(3).run(_twice, (2, 1))[0], _twice(None))


def _refit_same_trainer(degrees: Degrees) -> Any:
    module, end = Regression(), EndState()
    trainer = make_trainer(degrees, callbacks=[end])
    trainer.fit(module, loader(degrees, 8))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(degrees, 8))
    return end.parameters


def test_the_same_trainer_can_fit_again(world: Worlds) -> None:
    assert_same(world(3).run(_refit_same_trainer, (2, 1))[0], _refit_same_trainer(None))


def _wrong_shape(path: str) -> None:
    module = Regression()
    trainer = make_trainer((2,), max_steps=1)
    trainer.fit(module, loader((2,), 4))
    trainer.test(_reloaded(module), loader((2,), 4), ckpt_path=path)


def _reloaded(module: Regression) -> Regression:
    module.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    return module


def test_a_checkpoint_of_another_shape_is_refused_by_the_parameters_name(world: Worlds, tmp_path: Path) -> None:
    module = Regression()
    module.net.mlp.up_proj = nn.Linear(6, 9)
    path = tmp_path / "other.ckpt"
    trainer = make_trainer(None, max_steps=0)
    trainer.fit(module, loader(None, 4))
    trainer.save_checkpoint(path)
    for outcome in world(2).start(_wrong_shape, str(path)).wait():
        assert outcome.state == "raised" and "'net.mlp.up_proj.weight' with shape (9, 6)" in outcome.error


class _Wide(LightningModule):
    """Sixteen matrices of 2 MB, cut in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(512, 1024), "down": nn.Linear(1024, 512)}) for _ in range(8)
        )

    def configure_tp_plan(self) -> dict[str, Any]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].float().repeat(1, 86)[:, :512]
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def _peak(what: Literal["weights", "optimizer"]) -> tuple[float, float]:
    """MB that gathering adds to this rank's memory at most, and MB of what is gathered."""
    module, found = _Wide(), []

    def measure() -> None:
        strategy: Any = module.trainer.strategy
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _memory("VmRSS")
        (optimizer,) = module.trainer.optimizers
        state = strategy.lightning_module_state_dict() if what == "weights" else strategy.optimizer_state(optimizer)
        found.append((_memory("VmHWM") - before, _size(state)))

    module.on_train_end = measure  # type: ignore[method-assign]
    # a verification leaves memory with the allocator, which gathering would use again
    make_trainer((2,), {"verify": False}, max_steps=1, precision="32-true").fit(
        module, DataLoader(rows(2), batch_size=2)
    )
    return found[0]


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def _size(state: Any) -> float:
    if isinstance(state, dict):
        return sum(_size(v) for v in state.values())
    return state.numel() * state.element_size() / 2**20 if isinstance(state, Tensor) else 0.0


@pytest.mark.parametrize("what", ["weights", "optimizer"])
def test_gathering_adds_one_full_copy_on_rank_zero_and_nothing_elsewhere(world: Worlds, what: str) -> None:
    (added, full), (elsewhere, nothing) = world(2, fresh=True).run(_peak, what)
    assert full > (31 if what == "weights" else 62) and nothing == 0
    # Beside the copy there are one tensor in pieces on its way and what the allocator keeps.
    assert 0.9 * full < added < 1.2 * full
    assert elsewhere < 0.2 * full
