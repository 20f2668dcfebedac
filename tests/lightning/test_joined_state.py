"""A newcomer that has taken over its peer's state is equal to it, and goes on as it does.

One process plays both, one after the other: the giver trains into its second epoch, and what it has captured there is
installed in a trainer that stands before its first batch.
"""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryPrecision, BinaryRecall

from lightning_ntp.lightning import private_loops
from lightning_ntp.lightning.arrivals.joined_state import Joined, JoinedState
from lightning_ntp.lightning.arrivals.rebinding import OBJECTS, Carrier, References, _Pickler
from lightning_ntp.lightning.arrivals.state_schema import CannotJoin
from lightning_ntp.lightning.metric_states import metric_states
from lightning_ntp.lightning.rank_zero import remember_rows, remembered_rows
from lightning_ntp.lightning.steps.attribute_copies import COPIED_BYTES
from lightning_ntp.lightning.steps.buffer_copies import SMALL_BYTES, BufferRecorder
from lightning_ntp.lightning.steps.deferred_rows import DeferredRows
from tests.lightning.rigs import EndState, Regression, Worlds, assert_same, loader, make_trainer
from tests.lightning.rigs import Net as RigsNet

BATCHES, EPOCHS = 4, 3
JOINS = (1, 2)
"""Epoch and batch at which the newcomer joins."""
CPU = torch.device("cpu")


class Distributed(SingleDeviceStrategy):
    """One rank, of which Lightning thinks that there are more."""

    is_distributed = True

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        remember_rows(trainer)


class Memory(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    name, version = "memory", 0  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Net(LightningModule):
    """Its batches are told by the loops' progress, as if every loader were in position."""

    def __init__(self, gain: float = 0.1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 1)
        self.norm, self.dropout = nn.BatchNorm1d(3), nn.Dropout(0.2)
        self.frozen = nn.Parameter(torch.ones(2))
        self.error, self.ranks = MeanSquaredError(), BinaryAUROC()
        self.scores = MetricCollection([BinaryPrecision(), BinaryRecall()])
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.slot = -1
        self.gain, self.steps_seen, self.names = gain, 0, ["a"]
        self.outputs: list[Any] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.counted: Counter[str] = Counter()
        self.trace = torch.zeros(2)
        self.lock = threading.Lock()

    ntp_own_attributes = ("slot",)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        epoch, number = self.trainer.current_epoch, self.trainer.fit_loop.batch_idx
        x = torch.linspace(-1, 1, 12).view(4, 3) * (1 + epoch + number / 7)
        output = self.layer(self.dropout(self.norm(x))).squeeze(-1)
        target = x.sum(-1) * self.gain + random.random() + float(np.random.rand())
        loss = (output - target).square().mean() + 0 * self.frozen.sum()
        probability, truth = output.sigmoid().detach(), (x.sum(-1) > 0).long()
        self.error(output.detach(), target)
        self.ranks.update(probability, truth)
        self.scores.update(probability, truth)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=4)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True, batch_size=4)
        self.log("own", loss, on_step=False, on_epoch=True, batch_size=4)
        self.log("error", self.error, on_step=True, on_epoch=True)
        if number == 0:
            self.log("first", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=4)
        self.steps_seen += 1
        self.outputs.append({"loss": loss.detach(), "number": number})
        self.recent.append(number)
        self.counted.update(f"epoch {epoch}")
        self.trace[0] += 1
        self.table += 1
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("auroc", self.ranks.compute())
        self.log_dict(self.scores.compute())
        self.ranks.reset()
        self.scores.reset()
        self.outputs.clear()

    def on_train_epoch_start(self) -> None:
        self.frozen.requires_grad_(self.trainer.current_epoch == 0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.steps_seen % 3) + self.layer.weight.abs().sum(), batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Users(Callback):
    """What people write: counters, references to the trainer's things, and something that cannot be pickled."""

    def __init__(self) -> None:
        self.count, self.seen = 0, {"batches": [0]}
        self.same = self.seen["batches"]
        self.lock, self.choose = threading.Lock(), lambda x: x
        self.average: dict[Tensor, dict[str, Tensor]] = {}
        self.big = torch.zeros(1)
        self.best: Tensor | None = None
        self.trainer: Trainer | None = None
        self.parts: list[Any] = []
        self.slot = -1
        self.on_train_end = lambda *args: None  # as if it was patched

    ntp_own_attributes = ("slot",)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.trainer = trainer
        self.average.update({p: {"average": p.detach().clone()} for p in pl_module.parameters()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.count += 1
        self.seen["batches"].append(self.count)
        self.best = outputs["loss"]
        self.parts = [pl_module.layer, pl_module.layer.weight, trainer.optimizers[0], trainer.train_dataloader]


class Stateful(Callback):
    """What it keeps cannot be pickled, but it has a state dict."""

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {"lock": threading.Lock(), "count": 0}

    def on_train_batch_end(self, *args: Any) -> None:
        self.inner["count"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.inner["count"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner["count"] = state_dict["count"]


class Snapshots(Callback):
    """Knows what of it has to be remembered."""

    def __init__(self) -> None:
        self.kept = [threading.Lock(), 0]

    def on_train_batch_end(self, *args: Any) -> None:
        self.kept[1] += 1  # type: ignore[operator]

    def ntp_snapshot(self) -> Any:
        return self.kept[1]

    def ntp_restore(self, state: Any) -> None:
        self.kept[1] = state


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.served, self.epochs = 0, [0]

    def train_dataloader(self) -> Any:
        self.served += 1
        return DataLoader(TensorDataset(torch.zeros(BATCHES, 1)))

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(2, 1)))

    def state_dict(self) -> dict[str, Any]:
        return {"place": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Acts(Callback):
    """Does something once, at the start of a batch."""

    ntp_own_attributes = ("at", "act")

    def __init__(self, at: tuple[int, int], act: Callable[[Trainer], Any]) -> None:
        self.at: tuple[int, int] | None = at
        self.act = act

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if (trainer.current_epoch, trainer.fit_loop.batch_idx) == self.at:
            self.at = None
            self.act(trainer)


class Stop(RuntimeError):
    pass


def stop(trainer: Trainer) -> None:
    raise Stop


def carried(trainer: Trainer, rows: DeferredRows | None = None) -> JoinedState:
    return JoinedState(trainer, CPU, [callback(trainer, Users).average], rows)


def callback(trainer: Trainer, kind: type[Any]) -> Any:
    return next(each for each in trainer.callbacks if isinstance(each, kind))  # type: ignore[attr-defined]


def trained(
    path: Path, at: tuple[int, int], act: Callable[[Trainer], Any], more: tuple[Callback, ...] = (), **kwargs: Any
) -> Trainer:
    """Train, and do something at the start of a batch."""
    callbacks = [
        EarlyStopping("val", patience=20),
        LearningRateMonitor("step"),
        Users(),
        Stateful(),
        Snapshots(),
        *more,
        Acts(at, act),
        ModelCheckpoint(path, monitor="val", save_top_k=2, enable_version_counter=False, every_n_train_steps=3),
    ]
    trainer = Trainer(
        accelerator="cpu",
        strategy=Distributed(CPU),
        logger=Memory(),
        callbacks=callbacks,
        max_epochs=EPOCHS,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        val_check_interval=2,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        gradient_clip_val=1.0,
    )
    try:
        trainer.fit(kwargs.get("module") or Net(), datamodule=Data())
    except Stop:
        pass
    return trainer


def tensors_of(trainer: Trainer) -> list[Tensor]:
    """What travels as shards: parameters, and state of their shape."""
    states = [trainer.optimizers[0].state, callback(trainer, Users).average]
    found: list[Tensor] = [p.data for p in trainer.lightning_module.parameters()]
    for state in states:
        for p in trainer.lightning_module.parameters():
            found += [v for v in state.get(p, {}).values() if isinstance(v, Tensor) and v.shape == p.shape]
    return found


def observed(trainer: Trainer) -> dict[str, Any]:
    """Everything that is to be equal, copied."""
    module, names = trainer.lightning_module, dict(trainer.lightning_module.named_parameters())
    assert isinstance(module, Net)
    states, others = metric_states(module)
    orders, entries = private_loops.logged_entries(trainer)
    for entry in entries.values():
        if not entry["is_tensor"]:
            del entry["values"]["value"]  # the metric itself
    users, stops, saves = (callback(trainer, kind) for kind in (Users, EarlyStopping, ModelCheckpoint))
    optimizer, data = trainer.optimizers[0], trainer.datamodule  # type: ignore[attr-defined]
    found = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "loops": private_loops.where_loops_are(trainer),
        "stopping": (trainer.should_stop, trainer.accumulate_grad_batches),
        "steps": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx),
        "logged": (orders, entries),
        "shown": private_loops.logged_values(trainer),
        "metrics": states,
        "compute groups": others["scores._groups"],
        "attributes": (module.steps_seen, module.outputs, module.recent, module.counted, module.trace, module.names),
        "buffers": dict(module.named_buffers()),
        "flags": {name: p.requires_grad for name, p in names.items()},
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "numbers": {n: optimizer.state[p]["step"] for n, p in names.items() if "step" in optimizer.state.get(p, {})},
        "rows": remembered_rows(trainer),
        "early stopping": {k: v for k, v in vars(stops).items() if not callable(v)},
        "checkpoints": {k: v for k, v in vars(saves).items() if k != "_fs" and not callable(v)},
        "the user's callback": (users.count, users.seen, users.best),
        "a callback's state dict": callback(trainer, Stateful).inner["count"],
        "ntp_snapshot": callback(trainer, Snapshots).kept[1],
        "rates": callback(trainer, LearningRateMonitor).lrs,
        "datamodule": data.epochs,
    }
    return copy.deepcopy(found)


def same(a: Any, b: Any) -> bool:
    """Equal, tensors and arrays by their bits."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        alike = isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dataclass_fields__"):
        return same(vars(a), vars(b))
    return bool(a == b)


class Giver:
    """What a giver has at the moment of the join, and how it goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.trainer = trained(path, JOINS, self.capture)
        self.at_end = observed(self.trainer)
        self.weights = [t.clone() for t in tensors_of(self.trainer)]

    def capture(self, trainer: Trainer) -> None:
        trainer.datamodule.epochs.append(5)  # type: ignore[attr-defined]
        trainer.accumulate_grad_batches = 1
        callback(trainer, Users).slot = trainer.lightning_module.slot = 3
        self.observed = observed(trainer)
        self.schema, self.content = carried(trainer).schema(), carried(trainer).capture()
        self.shards = [t.clone() for t in tensors_of(trainer)]
        self.logged = len(trainer.logger.rows)  # type: ignore[union-attr]
        assert same(observed(trainer), self.observed), "capturing leaves no trace"


class Newcomer:
    """Joins where the giver was."""

    def __init__(self, giver: Giver, fresh_replica: bool = False, goes_on: bool = False) -> None:
        self.giver, self.fresh, self.goes_on = giver, fresh_replica, goes_on
        self.joined: Joined | None = None
        torch.manual_seed(2)
        random.seed(2)
        np.random.seed(2)
        self.trainer = trained(giver.path, (0, 0), self.join)

    def join(self, trainer: Trainer) -> None:
        self.before = observed(trainer)
        self.held = (trainer.lightning_module.outputs, callback(trainer, Users).seen)
        state = carried(trainer)
        state.make_states(self.giver.schema)
        room = tensors_of(trainer)
        assert [t.shape for t in room] == [t.shape for t in self.giver.shards]
        for own, shard in zip(room, self.giver.shards, strict=True):
            own.copy_(shard)
        self.joined = state.install(self.giver.content, fresh_replica=self.fresh)
        self.after = observed(trainer)
        if not self.goes_on:
            raise Stop


@pytest.fixture(scope="module")
def giver(tmp_path_factory: pytest.TempPathFactory) -> Giver:
    return Giver(tmp_path_factory.mktemp("giver"))


@pytest.fixture(scope="module")
def newcomer(giver: Giver) -> Newcomer:
    return Newcomer(giver)


SAME_FROM_THE_START = {"stopping"}


def test_everything_observed_differs_before_and_is_equal_after(giver: Giver, newcomer: Newcomer) -> None:
    equal = [k for k in giver.observed if same(newcomer.before[k], giver.observed[k])]
    assert set(equal) == SAME_FROM_THE_START, "else this test could not fail"
    differing = [k for k in giver.observed if not same(newcomer.after[k], giver.observed[k])]
    assert not differing
    assert newcomer.after["steps"] == (6, 1, 6)
    assert set(newcomer.after["numbers"]) == {n for n, _ in Net().named_parameters()}


def test_the_newcomer_goes_on_as_the_giver_does(giver: Giver) -> None:
    newcomer = Newcomer(giver, goes_on=True)
    for own, shard in zip(tensors_of(newcomer.trainer), giver.weights, strict=True):
        assert torch.equal(own, shard)
    at_end = observed(newcomer.trainer)
    for loops in (at_end["loops"], giver.at_end["loops"]):
        loops["trainer"].pop("_last_val_time")  # when the last validation was
    assert [k for k in at_end if not same(at_end[k], giver.at_end[k])] == []
    rows, whole = newcomer.trainer.logger.rows, giver.trainer.logger.rows  # type: ignore[union-attr]
    assert same(rows[-6:], whole[-6:]) and len(whole) - giver.logged > 6
    joined_rows = [row for row in rows if row[0] is not None and row[0] >= 6]
    assert same(joined_rows, [row for row in whole[giver.logged :] if row[0] >= 6])


def test_references_become_the_newcomers_own(giver: Giver, newcomer: Newcomer) -> None:
    trainer, users = newcomer.trainer, callback(newcomer.trainer, Users)
    module = trainer.lightning_module
    assert users.trainer is trainer and users.slot == module.slot == -1, "its own, which is 3 on the giver"
    assert users.parts[:3] == [module.layer, module.layer.weight, trainer.optimizers[0]]
    assert users.parts[1] is module.layer.weight and users.parts[3] is trainer.train_dataloader
    assert users.average.keys() == set(module.parameters())
    outputs, seen = newcomer.held
    assert module.outputs is outputs and users.seen is seen, "containers stay the same objects"
    results = private_loops._results(trainer)["training"]
    assert len(results) > 4
    for metric in results.values():
        assert metric.meta.sync.fn == trainer.strategy.reduce != giver.trainer.strategy.reduce
    assert results["training_step.error"].value is module.error


def scores_of(module: Net) -> list[Any]:
    # asking the collection for them would end the sharing
    return [module.get_submodule(f"scores.{name}") for name in ("BinaryPrecision", "BinaryRecall")]


def test_shared_states_of_a_compute_group_stay_shared(newcomer: Newcomer) -> None:
    module = newcomer.trainer.lightning_module
    assert isinstance(module, Net)
    precision, recall = scores_of(module)
    assert list(module.scores.compute_groups.values()) == [["BinaryPrecision", "BinaryRecall"]]
    assert precision.tp is recall.tp and int(precision.tp + precision.fp + precision.tn + precision.fn) == 8


def test_what_cannot_be_pickled_is_named_and_stays(newcomer: Newcomer) -> None:
    assert newcomer.joined is not None
    named = {text.split(" (")[0] for text in newcomer.joined.skipped}
    assert {"Users.lock", "Users.choose", "Stateful.inner", "Snapshots.kept"} == named
    assert any("lock" in text and "pickle" in text for text in newcomer.joined.skipped)
    assert callback(newcomer.trainer, Users).choose(3) == 3
    assert newcomer.trainer.datamodule.loaded == {"place": 7}  # type: ignore[attr-defined]


def test_a_fresh_replica_begins_its_sums_at_zero(giver: Giver) -> None:
    trainer = Newcomer(giver, fresh_replica=True).trainer
    module = trainer.lightning_module
    assert isinstance(module, Net)
    precision, recall = scores_of(module)
    for metric in (module.error, module.ranks, recall):
        assert metric.update_count == 0
    assert float(module.error.total) == 0.0 and module.ranks.preds == []
    assert precision.tp is recall.tp and int(recall.tp + recall.tn) == 0
    there = giver.observed["logged"][1]
    results = private_loops._results(trainer)["training"]
    loss, largest, own, first = (results[f"training_step.{name}"] for name in ("loss", "largest", "own", "first"))
    assert float(loss.value) == 0.0 and int(loss.cumulated_batch_size) == 0
    assert float(largest.value) == -float("inf")
    assert same(loss._forward_cache, there["training training_step.loss"]["values"]["_forward_cache"])
    # nobody else counts what is not reduced
    assert same(own.value, there["training training_step.own"]["values"]["value"])
    # or this replica would not take part in the sum of what is logged in the first batch only
    assert float(first.value) == 0.0 and not first.has_reset


# ---- parts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def carrier(newcomer: Newcomer) -> Iterator[Carrier]:
    yield Carrier(References(newcomer.trainer), CPU)


def test_large_attributes_are_left_out_and_named(carrier: Carrier) -> None:
    items = {
        "tensor": torch.zeros(COPIED_BYTES + 1, dtype=torch.uint8),
        "text": "x" * (COPIED_BYTES + 1),
        "small": [torch.ones(3), "a"],
        "texts": [f"{n:300}" for n in range(COPIED_BYTES // 300)],
        "numbers": list(range(OBJECTS)),
    }
    packed = carrier.pack_items("Users", items)
    assert set(packed.each) == {"small"}
    named = [f"Users.{name} (larger than 16 MiB)" for name in ("tensor", "text", "texts")]
    assert carrier.skipped == [*named, "Users.numbers (more than 1000000 objects)"]
    assert same(carrier.unpack_items("Users", packed), {"small": items["small"]})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).t(),
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, dtype=torch.float8_e4m3fn),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}",
)
def test_tensors_of_all_kinds_come_through(carrier: Carrier, tensor: Tensor) -> None:
    copied = carrier.unpack(carrier.pack([tensor, tensor]))
    assert copied[0] is copied[1] and copied[0] is not tensor
    assert (copied[0].dtype, copied[0].shape) == (tensor.dtype, tensor.shape)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    assert torch.equal(copied[0].to(wide).nan_to_num(7), tensor.to(wide).nan_to_num(7))


def test_what_is_on_the_writers_device_comes_to_the_readers(
    newcomer: Newcomer, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = References(newcomer.trainer)
    writer, reader = (Carrier(references, torch.device("cuda", number)) for number in (3, 1))
    devices = [torch.device("cuda", 3), CPU]
    assert reader.unpack(writer.pack(devices)) == [torch.device("cuda", 1), CPU]
    assert reader.unpack(writer.pack(torch.ones(2))).device == CPU
    # as if it was on an accelerator, and the reader's was "meta", which any machine has
    monkeypatch.setattr(_Pickler, "_is_own", lambda self, device: True)
    packed = writer.pack([torch.ones(2), nn.Parameter(torch.ones(2))])
    read = Carrier(references, torch.device("meta")).unpack(packed)
    assert all(t.is_meta for t in read) and isinstance(read[1], nn.Parameter)


def test_leaves_keep_their_flag_and_graphs_are_left_behind(carrier: Carrier) -> None:
    leaf = nn.Parameter(torch.ones(2))
    weight, loss = carrier.unpack(carrier.pack([leaf, leaf.sum()]))
    assert isinstance(weight, nn.Parameter) and weight.requires_grad
    assert not loss.requires_grad and float(loss) == 2.0


def test_in_plain_values_there_are_no_objects(carrier: Carrier) -> None:
    items = {"plain": {"a": [1, (2.0, np.float32(3)), Counter("aab"), deque([1])]}, "object": [Stop("x")]}
    packed = carrier.pack_items("Net", items, plain=True)
    assert set(packed.each) == {"plain"} and carrier.skipped == ["Net.object (there is a Stop in it)"]  # type: ignore[arg-type]
    assert same(carrier.unpack_items("Net", packed)["plain"], items["plain"])


def test_what_is_not_there_is_named(carrier: Carrier, giver: Giver) -> None:
    theirs = Carrier(References(giver.trainer, {("rows", 9): giver}), CPU)
    packed = theirs.pack_items(
        "Users", {"rows": giver, "layer": giver.trainer.lightning_module.layer, "l": threading.Lock()}
    )
    values = carrier.unpack_items("Users", packed)
    assert values.keys() == {"layer"} and carrier.skipped == ["Users.rows (there is no rows 9 here)"]


def at_first_batch(path: Path, act: Callable[[Trainer], Any], **kwargs: Any) -> None:
    def once(trainer: Trainer) -> None:
        act(trainer)
        raise Stop

    seen = []
    trained(path, (0, 0), lambda trainer: (seen.append(1), once(trainer)), **kwargs)
    assert seen, "the fit got there"


class Another(Callback):
    pass


class Other(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"more": (Another(),)}, "the callbacks of this rank are not those.*number 5 is Another here and Acts there"),
        ({"module": Wider()}, "the modules of this rank .*Wider here and Net there"),
    ],
)
def test_another_trainer_is_refused_with_the_difference(
    giver: Giver, tmp_path: Path, kwargs: dict[str, Any], why: str
) -> None:
    def join(trainer: Trainer) -> None:
        before = observed(trainer)
        with pytest.raises(CannotJoin, match=why):
            carried(trainer).install(giver.content)
        with pytest.raises(CannotJoin, match=why):
            carried(trainer).make_states(giver.schema)
        assert same(observed(trainer), before)

    if "module" in kwargs:
        kwargs = {"module": Wider()}
    at_first_batch(tmp_path, join, **kwargs)


def test_registered_state_is_made_right_where_it_can_be(giver: Giver, tmp_path: Path) -> None:
    def join(trainer: Trainer) -> None:
        average = callback(trainer, Users).average
        weight, bias = trainer.lightning_module.layer.weight, trainer.lightning_module.layer.bias
        kept = average[bias]["average"]
        del average[weight]
        average[bias]["more"] = torch.zeros(1)
        carried(trainer).make_states(giver.schema)
        assert average[weight]["average"].shape == weight.shape and list(average[bias]) == ["average"]
        assert average[bias]["average"] is kept
        state = trainer.optimizers[0].state[weight]
        assert state["exp_avg"].shape == weight.shape and float(state["step"]) == 6.0
        assert state["step"].device == CPU and not state["exp_avg"].requires_grad

    at_first_batch(tmp_path, join)


def test_registered_state_that_cannot_be_changed_is_refused(giver: Giver, tmp_path: Path) -> None:
    fixed = type("dict", (dict,), {"__delitem__": None})

    def join(trainer: Trainer) -> None:
        average = fixed(callback(trainer, Users).average)
        average[torch.zeros(1)] = {}
        state = JoinedState(trainer, CPU, [average])
        with pytest.raises(CannotJoin, match=r"registered state 0 has other parameters.*NoneType.*: make it"):
            state.make_states(giver.schema)

    at_first_batch(tmp_path, join)


def test_numbers_without_shards_are_refused(giver: Giver, tmp_path: Path) -> None:
    def join(trainer: Trainer) -> None:
        with pytest.raises(CannotJoin, match="optimizer 0 .Adam. has state of 'frozen' .* and none here"):
            carried(trainer).install(giver.content)

    at_first_batch(tmp_path, join)


def test_a_buffer_that_a_layout_makes_stays_and_constant_ones_are_not_carried(tmp_path: Path) -> None:
    captured: list[bytes] = []

    def capture(trainer: Trainer) -> None:
        module = trainer.lightning_module
        module.table.fill_(5)
        module.norm.running_mean.fill_(5)
        module.norm.running_var = torch.full((4,), 5.0)
        captured.append(carried(trainer).capture(constant={"norm.running_mean"}))
        captured.append(carried(trainer).capture())

    def install(trainer: Trainer) -> None:
        state = carried(trainer)
        joined = state.install(captured[0])
        module = trainer.lightning_module
        assert [t.tolist() for t in (module.table, module.norm.running_mean)] == [[5, 5], [0, 0, 0]]
        assert module.norm.running_var.shape == (3,)
        assert "buffers.norm.running_var (of shape (4,) there and (3,) here)" in joined.skipped
        state.install(captured[1])
        assert module.norm.running_mean.tolist() == [5, 5, 5]
        # its own steps have not changed it, but another rank's have
        theirs = pickle.loads(state.capture(constant={"norm.running_mean"}))
        assert theirs["constant"] == frozenset()

    at_first_batch(tmp_path, capture)
    at_first_batch(tmp_path, install)


def test_parameters_that_were_unfrozen_meanwhile_come_into_their_groups(tmp_path: Path) -> None:
    captured: list[bytes] = []

    def regroup(trainer: Trainer) -> None:
        module, optimizer = trainer.lightning_module, trainer.optimizers[0]
        optimizer.param_groups[0]["params"].remove(module.frozen)
        optimizer.add_param_group({"params": [module.frozen], "lr": 0.5})
        optimizer.param_groups[0]["betas"] = (0.1, 0.2)
        captured.append(carried(trainer).capture())

    def install(trainer: Trainer) -> None:
        optimizer = trainer.optimizers[0]
        first = optimizer.param_groups[0]
        carried(trainer).install(captured[0])
        assert optimizer.param_groups[0] is first and first["betas"] == (0.1, 0.2)
        assert len(first["params"]) == 4 and optimizer.param_groups[1]["params"] == [trainer.lightning_module.frozen]
        assert optimizer.param_groups[1]["lr"] == 0.5

    at_first_batch(tmp_path, regroup)
    at_first_batch(tmp_path, install)


class Refuses(Callback):
    def ntp_snapshot(self) -> Any:
        raise Stop("not now")


def test_a_giver_goes_on_whatever_its_callbacks_raise(tmp_path: Path) -> None:
    captured: list[bytes] = []
    at_first_batch(tmp_path, lambda trainer: captured.append(carried(trainer).capture()), more=(Refuses(),))
    joined: list[Joined] = []
    at_first_batch(tmp_path, lambda trainer: joined.append(carried(trainer).install(captured[0])), more=(Refuses(),))
    assert "callback 5.ntp_snapshot() (not now)" in joined[0].skipped


def test_large_buffers_that_no_step_has_changed_are_constant() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.ones(SMALL_BYTES))
    module.register_buffer("bank", torch.ones(SMALL_BYTES))
    module.register_buffer("small", torch.ones(2))
    recorder = BufferRecorder()
    recorder.look_around(module)
    recorder.take()
    assert recorder.constant() == frozenset(), "nobody knows yet"
    module.bank += 1
    recorder.committed()
    recorder.take()
    assert recorder.constant() == {"mask"}
    module.mask = torch.zeros(SMALL_BYTES)
    assert recorder.constant() == frozenset()


def test_the_result_of_a_step_comes_detached(giver: Giver, tmp_path: Path) -> None:
    captured: list[bytes] = []
    w = torch.ones(2, requires_grad=True)

    def capture(trainer: Trainer) -> None:
        result = ClosureResult.from_training_step_output({"loss": w.sum(), "deep": [{"x": w * 2}], "n": 3})
        captured.append(carried(trainer).capture(result))
        odd = ClosureResult.from_training_step_output({"loss": w.sum(), "lock": threading.Lock(), "n": 3})
        captured.append(carried(trainer).capture(odd))
        captured.append(carried(trainer).capture(threading.Lock()))
        captured.append(carried(trainer).capture({"a": [w * 3], "f": lambda: 1}))

    def install(trainer: Trainer) -> None:
        joined = [carried(trainer).install(content) for content in captured]
        outputs = joined[0].result.asdict()
        assert set(outputs) == {"loss", "deep", "n"} and float(outputs["loss"]) == 2.0 and outputs["n"] == 3
        deep = outputs["deep"][0]["x"]
        assert deep.tolist() == [2, 2] and not deep.requires_grad and not joined[0].result.closure_loss.requires_grad
        assert set(joined[1].result.asdict()) == {"loss", "n"} and joined[2].result is None
        assert joined[3].result["a"][0].tolist() == [3, 3] and set(joined[3].result) == {"a"}
        named = ["the result of the step.lock", "the result of the step", "the result of the step.f"]
        for each, name in zip(joined[1:], named, strict=True):
            assert any(text.split(" (")[0] == name for text in each.skipped)

    at_first_batch(tmp_path, capture)
    at_first_batch(tmp_path, install)


def test_rows_that_wait_for_the_commit_go_to_the_newcomers_loggers(tmp_path: Path) -> None:
    captured: list[bytes] = []

    def holding(trainer: Trainer) -> DeferredRows:
        rows = DeferredRows()
        rows.install(trainer.loggers)
        rows.hold_while(lambda: True)
        return rows

    def capture(trainer: Trainer) -> None:
        rows = holding(trainer)
        trainer.loggers[0].log_metrics({"mine": 1.5}, step=4)
        captured.append(carried(trainer, rows).capture())
        rows.uninstall()

    def install(trainer: Trainer) -> None:
        rows = holding(trainer)
        carried(trainer, rows).install(captured[0])
        logged = trainer.loggers[0].rows  # type: ignore[attr-defined]
        assert (4, {"mine": 1.5}) not in logged
        rows.uninstall()
        assert logged[-1] == (4, {"mine": 1.5})

    at_first_batch(tmp_path, capture)
    at_first_batch(tmp_path, install)


def test_a_scaler_that_has_not_scaled_yet_gets_the_scale() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    p = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0)
    for _ in range(3):
        theirs.scale(p.sum()).backward()
        theirs.step(optimizer)
        theirs.update(8.0)
    ours = torch.amp.GradScaler("cpu")
    plugins = [MixedPrecision("16-mixed", "cpu", scaler) for scaler in (theirs, ours)]
    private_loops.put_scaler_state(plugins[1], private_loops.scaler_state(plugins[0]))
    assert ours.state_dict() == theirs.state_dict() and ours.get_scale() == 8.0
    # before any backward of its own: the newcomer skips that of the step in which it joins
    ours.unscale_(optimizer)


# ---- among ranks ----------------------------------------------------------------------------------------------------


class Dropping(Regression):
    def __init__(self) -> None:
        super().__init__(build=partial(RigsNet, 0.3))
        self.seen = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class TakesPeers(Callback):
    """In the middle of a step, every rank forgets what it knows and takes over the state of the other one."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        self.skipped: tuple[str, ...] = ()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.count += 1
        if trainer.global_step != self.at:
            return
        strategy: Any = trainer.strategy
        state = JoinedState(trainer, strategy.root_device, rows=strategy._survival.rows)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, (state.schema(), state.capture()), group=strategy.generation.world)
        schema, content = everyone[1 - strategy.generation.rank]
        torch.manual_seed(9)
        pl_module.seen = self.count = trainer.fit_loop.epoch_loop._batches_that_stepped = 99
        private_loops._results(trainer)["training"].clear()
        state.make_states(schema)  # finds room, and leaves what is in it
        self.skipped = state.install(content).skipped


def takes_peers(at: int) -> Any:
    end, takes, module = EndState(), TakesPeers(at), Dropping()
    trainer = make_trainer((2,), callbacks=[takes, end], log_every_n_steps=1)
    torch.manual_seed(4)
    trainer.fit(module, loader((2,), 12))
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return end.parameters, end.optimizers, metrics, module.seen, takes.count, takes.skipped


def test_tensor_parallel_peers_can_take_each_others_place(world: Worlds) -> None:
    whole, exchanged = (world(2).run(takes_peers, at)[0] for at in (-1, 3))
    assert exchanged[3] == 6 and exchanged[5] == ()
    assert_same(exchanged, whole, 0.0)
