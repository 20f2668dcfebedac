"""What it costs to watch eight GPUs: processor time of the process that asks the driver, and of who listens to it.

Run ``python benchmarks/health.py``. The driver is the tests' mock (``tests/nvml/src``), which answers at once: what a
real one takes for its answers comes on top, in the process that asks. Also shown: the time from an XID in the driver to
its finding in the launching process. The exit code is 1 if the process that asks takes 5 % of a processor or more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_ntp.health.findings import WatchedJob
from lightning_ntp.launch.lifeline import children_of
from lightning_ntp.nvml import NvmlSource
from tests.nvml.mock import MockNvml, build_library

GPUS = 8
XIDS = 20
LIMIT = 0.05
_HOUR = 3600.0


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(mock: MockNvml, seconds: float, interval: float) -> tuple[float, float, list[float]]:
    """Watch for so long: processor seconds per second of who asks and of who listens; from XIDs to findings, in s."""
    devices = {gpu: mock.get("uuid", gpu) for gpu in range(GPUS)}
    over = False
    source = NvmlSource(interval)
    findings = source(WatchedJob(Path(), lambda: devices, lambda: list(devices), lambda: over))
    while len(source.readings) < GPUS:  # starting is not what is measured
        next(findings)
    (child,) = children_of(os.getpid())
    begun, ours, theirs = time.monotonic(), time.process_time(), processor_seconds(child)
    while (passed := time.monotonic() - begun) < seconds:
        next(findings)
    ours, theirs = (time.process_time() - ours) / passed, (processor_seconds(child) - theirs) / passed
    delays = []
    for number in range(XIDS):
        mock.push_xid(number % GPUS, 1000 + number)
        pushed = time.monotonic()
        while next(findings).code != 1000 + number:
            pass
        delays.append(time.monotonic() - pushed)
    over = True
    for _ in findings:
        pass
    return theirs, ours, delays


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="to measure")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks at a GPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mock = MockNvml(build_library(Path(directory)), Path(directory) / "state", GPUS)
        os.environ.update(mock.variables())
        theirs, ours, delays = watch(mock, options.seconds, options.interval)
        mock.close()
    print(f"{GPUS} GPUs, a look every {options.interval:g} s, for {options.seconds:g} s")
    print(f"the process that asks   {theirs * _HOUR:7.1f} s of a processor an hour ({theirs:.2%})")
    print(f"who listens to it       {ours * _HOUR:7.1f} s of a processor an hour ({ours:.2%})")
    median, longest = statistics.median(delays) * 1000, max(delays) * 1000
    print(f"from XID to finding     {median:7.1f} ms (median), {longest:.1f} ms (longest)")
    return int(theirs >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
