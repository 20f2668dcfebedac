"""Time from launch until ``training_step`` is entered: 8 ranks against 1, as interleaved pairs.

    python benchmarks/launch.py [--ranks 8] [--pairs 5] [--ddp]

The clock starts before the script's interpreter and stops in the last rank to enter its first ``training_step``. Aim:
a ratio of at most 2. ``--ddp`` measures Lightning's own ``strategy="ddp"`` beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = '''\
"""A minimal training script."""
import os
import sys
import time
from pathlib import Path

import torch
import lightning.pytorch as pl


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            Path(sys.argv[3], f"entered-{os.getpid()}").write_text(str(time.monotonic()))
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(64, 8), 1)


if sys.argv[1] == "ntp":
    from lightning_ntp import NTPStrategy

    strategy = NTPStrategy(plan={"layer": "colwise_gather_output"})  # 8 ranks: two replicas of degree 4
else:
    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo")
trainer = pl.Trainer(
    accelerator="cpu", devices=int(sys.argv[2]), strategy=strategy, max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module())
'''


def measure(launcher: str, ranks: int) -> float:
    """Seconds until all ``ranks`` have entered their first step."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "train.py")
        script.write_text(SCRIPT)
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        started = time.monotonic()
        subprocess.run(
            [sys.executable, str(script), launcher, str(ranks), directory],
            env={**os.environ, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            timeout=300,
        )
        entered = [float(file.read_text()) for file in Path(directory).glob("entered-*")]
        if len(entered) != ranks:
            raise RuntimeError(f"{len(entered)} ranks instead of {ranks} entered training_step with {launcher}")
        return max(entered) - started


def _row(name: str, values: list[float], unit: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{name:<28}{middle:8.2f}{unit}   [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ddp", action="store_true", help="also measure Lightning's own launcher")
    arguments = parser.parse_args()
    launchers = ["ntp", "ddp"] if arguments.ddp else ["ntp"]
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for name in launchers for n in (1, arguments.ranks)}
    measure("ntp", 1)  # file caches
    for _ in range(arguments.pairs):
        for (name, ranks), values in times.items():
            values.append(measure(name, ranks))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"launch until training_step, {arguments.pairs} interleaved pairs on {cores} cores: median [quartiles]")
    for (name, ranks), values in times.items():
        print(_row(f"{name}, {ranks} rank{'s' if ranks > 1 else ''}", values, " s"))
    for name in launchers:
        ratios = [many / one for one, many in zip(times[name, 1], times[name, arguments.ranks], strict=True)]
        print(_row(f"{name}, {arguments.ranks} ranks / 1 rank", ratios, " x"))


if __name__ == "__main__":
    main()
