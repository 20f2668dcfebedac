"""A user's script whose ranks come back: ``python returning_script.py DIRECTORY HOW SLOT STEP WAITS PARTS``.

HOW is "popen", "spawn" or "cli"; SLOT is killed after STEP steps of the first fit, -1 for nobody; before the steps
WAITS (with commas, "-" for none) all ranks wait until everybody is back; PARTS is what the script does, of "fit",
"test", "predict", "again" (another fit, by another Trainer), "late" (whoever is started again comes too late for the
fit, and the others wait for that in the test) and "edited" (this file is changed before anybody is started again).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from lightning_ntp.callbacks import FaultInjector
from lightning_ntp.comm import runtime
from lightning_ntp.launch import RankIdentity, is_rank
from tests.lightning.rigs import slot
from tests.recovery.fates import WaitsForNewcomers
from tests.recovery.jobs import PER_REPLICA, Samples
from tests.recovery.returning_models import WaitsUntilRefused
from tests.recovery.whole_runs import Evaluated

DEGREES = (2, 2)


class Data(pl.LightningDataModule):
    def _loader(self, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(Samples(24), batch_size=PER_REPLICA, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(False)

    test_dataloader = predict_dataloader = val_dataloader


class WaitsInTest(Callback):
    """Until somebody is started again, and for a moment."""

    def on_test_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        directory, deadline = Path(trainer.default_root_dir), time.monotonic() + 60
        while batch_idx == 1 and not list(directory.glob("again-*")) and time.monotonic() < deadline:
            time.sleep(0.01)


class Edits(Callback):
    """Of the script, when the job runs."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and trainer.global_step == 0:
            with open(sys.argv[0], "a") as script:
                script.write("# edited\n")


def settings(directory: Path, victim: int, step: int, waits: list[int], parts: list[str]) -> dict[str, Any]:
    faults = [] if victim < 0 else [{"kind": "kill", "slot": victim, "step": step, "phase": "backward"}]
    return {
        "accelerator": "cpu",
        "devices": sum(DEGREES),
        "precision": "64-true",
        "max_epochs": 2,
        "val_check_interval": 3,
        "log_every_n_steps": 1,
        "default_root_dir": str(directory),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [
            FaultInjector(faults),
            WaitsForNewcomers(waits),
            ModelCheckpoint(directory / "saved", monitor="val_loss", save_last=True, save_top_k=2),
            EarlyStopping("val_loss", patience=50),
            *([WaitsInTest()] if "late" in parts else []),
            *([Edits(), WaitsUntilRefused()] if "edited" in parts else []),
        ],
    }


def main(directory: Path, how: str, victim: int, step: int, waits: list[int], parts: list[str]) -> None:
    if is_rank() and RankIdentity.from_environ().joins:
        (directory / f"again-{slot()}").touch()
    pl.seed_everything(3)
    method = "spawn" if how == "spawn" else "popen"
    backoff = 0.01 if "late" not in parts else 2.0
    strategy = NTPStrategy(degrees=DEGREES, max_restarts=9, restart_backoff=backoff, start_method=method)
    options = settings(directory, victim, step, waits, parts)
    found: dict[str, Any] = {}
    if how == "cli":
        how_often = {"degrees": list(DEGREES), "max_restarts": 9, "restart_backoff": backoff}
        options["strategy"] = {"class_path": "lightning_ntp.NTPStrategy", "init_args": how_often}
        where = {"save_dir": str(directory), "name": "", "version": "rows"}
        options["logger"] = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": where}
        cli = LightningCLI(Evaluated, Data, trainer_defaults=options, args=["fit"], seed_everything_default=3)
        trainer, module, data = cli.trainer, cli.model, cli.datamodule
        parts = [part for part in parts if part != "fit"]
        found["fit"] = {k: float(v) for k, v in trainer.callback_metrics.items()}
    else:
        trainer = Trainer(strategy=strategy, logger=CSVLogger(directory, name="", version="rows"), **options)
        module, data = Evaluated(), Data()
    for part in parts:
        if part == "fit":
            trainer.fit(module, datamodule=data)
            found["fit"] = {k: float(v) for k, v in trainer.callback_metrics.items()}
        elif part == "test":
            found["test"] = {k: float(v) for k, v in trainer.test(module, datamodule=data, verbose=False)[0].items()}
        elif part == "predict":
            found["predict"] = float(sum(each["out"].sum() for each in trainer.predict(module, datamodule=data) or []))
        elif part == "again":
            options = {**settings(directory, victim, step, waits, parts), "max_epochs": 1}
            options["callbacks"] = [
                each for each in options["callbacks"] if not isinstance(each, ModelCheckpoint | EarlyStopping)
            ]
            again = NTPStrategy(degrees=DEGREES, max_restarts=9, restart_backoff=backoff, start_method=method)
            trainer = Trainer(strategy=again, logger=False, enable_checkpointing=False, **options)
            trainer.fit(module, datamodule=data)
            found["again"] = {k: float(v) for k, v in trainer.callback_metrics.items()}
    if how == "spawn":
        found["weights"] = float(sum(p.detach().double().abs().sum() for p in module.parameters()))
        (directory / "found-caller").write_text(json.dumps(found))
        return
    current = runtime.current()
    found["joined"] = current is not None and not current.joining
    (directory / f"found-{slot()}").write_text(json.dumps(found))


if __name__ == "__main__":
    _, where, how, victim, step, waits, parts = sys.argv
    torch.set_num_threads(1)
    main(
        Path(where),
        how,
        int(victim),
        int(step),
        [int(each) for each in waits.split(",") if each != "-"],
        parts.split(","),
    )
