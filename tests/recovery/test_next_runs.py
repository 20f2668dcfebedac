"""What a script does after a fit in which ranks were lost: test, fit on, another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from tests.lightning.rigs import EndState, assert_same
from tests.recovery.jobs import EXACT, PER_REPLICA, Job, Samples, Worlds, assert_returned, run
from tests.recovery.models import Automatic


class WithTest(Automatic):
    """Logs its loss in tests too."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch, batch_idx), sync_dist=True, batch_size=len(batch[2]))


def _script(job: Job, directory: str) -> dict[str, Any]:
    from lightning_ntp import NTPStrategy
    from lightning_ntp.callbacks import FaultInjector

    def trainer(**more: Any) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=sum(job.degrees),
            strategy=NTPStrategy(degrees=job.degrees, timeout=30, heartbeat=10),
            precision="64-true",
            logger=False,
            default_root_dir=directory,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **more,
        )

    torch.manual_seed(3)
    faults = [{"kind": "kill", "slot": s, "step": step, "phase": phase} for s, step, phase in job.faults]
    module, data = WithTest(), DataLoader(Samples(job.samples), batch_size=PER_REPLICA)
    first = trainer(max_epochs=1, callbacks=[FaultInjector(faults[:1])])
    first.fit(module, data)
    tested = first.test(module, data, verbose=False)
    # the second of the faults hits the same module in another trainer's fit, which goes on from these weights
    end = EndState()
    second = trainer(max_epochs=1, callbacks=[end, FaultInjector(faults[1:])])
    second.fit(module, data)
    fresh = WithTest()
    third = trainer(max_epochs=1)
    third.fit(fresh, data)
    return {
        "tested": {k: float(v) for k, v in tested[0].items()},
        "parameters": end.parameters,
        "third": float(third.callback_metrics["all_loss_epoch"]),
        "degrees": third.strategy.topology.degrees,
    }


def test_a_script_goes_on_with_other_runs_after_a_loss(world: Worlds, tmp_path: Path) -> None:
    job = Job((2, 2), ((1, 2, "backward"), (2, 1, "sync")))
    quiet = run(world, Job((2, 2)), tmp_path / "undisturbed", ranks=_script)
    assert_returned(quiet, set())
    got = run(world, job, tmp_path / "disturbed", ranks=_script)
    assert_returned(got, {1, 2})
    assert got.first["degrees"] == (1, 1)
    for part in ("tested", "parameters", "third"):
        assert_same(got.first[part], quiet.first[part], EXACT, part)
