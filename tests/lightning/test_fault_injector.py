"""Faults happen where and when they were asked for, once."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ntp.lightning.callbacks import fault_injector
from lightning_ntp.lightning.callbacks.fault_injector import Fault, FaultInjector, InjectedFault
from lightning_ntp.lightning.callbacks.fault_schedule import OTHER_PHASES, STEP_PHASES, draw_faults

LAYERS, STEPS = 4, 5


class Net(LightningModule):
    """Four layers, and a trace of what happens to them."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, groups: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(LAYERS))
        self.forwards = 0
        self.before: list[Tensor] = []
        self.optimizer, self.groups = optimizer, groups
        self.steps_seen: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.forwards = 0
        self.before = [layer.weight.detach().clone() for layer in self.layers]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps_seen.append(self.trainer.global_step)
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
            self.forwards += 1
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        size = LAYERS // self.groups
        return self.optimizer([{"params": parameters[k : k + size]} for k in range(0, LAYERS, size)], lr=0.1)

    def changed(self) -> int:
        """How many layers have another weight than before the step."""
        return sum(not torch.equal(a, b.weight) for a, b in zip(self.before, self.layers, strict=True))

    def gradients(self) -> int:
        return sum(layer.weight.grad is not None for layer in self.layers)


def fit(injector: FaultInjector, module: Net | None = None, strategy: Any = "auto", **settings: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[injector],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": STEPS, **settings},
    )
    trainer.fit(module or Net(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=1))
    return trainer


class Recorder:
    """In place of a fault: what the module looks like at that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Net) -> None:
        self.seen: list[tuple[str, int, int, int, int, int]] = []

        def happen(injector: FaultInjector, fault: Fault, step: int) -> None:
            self.seen.append(
                (fault.phase, step, module.trainer.global_step, module.forwards, module.gradients(), module.changed())
            )

        monkeypatch.setattr(FaultInjector, "_happen", happen)


WHERE = {  # steps counted, layers done, gradients there, parameters changed
    "forward": (2, 1, LAYERS, 0),  # the gradients are those of the step before
    "backward": (2, LAYERS, 2, 0),
    "sync": (2, LAYERS, LAYERS, 0),
    "vote": (2, LAYERS, LAYERS, 0),
    "between_vote_and_update": (2, LAYERS, LAYERS, 0),
    "update": (2, LAYERS, LAYERS, LAYERS // 2),
    "batch_end": (3, LAYERS, LAYERS, LAYERS),
}


@pytest.mark.parametrize("phase", WHERE)
def test_a_fault_happens_at_its_place_in_its_step(phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    recorder = Recorder(monkeypatch, module)
    fit(FaultInjector([Fault("kill", 0, 2, phase)]), module)
    assert recorder.seen == [(phase, 2, *WHERE[phase])]


def test_a_fault_while_data_is_loaded_comes_before_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    recorder = Recorder(monkeypatch, module)
    fit(FaultInjector([Fault("kill", 0, 2, "data")]), module)
    # `forwards` and `changed` are still those of the step before
    assert [(phase, step) for phase, step, *_ in recorder.seen] == [("data", 2)]
    assert len([s for s in module.steps_seen if s < 2]) == 2


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor, torch.optim.RMSprop])
def test_half_of_the_parameters_have_changed_whatever_the_optimizer(
    optimizer: Any, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Net(optimizer, groups)
    recorder = Recorder(monkeypatch, module)
    fit(FaultInjector([Fault("kill", 0, 1, "update"), Fault("stop", 0, 2, "between_vote_and_update")]), module)
    assert [(seen[0], seen[-1]) for seen in recorder.seen] == [("update", 2), ("between_vote_and_update", 0)]


@pytest.mark.parametrize("kind", ["slow", "kill"])
def test_an_interrupted_update_ends_as_any_other(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(faults: list[Fault]) -> list[Tensor]:
        torch.manual_seed(1)
        module = Net()
        trainer = fit(FaultInjector(faults), module)
        assert type(trainer.optimizers[0].param_groups) is list
        return [p.detach().clone() for p in module.parameters()]

    undisturbed = weights([])
    monkeypatch.setattr(FaultInjector, "_happen", lambda *_: None)
    disturbed = weights([Fault(kind, 0, 1, "update", steps=3), Fault(kind, 0, 2, "between_vote_and_update")])
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, disturbed, strict=True))


def test_every_phase_comes_in_the_order_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    recorder = Recorder(monkeypatch, module)
    fit(FaultInjector([Fault("slow", 0, 1, phase, steps=2) for phase in reversed(STEP_PHASES)]), module)
    assert [(s[0], s[1]) for s in recorder.seen] == [(phase, step) for step in (1, 2) for phase in STEP_PHASES]


def test_with_accumulation_steps_are_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    recorder = Recorder(monkeypatch, module)
    faults = [Fault("kill", 0, 1, phase) for phase in STEP_PHASES]
    fit(FaultInjector(faults), module, accumulate_grad_batches=2, max_steps=3)
    assert [(s[0], s[1]) for s in recorder.seen] == [(phase, 1) for phase in STEP_PHASES]
    assert module.steps_seen == [0, 0, 1, 1, 2, 2]


class Pointed(SingleDeviceStrategy):
    """Like our strategy, calls fault points inside sync and vote."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.fault_points: list[Callable[[str], None]] = []
        self.called: list[str] = []

    def call(self, phase: str) -> None:
        self.called.append(phase)
        for point in self.fault_points:
            point(phase)

    def post_backward(self, closure_loss: Tensor) -> None:
        self.call("sync")
        self.call("vote")


def test_the_strategy_says_when_it_syncs_and_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, strategy = Net(), Pointed()
    happened: list[tuple[str, int]] = []
    monkeypatch.setattr(FaultInjector, "_happen", lambda _, f, step: happened.append((f.phase, len(strategy.called))))
    fit(FaultInjector([Fault("kill", 0, 1, "sync"), Fault("kill", 0, 1, "vote")]), module, strategy)
    assert happened == [("sync", 3), ("vote", 4)]
    assert strategy.fault_points == [], "nothing is left behind"


def test_a_replayed_step_has_its_fault_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaying(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            def twice() -> Any:
                optimizer_closure()
                return optimizer_closure()

            super().optimizer_step(epoch, batch_idx, optimizer, twice)

    module = Replaying()
    recorder = Recorder(monkeypatch, module)
    faults = [Fault("kill", 0, 2, p) for p in ("forward", "backward", "sync")] + [
        Fault("slow", 0, 3, "forward", steps=1)
    ]
    fit(FaultInjector(faults), module)
    assert [(s[0], s[1]) for s in recorder.seen] == [("forward", 2), ("backward", 2), ("sync", 2), ("forward", 3)]


def test_only_the_slot_it_is_meant_for_has_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleDeviceStrategy, "global_rank", 1, raising=False)
    module = Net()
    recorder = Recorder(monkeypatch, module)

    class Two(SingleDeviceStrategy):
        def setup(self, trainer: Trainer) -> None:
            self.global_rank, self.world_size = 1, 2
            super().setup(trainer)

    injector = FaultInjector([Fault("kill", 0, 1), Fault("kill", 1, 2)])
    monkeypatch.setattr(injector, "setup", lambda t, m, stage: _as_slot(injector, t, 1, 2))
    fit(injector, module, Two(torch.device("cpu")))
    assert [(s[0], s[1]) for s in recorder.seen] == [("forward", 2)]


def _as_slot(injector: FaultInjector, trainer: Trainer, slot: int, slots: int) -> None:
    FaultInjector.setup(injector, trainer, trainer.lightning_module, "fit")
    injector._slot, injector._slots = slot, slots


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_faults_of_steps_before_a_checkpoint_do_not_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fit(FaultInjector(), max_steps=3)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    module = Net()
    recorder = Recorder(monkeypatch, module)
    resumed = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[FaultInjector([Fault("kill", 0, 1), Fault("kill", 0, 4)])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_steps=6,
    )
    resumed.fit(module, DataLoader(TensorDataset(torch.ones(8, 2))), ckpt_path=str(tmp_path / "three.ckpt"))
    assert [s[1] for s in recorder.seen] == [4]


# ---- outside of steps ------------------------------------------------------------------------------------------------


class Evaluated(Net):
    """With validation, test and predict; notes where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[str] = []

    def on_validation_start(self) -> None:
        self.trace.append("validation")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.trace.append(f"validated {batch_idx}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.trace.append("checkpoint")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.trace.append(f"tested {batch_idx}")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trace.append(f"predicted {batch_idx}")
        return batch[0]


PLACES = {  # steps counted, and what the module has noted last
    "sanity": (0, "validation"),
    "validation_batch": (2, "validation"),
    "validation_end": (2, "validated 1"),
    "checkpoint": (2, "validated 1"),
    "epoch_end": (2, "validated 1"),
    "fit_end": (4, "checkpoint"),
    "test": (4, "checkpoint"),
    "predict": (4, "tested 1"),
}


@pytest.mark.parametrize("phase", OTHER_PHASES)
def test_a_fault_outside_of_steps_happens_at_its_place(
    phase: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, happened = Evaluated(), []

    def happen(injector: FaultInjector, fault: Fault, step: int) -> None:
        happened.append((fault.phase, module.trainer.global_step, module.trace[-1]))

    monkeypatch.setattr(FaultInjector, "_happen", happen)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[FaultInjector([Fault("kill", 0, 0 if phase == "sanity" else 1, phase)])],
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        num_sanity_val_steps=1,
    )
    data = DataLoader(TensorDataset(torch.ones(2, 2)))
    trainer.fit(module, data, data)
    trainer.test(module, data)
    trainer.predict(module, data)
    assert happened == [(phase, *PLACES[phase])]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_what_a_fit_starts_at_says_nothing_about_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, happened = Evaluated(), []
    monkeypatch.setattr(FaultInjector, "_happen", lambda _, f, step: happened.append((f.phase, step)))
    fit(FaultInjector(), max_steps=3).save_checkpoint(tmp_path / "three.ckpt")
    faults = [Fault("kill", 0, 1, "epoch_end"), Fault("kill", 0, 1, "test")]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[FaultInjector(faults)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_steps=8,
    )
    data = DataLoader(TensorDataset(torch.ones(8, 2)))
    trainer.fit(module, data, ckpt_path=str(tmp_path / "three.ckpt"))
    trainer.test(module, data)
    assert happened == [("test", 8)]


# ---- kinds -----------------------------------------------------------------------------------------------------------


def test_raise_raises() -> None:
    with pytest.raises(InjectedFault, match="injected fault: raise, slot 0, step 1, backward"):
        fit(FaultInjector([Fault("raise", 0, 1, "backward")]))


def test_slow_sleeps_in_each_of_its_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    monkeypatch.setattr(fault_injector.time, "sleep", slept.append)
    fit(FaultInjector([Fault("slow", 0, 1, seconds=0.25, steps=3)]))
    assert slept == [0.25] * 3
    assert capsys.readouterr().err.count("fault injector: slot 0, step") == 3


FAULTS = (("kill", "backward"), ("stop", "update"), ("hang", "forward"))
SCRIPT = f"""
import os, time
from tests.lightning.test_fault_injector import Fault, FaultInjector, fit
children = []
for kind, phase in {FAULTS}:
    children.append(os.fork())
    if children[-1] == 0:
        fit(FaultInjector([Fault(kind, 0, 1, phase)]))
        os._exit(0)
print(*children, flush=True)
print(os.waitpid(children[0], 0)[1], flush=True)
input()
for child in children[1:]:
    os.kill(child, 9)
"""


def test_real_faults_in_real_processes() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        _, stopped, hung = map(int, process.stdout.readline().split())
        assert int(process.stdout.readline()) == signal.SIGKILL
        deadline = time.monotonic() + 60
        while (states := (_state(stopped), _state(hung))) != ("T", "S") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert states == ("T", "S")
        time.sleep(0.2)
        assert (_state(stopped), _state(hung)) == states, "they stay so"
        _, errors = process.communicate("\n", timeout=30)
    lines = sorted(line for line in errors.splitlines() if line.startswith("fault injector"))
    assert lines == sorted(f"fault injector: slot 0, step 1, {phase}: {kind}" for kind, phase in FAULTS)


def _state(pid: int) -> str:
    """The state letter of a process."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()


# ---- random faults ---------------------------------------------------------------------------------------------------


def test_random_faults_are_the_same_for_the_same_seed_and_have_the_mean_that_was_asked_for() -> None:
    def some(seed: int) -> list[Any]:
        return list(itertools.islice(draw_faults(20, seed, ("kill", "stop"), STEP_PHASES), 2000))

    assert some(3) == some(3) != some(4)
    drawn = some(3)
    assert drawn[-1].step / len(drawn) == pytest.approx(20, rel=0.1)  # standard error 20 / sqrt(2000) = 2.2 %
    assert Counter(d.kind for d in drawn)["kill"] == pytest.approx(1000, rel=0.15)
    assert {d.phase for d in drawn} == set(STEP_PHASES)
    slots = Counter(d.among(range(4), 1.0, 1).slot for d in drawn)
    assert set(slots) == {0, 1, 2, 3} and min(slots.values()) > 400


def _random_run(monkeypatch: pytest.MonkeyPatch, slot: int, **settings: Any) -> list[tuple[int, str]]:
    happened: list[tuple[int, str]] = []
    monkeypatch.setattr(FaultInjector, "_happen", lambda _, f, step: happened.append((step, f.phase)))
    monkeypatch.setattr(FaultInjector, "_others_live", lambda _: True)
    injector = FaultInjector(mtbf=0.5, seed=7, **settings)
    monkeypatch.setattr(injector, "setup", lambda t, m, stage: _as_slot(injector, t, slot, 2))
    fit(injector, max_steps=8)
    return happened


def test_random_faults_hit_every_slot_by_one_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"max_faults": 9, "phases": ["forward", "update"], "kinds": ["kill", "hang"]}
    zero, one = (_random_run(monkeypatch, slot, **settings) for slot in (0, 1))
    assert zero and one
    assert len(zero) + len(one) == 9
    drawn = itertools.islice(draw_faults(0.5, 7, ("kill", "hang"), ("forward", "update")), 9)
    assert sorted(zero + one) == sorted((d.step, d.phase) for d in drawn)


def test_the_last_slot_is_spared_by_random_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    recorder = Recorder(monkeypatch, module)
    fit(FaultInjector(mtbf=1, kinds=["kill"]), module)
    assert recorder.seen == []


def test_random_faults_leave_the_random_numbers_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(injector: FaultInjector) -> Tensor:
        torch.manual_seed(5)
        fit(injector, Net())
        return torch.rand(3)

    monkeypatch.setattr(FaultInjector, "_happen", lambda *_: None)
    assert torch.equal(drawn(FaultInjector()), drawn(FaultInjector(mtbf=1, kinds=["slow"])))


# ---- settings --------------------------------------------------------------------------------------------------------


def test_yaml_names_faults_as_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    config = tmp_path / "config.yaml"
    config.write_text(
        """
trainer:
  accelerator: cpu
  logger: false
  callbacks:
    - class_path: lightning_ntp.lightning.callbacks.fault_injector.FaultInjector
      init_args:
        faults:
          - {kind: kill, slot: 2, step: 100, phase: backward}
          - {kind: slow, slot: 0, step: 7, seconds: 0.5, steps: 10}
        mtbf: 500
        kinds: [kill, stop]
        max_faults: 3
"""
    )
    monkeypatch.setattr(sys, "argv", ["test"])
    made = LightningCLI(Net, args=[f"--config={config}", "--seed_everything=1"], run=False, save_config_callback=None)
    (injector,) = [c for c in made.trainer.callbacks if isinstance(c, FaultInjector)]
    assert injector.faults == (
        Fault("kill", 2, 100, "backward"),
        Fault("slow", 0, 7, "forward", seconds=0.5, steps=10),
    )
    assert (injector.mtbf, injector.kinds, injector.max_faults) == (500, ("kill", "stop"), 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"faults": [{"kind": "kill", "slot": 1}]}, r"faults\[0\]=.* is no fault: it needs kind, slot and step"),
        ({"faults": [{"kind": "kill", "slot": 1, "step": 2, "when": 3}]}, r"faults\[0\]=.* is no fault"),
        ({"faults": ["kill"]}, r"faults\[0\]='kill' is no fault"),
        ({"faults": [{"kind": "maim", "slot": 1, "step": 2}]}, "kind='maim' is none of kill, stop, hang, raise, slow"),
        (
            {"faults": [{"kind": "kill", "slot": 1, "step": 2, "phase": "dawn"}]},
            "phase='dawn' is none of data, forward",
        ),
        ({"faults": [{"kind": "kill", "slot": -1, "step": 2}]}, "slot=-1 of a fault must be an integer of at least 0"),
        ({"faults": [{"kind": "kill", "slot": 1, "step": 1.5}]}, "step=1.5 of a fault must be an integer"),
        ({"mtbf": math.nan}, "mtbf=nan must be a finite number above 0"),
        ({"mtbf": 0}, "mtbf=0 must be a finite number above 0"),
        ({"mtbf": True}, "mtbf=True must be"),
        ({"kinds": []}, r"kinds=\[\] must be a list with at least one of kill"),
        ({"kinds": "kill"}, "kinds='kill' must be a list"),
        ({"phases": ["dusk"]}, "an element of phases='dusk' is none of data"),
        ({"max_faults": -1}, "max_faults=-1 must be an integer of at least 0"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"seconds": math.inf}, "seconds=inf must be a finite number of at least 0"),
        ({"steps": 0}, "steps=0 of a fault must be an integer of at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FaultInjector(**settings)


def test_a_fault_for_a_slot_that_does_not_exist_is_refused_when_training_starts() -> None:
    with pytest.raises(ValueError, match=r"is for slot 3, but there are 1 slots"):
        fit(FaultInjector([Fault("kill", 3, 1)]))
