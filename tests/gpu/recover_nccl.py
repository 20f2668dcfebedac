"""Confirm recovery on NCCL: ``python tests/gpu/recover_nccl.py`` on a machine with two or more GPUs.

Every rank is in all-reduces on its GPU; the last one kills itself; the others must wake, agree, rebuild their NCCL
groups and reduce again; then the next one goes, until one is left. Prints what was measured; 0 means all is well.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_ntp.comm import Interrupted, runtime
from lightning_ntp.launch import RankIdentity, run_call
from lightning_ntp.plan import Topology


def work() -> list[str]:
    me = RankIdentity.from_environ()
    device = torch.device("cuda", me.slot)
    torch.cuda.set_device(device)
    current = runtime.start(
        (me.store_host, me.store_port),
        me.slot,
        Topology.start((me.world_size,)),
        "nccl",
        timedelta(seconds=120),
        device,
    )
    current.announce_recoverable()
    report = []
    for victim in reversed(range(1, me.world_size)):
        began = time.monotonic()
        try:
            while True:
                x = torch.ones(1 << 20, device=device)
                dist.all_reduce(x)
                assert x[-1].item() == current.generation.topology.world_size or current.interrupted
                if me.slot == victim and time.monotonic() - began > 1.0:
                    os.kill(os.getpid(), signal.SIGKILL)
        except Interrupted as error:
            woken = time.monotonic()
            recovery = current.recover({})
            x = torch.ones(1 << 20, device=device)
            dist.all_reduce(x)
            assert x.sum().item() == x.numel() * len(recovery.after.slots)
            phases = {phase: f"{1e3 * s:.0f} ms" for phase, s in recovery.seconds.items()}
            done = 1e3 * (time.monotonic() - woken)
            report.append(f"{error}: {phases}, awake -> first all-reduce {done:.0f} ms, {recovery.attempts} round(s)")
    return report


def main() -> int:
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print(f"needs two or more GPUs, found {gpus}")
        return 2
    print(f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {gpus} GPUs")
    for line in run_call(gpus, work, start_method="spawn"):
        print(line)
    print("recovery on NCCL works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
