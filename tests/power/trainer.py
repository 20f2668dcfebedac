"""A launching process for tests that kill it: sets levers at random, as fast as it can, until it is ended.

``python -m tests.power.trainer SEED LEASE UUID...``; prints ``open PID`` of its helper once it has its GPUs, and
``lost WHY`` if the helper is gone. With ``share`` for SEED another process holds its end of the socket too, and it sets
nothing but one limit.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

from lightning_ntp.power.client import PowerHelper, locked_clocks, power_limit, workload_profiles


def main() -> None:
    seed, lease, *gpus = sys.argv[1:]
    chance = random.Random(seed)
    helper = PowerHelper("trainer", lease=float(lease), on_lost=lambda why: tell(f"lost {why}"))
    taken = helper.open(gpus)
    assert all(answer.done for answer in taken.values()) or helper.lost, taken
    if seed == "share":
        assert helper._socket is not None
        sleeper = subprocess.Popen(["sleep", "60"], pass_fds=[helper._socket.fileno()], stdout=subprocess.DEVNULL)
        helper.set(power_limit(gpus[0], 300))
        tell(f"open {helper.pid}")
        tell(f"sleeper {sleeper.pid}")
        sys.stdin.read()
    tell(f"open {helper.pid}")
    while not helper.lost:
        gpu = chance.choice(gpus)
        setting = chance.choice(
            [
                power_limit(gpu, chance.randint(200, 650)),
                locked_clocks(gpu, (300, chance.randint(400, 1900))),
                workload_profiles(gpu, chance.sample(range(25), 2)),
            ]
        )
        helper.set(setting)
        if chance.random() < 0.05:
            helper.release(gpu)
    sys.stdin.read()


def tell(line: str) -> None:
    os.write(1, line.encode() + b"\n")


if __name__ == "__main__":
    main()
