"""Train a small GPT with nonuniform tensor parallelism: ``python examples/gpt/train.py --degrees 4 4``.

That job has two replicas of four devices. After a third of its steps one device is killed in the middle of a step: its
replica goes on with three, until the device is started again and joins beside a step. ``--no-fault`` leaves it alive.
Replicas may also differ from the start: ``--degrees 4 3``. Without ``--degrees`` the strategy takes all devices it
finds, and nobody is killed; ``--strategy auto --devices 1`` trains the same model in one process.
"""

import argparse
import warnings
from pathlib import Path

import lightning.pytorch as pl
from data import PythonDocs
from lightning.pytorch.loggers import CSVLogger
from model import LanguageModel
from report import Report

from lightning_ntp import NTPStrategy
from lightning_ntp.callbacks import Fault, FaultInjector


# Lightning 2.6 with torch 2.13: every rank would say it once.
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degrees", type=int, nargs="+", metavar="TP", help="tensor-parallel degree of each replica")
    parser.add_argument("--strategy", default="ntp", help="without --degrees: ntp, or ddp to compare")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per replica")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--no-fault", action="store_true", help="kill nobody")
    parser.add_argument("--restart-after", type=float, default=5.0, metavar="SECONDS", help="of who was killed")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpt"))
    args = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    data = PythonDocs(seq_len=args.seq_len, batch_size=args.batch_size)
    model = LanguageModel(max_seq_len=args.seq_len)
    report = Report(data)
    faults = []
    if len(args.degrees or ()) > 1 and not args.no_fault:  # with one replica nobody else has what is lost
        largest = max(range(len(args.degrees)), key=lambda replica: (args.degrees[replica], replica))
        faults = [Fault("kill", slot=sum(args.degrees[: largest + 1]) - 1, step=args.steps // 3, phase="backward")]
    strategy = args.strategy
    if args.degrees:
        strategy = NTPStrategy(degrees=args.degrees, max_restarts=3, restart_backoff=args.restart_after)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=sum(args.degrees) if args.degrees else args.devices,
        max_steps=args.steps,
        val_check_interval=max(args.steps // 4, 1),
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        callbacks=[report, FaultInjector(faults)],
        logger=CSVLogger(args.output),
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    trainer.fit(model, data)

    checkpoint = args.output / "gpt.ckpt"
    trainer.save_checkpoint(checkpoint, weights_only=False)  # on all ranks: each holds a part of the model
    if trainer.is_global_zero:
        # One ordinary file with the whole model in it: any Lightning program loads it, on one device too.
        report.print(checkpoint, LanguageModel.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True))


if __name__ == "__main__":
    main()
