"""From SIGKILL to the first full collective on rebuilt process groups, with the supervisor's own detection.

Worlds of five ranks, degrees (3, 2), are in collectives all the time; three of each kill themselves at random moments.
Nothing is moved here: see ``recovery.py`` for the whole way to the next optimizer step.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ntp.comm import Interrupted, Runtime, runtime
from lightning_ntp.launch import RankIdentity, run_call
from lightning_ntp.plan import Topology

DEGREES = (3, 2)
KILLS = 3


def use_every_group(current: Runtime) -> None:
    g = current.generation
    for group in (g.world, g.tensor_parallel, g.sync_tensor_parallel, g.sync_data_parallel):
        if group is not None:
            ones = torch.ones(8)
            dist.all_reduce(ones, group=group)
            assert ones[0] == group.size()


def world(seed: int) -> list[dict[str, float]]:
    """One world's life; its last survivors' measurements in seconds, one row per kill."""
    torch.set_num_threads(1)
    identity = RankIdentity.from_environ()
    current = runtime.start(
        (identity.store_host, identity.store_port),
        identity.slot,
        Topology.start(DEGREES),
        "gloo",
        timedelta(seconds=60),
        torch.device("cpu"),
    )
    current.announce_recoverable()
    use_every_group(current)
    draw = random.Random(seed)
    victims = draw.sample(range(sum(DEGREES)), KILLS)
    pauses = [draw.uniform(0.2, 0.5) for _ in victims]
    store = dist.TCPStore(identity.store_host, identity.store_port, is_master=False, wait_for_workers=False)
    rows = []
    for victim, pause in zip(victims, pauses, strict=True):
        end = time.monotonic() + pause
        try:
            while True:
                if current.slot == victim and time.monotonic() > end:
                    store.set(f"killed/{victim}", str(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(10_000))
        except Interrupted:
            woken = time.monotonic()
            recovery = current.recover({})
            use_every_group(current)
            done = time.monotonic()
        everyone: list[Any] = [None] * len(recovery.after.slots)
        dist.all_gather_object(everyone, (woken, done, recovery.seconds))
        killed = float(store.get(f"killed/{victim}"))
        rows.append(
            {
                "detect": max(w for w, _, _ in everyone) - killed,
                "agree": max(s["agree"] for _, _, s in everyone),
                "rebuild": max(s["rebuild"] for _, _, s in everyone),
                "total": max(d for _, d, _ in everyone) - killed,
                "threads": float(threading.active_count()),
                "files": float(len(os.listdir("/proc/self/fd"))),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=10)
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.worlds):
        rows += run_call(sum(DEGREES), world, seed, start_method="fork")
    print(f"{len(rows)} kills, milliseconds:      median   worst")
    for phase, what in (
        ("detect", "SIGKILL -> last survivor awake"),
        ("agree", "agreement"),
        ("rebuild", "rebuild"),
        ("total", "SIGKILL -> first full collective"),
    ):
        times = sorted(1e3 * row[phase] for row in rows)
        print(f"  {what:34s} {statistics.median(times):6.1f}  {times[-1]:6.1f}")
    last = [rows[k] for k in range(KILLS - 1, len(rows), KILLS)]
    print(f"threads after {KILLS} kills: at most {max(r['threads'] for r in last):.0f};", end=" ")
    print(f"open files: at most {max(r['files'] for r in last):.0f}")


if __name__ == "__main__":
    main()
