"""Train with a replica that keeps pace after it has lost a GPU: ``python examples/power/train.py``.

Two replicas of four devices. Slot 7 is killed; ``PowerManager`` gives what is left of its replica more power, within
the budget, until slot 7 is started again and joins. On a machine with NVIDIA GPUs this runs as it is, with the rights
to write power limits (docs/power.md). Without one: ``python examples/power/simulate.py``.
"""

import argparse
import warnings
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ntp import NTPStrategy
from lightning_ntp.callbacks import Fault, FaultInjector, PowerManager

# Lightning 2.6 with torch 2.13: every rank would say it once.
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")

WIDTH, HIDDEN, BATCH = 48, 480, 24


class Mixer(pl.LightningModule):
    """A feed-forward network: 480 hidden units are 120 for each of four devices, 160 for each of three."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def configure_tp_plan(self) -> dict[str, str]:
        return {"up_proj": "colwise", "down_proj": "rowwise"}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.down_proj(torch.relu(self.up_proj(x))) - y).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def watts(text: str) -> float | str:
    """A number of watts, or one of PowerManager's words."""
    return float(text) if text.replace(".", "", 1).isdigit() else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--lose-at", type=int, default=35, metavar="STEP", help="when slot 7 is killed; -1: never")
    parser.add_argument("--restart-after", type=float, default=25.0, metavar="SECONDS")
    parser.add_argument("--no-restart", action="store_true", help="slot 7 does not come back")
    parser.add_argument("--straggler", default="power+rebalance")
    parser.add_argument("--budget", type=float, metavar="WATTS", help="default: the sum of the limits at start")
    parser.add_argument("--ceiling", type=watts, default="found", help="watts, found, or maximum")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks of the loop")
    parser.add_argument("--simulated", type=float, metavar="SECONDS", help="see simulate.py; of a step at full speed")
    parser.add_argument("--output", type=Path, default=Path("outputs/power"))
    args = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    callbacks: list[pl.Callback] = []
    gpus = None
    if args.simulated:  # all that this script knows of a simulation
        from simulated import SimulatedGpu, uuids

        callbacks, gpus = [SimulatedGpu(args.simulated / BATCH)], uuids(8)
    power = PowerManager(
        straggler=args.straggler,
        budget=args.budget,
        ceiling=args.ceiling,
        interval=args.interval,
        tokens_per_step=2 * BATCH,
        gpus=gpus,
    )
    faults = [Fault("kill", slot=7, step=args.lose_at, phase="backward")] if args.lose_at >= 0 else []
    restart = timedelta(seconds=args.restart_after)
    trainer = pl.Trainer(
        strategy=NTPStrategy(degrees=(4, 4), max_restarts=0 if args.no_restart else 1, restart_backoff=restart),
        accelerator=args.accelerator,
        devices=8,
        max_steps=args.steps,
        callbacks=[*callbacks, power, FaultInjector(faults)],
        logger=CSVLogger(args.output),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    x = torch.randn(1000 * BATCH, WIDTH)
    trainer.fit(Mixer(), DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=BATCH, shuffle=True))
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps; degrees {trainer.strategy.degrees}; metrics.csv is in {args.output}")


if __name__ == "__main__":
    main()
