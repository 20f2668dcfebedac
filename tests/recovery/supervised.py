"""Jobs under the package's own supervisor, which finds ranks that hang, and tells the job's SIGTERM from one rank's.

One process supervises job after job. Its ranks are forks of it (``start_method="fork"``), so a job costs no imports;
what it holds after many jobs shows whether a supervisor leaks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.harness import Outcome
from tests.harness.wire import die_with_parent, receive, send
from tests.lightning.rigs import slot
from tests.recovery.jobs import Result
from tests.recovery.whole_runs import Script, whole_script

HEARTBEAT = 2.0
_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 120.0
_PRELOAD = ("torch", "lightning.pytorch", "torchmetrics", "tensorboard.compat", "lightning_ntp.lightning.strategy")


@dataclass
class Supervised(Result):
    """What a job has left behind, and what its supervisor said."""

    code: int = 0
    """The job's exit code; -1 if it did not end in time."""
    cause: str = ""
    """Why it ended, if it failed."""
    output: str = ""
    """Of the supervisor and all ranks."""
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    """Temporary files that the job has left."""
    holdings: dict[str, Any] = field(default_factory=dict)
    """What the supervising process holds after it: threads, descriptors, bytes."""


class SupervisingProcess:
    """The process that supervises; started when it is first needed, and again after a job that has not ended."""

    def __init__(self) -> None:
        self._temporary = Path(tempfile.mkdtemp(prefix="supervised-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None

    def run(
        self,
        ranks: int,
        directory: Path,
        function: Callable[..., Any],
        *arguments: Any,
        heartbeat: float | None = HEARTBEAT,
        timeout: float = 150.0,
        **options: Any,
    ) -> Supervised:
        """Call ``function`` in every rank of a job, and wait until all have ended.

        Args:
            directory: For the job's output and results.
            heartbeat: The supervisor's, in seconds.
            timeout: Seconds; then the stacks of all ranks are taken and the job is killed.
            options: More of the supervisor's; ``monitor``: a callback that has devices watched, ``environment``:
                variables for this job alone.
        """
        directory.mkdir(parents=True, exist_ok=True)
        sock, began = self.start(), time.monotonic()
        sock.settimeout(timeout)
        send(sock, (ranks, str(directory), heartbeat, function, arguments, options))
        try:
            answer = receive(sock)
        except (TimeoutError, EOFError) as error:
            stacks = self._stacks(directory)
            self.close(keep_files=True)
            answer = {"code": -1, "cause": f"the job did not end: {error!r}", "codes": {}, "stacks": stacks}
        seconds = time.monotonic() - began
        left = sorted(os.listdir(self._temporary))
        for name in left:
            shutil.rmtree(self._temporary / name, ignore_errors=True)
        output = (directory / "output").read_text(errors="replace") if (directory / "output").exists() else ""
        outcomes = [_outcome(number, directory, answer) for number in range(ranks + options.get("spares", 0))]
        return Supervised(
            outcomes, directory, answer["code"], answer["cause"], output, seconds, left, answer.get("holdings", {})
        )

    def run_script(self, script: Script, directory: Path, timeout: float = 150.0, **options: Any) -> Supervised:
        """Run a whole script."""
        return self.run(
            sum(script.degrees), directory, whole_script, script, str(directory), timeout=timeout, **options
        )

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self, keep_files: bool = False) -> None:
        """End the process and whatever runs under it."""
        if self._process is not None and self._sock is not None:
            self._sock.close()
            self._process.kill()  # the fork server sees that, and kills the ranks
            self._process.wait()
            self._process = self._sock = None
        if not keep_files:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def start(self) -> socket.socket:
        """Start it, unless it runs."""
        if self._sock is not None:
            return self._sock
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment.update(TMPDIR=str(self._temporary), RES_OPTIONS="timeout:1 attempts:1")
        environment["PYTHONPATH"] = str(_ROOT)
        environment.pop("PYTEST_CURRENT_TEST", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.recovery.supervised", str(theirs.fileno()), str(os.getpid())],
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.settimeout(_START_SECONDS)
        receive(ours)
        self._sock = ours
        return ours

    def _stacks(self, directory: Path) -> dict[int, str]:
        """What every rank that is left is doing."""
        from lightning_ntp.launch.progress import DUMP_SIGNAL

        found: dict[int, str] = {}
        for path in directory.glob("pid-*"):
            number, pid = int(path.name.removeprefix("pid-")), int(path.read_text())
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
                found[number] = f"process {pid} in state {state}\n"
                dumps = list(self._temporary.glob(f"*/stacks-{number}.txt"))
                if state not in "TtZ" and dumps and DUMP_SIGNAL is not None:
                    os.kill(pid, DUMP_SIGNAL)
                    time.sleep(0.3)
                    found[number] += dumps[0].read_text(errors="replace")
        return found


def _outcome(number: int, directory: Path, answer: dict[str, Any]) -> Outcome:
    import torch

    path, code = directory / f"result-{number}", answer["codes"].get(number)
    outcome = Outcome(number, -1, exit_code=code, stacks=answer.get("stacks", {}).get(number, ""))
    if code == 0 and path.exists():
        outcome.state, outcome.exit_code = "returned", None
        outcome.value = torch.load(path, weights_only=False)
    elif code is not None:
        # code 0 without a result: it was released, or it was told to leave
        raised = code == 1 and number not in answer["dead"]
        outcome.state, outcome.error = ("raised", answer["cause"] or "exit code 1") if raised else ("died", "")
    return outcome


def resident() -> int:
    """Bytes of this process that are its own."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def holdings() -> dict[str, Any]:
    """What this process holds."""
    gc.collect()
    return {
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "bytes": resident(),
    }


def _rank(function: Callable[..., Any], arguments: tuple[Any, ...], directory: str) -> None:
    import torch

    torch.set_num_threads(1)
    Path(directory, f"pid-{slot()}").write_text(str(os.getpid()))
    value = function(*arguments)
    part = Path(directory, f"part-{slot()}")
    torch.save(value, part)
    part.rename(Path(directory, f"result-{slot()}"))


def _supervise(
    ranks: int, directory: str, heartbeat: float | None, function: Any, arguments: Any, options: dict[str, Any]
) -> dict[str, Any]:
    from lightning_ntp.launch import Supervisor
    from lightning_ntp.launch.call import Call
    from lightning_ntp.launch.supervisor import RESULT_LOST

    output = os.open(Path(directory, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    kept = [os.dup(1), os.dup(2)]
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    kept_environment = dict(os.environ)
    try:
        limit = None if heartbeat is None else timedelta(seconds=heartbeat)
        os.environ.update(options.pop("environment", {}))
        monitor = options.pop("monitor", None)
        if monitor is not None:  # what it makes has threads
            options["watch"] = monitor.device_watch()
        supervisor = Supervisor(
            ranks, "fork", Call(_rank, (function, arguments, directory)), heartbeat=limit, **options
        )
        outcome = supervisor.run()
        answer = {"code": outcome.exit_code, "cause": outcome.describe(), "codes": outcome.codes}
        if outcome.cause is not None and outcome.cause.signature == RESULT_LOST:
            answer.update(code=0, cause="")  # a script hands nothing over
        answer["dead"] = set(supervisor._deaths.slots)
    finally:
        os.environ.clear()
        os.environ.update(kept_environment)
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
            os.close(old)
    return answer


def main(fd: int, parent: int) -> None:
    die_with_parent(parent)
    os.setpgid(0, 0)  # Ctrl-C is for the other side
    for name in _PRELOAD:
        importlib.import_module(name)
    importlib.import_module("tests.recovery.whole_runs")
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    send(sock, "ready")
    while True:
        try:
            request = receive(sock)
        except EOFError:
            return
        answer = _supervise(*request)
        answer["holdings"] = holdings()
        send(sock, answer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # under its own name, so that what is pickled here and there is the same
    importlib.import_module("tests.recovery.supervised").main(int(sys.argv[1]), int(sys.argv[2]))
