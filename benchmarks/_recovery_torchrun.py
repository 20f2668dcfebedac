"""A worker of the recovery benchmark under torchrun: ``_recovery_torchrun.py DIRECTORY STEPS EVERY RANK:STEP...``.

The same training with plain DDP over gloo: it loads the newest checkpoint, trains until ``STEPS`` steps are done and
writes a checkpoint every ``EVERY`` steps. The n-th ``RANK:STEP`` kills that rank in the backward of that step, in the
n-th life of the job.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _recovery_marks import Marks
from _recovery_model import SAMPLES, adamw, plain_gpt, token_row
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    directory, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    victim, _, fatal = (sys.argv[4:] + [""] * (life + 1))[life].partition(":")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    marks = Marks(directory, rank)
    marks.write("start", life=life)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    module = plain_gpt()
    optimizer = adamw(module)
    first = 0
    newest = directory / "checkpoint.pt"
    if newest.exists():
        checkpoint = torch.load(newest, weights_only=True)
        module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"]
    model = DistributedDataParallel(module)
    parameters = list(module.parameters())
    step = first

    def in_backward(_: Tensor) -> None:
        if victim == str(rank) and fatal == str(step):
            marks.die(step)

    parameters[len(parameters) // 2].register_post_accumulate_grad_hook(in_backward)  # type: ignore[no-untyped-call]
    marks.write("train", life=life, step=first)
    own = SAMPLES // world
    for step in range(first, steps):
        rows = [token_row(step * SAMPLES + rank * own + k) for k in range(own)]
        tokens, following = (torch.stack(part) for part in zip(*rows, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()).backward()
        optimizer.step()
        marks.write("step", step=step, life=life)
        if (step + 1) % every == 0 and rank == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, newest.with_suffix(".tmp"))
            os.replace(newest.with_suffix(".tmp"), newest)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
