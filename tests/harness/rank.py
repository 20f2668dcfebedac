"""What runs in a forked process: a rank that calls test functions, or the host of the TCPStores."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ntp.launch.hosting import host_store
from tests.harness.wire import receive, send

DUMP_SIGNAL = signal.SIGRTMIN + 3
"""Makes a rank write the stacks of all its threads into its ``stacks`` file, also from inside a blocking C call."""

_KEPT_STORES = 3


def serve_store(sock: socket.socket, directory: str) -> None:
    """Host a new TCPStore per request and answer with its port, until pytest is gone."""
    _redirect(directory)
    stores: list[Any] = []
    while True:
        try:
            receive(sock)
        except EOFError:
            return
        stores.append(host_store(timedelta(seconds=60)))
        # An old run's background thread may still be about to leave: do not pull the store from under it.
        del stores[:-_KEPT_STORES]
        send(sock, stores[-1].port)


def serve(sock: socket.socket, directory: str) -> None:
    """Run the tasks that arrive, one after the other, until pytest is gone."""
    os.setsid()  # with everything it starts, this rank can be killed as a group
    _redirect(directory)
    stacks = open(Path(directory, "stacks"), "w")  # noqa: SIM115 - faulthandler needs it for the whole life
    faulthandler.enable(file=stacks)
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True)
    # A Trainer saves and restores the handlers of all valid signals, and would put "default" over faulthandler's, which
    # Python does not know of. So nobody is to see this signal.
    others = signal.valid_signals() - {DUMP_SIGNAL}
    signal.valid_signals = lambda: set(others)
    import torch

    torch.set_num_threads(1)
    # DataLoader workers of this rank are no ranks: with the default they would keep the socket open past its death.
    os.set_inheritable(sock.fileno(), False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    baseline = _Baseline()
    while True:
        try:
            task = receive(sock)
        except EOFError:
            return
        outcome = _perform(task)
        outcome["unclean"] = baseline.restore()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            send(sock, outcome)
        except BrokenPipeError:
            return


def _redirect(directory: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(Path(directory, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    # Forked buffers of the server would be written twice, and a pipe-like stdout would keep lines back.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _perform(task: dict[str, Any]) -> dict[str, Any]:
    import numpy
    import torch

    # Ranks of a real job start from different random states; a forked child would share the server's.
    seed = 7919 + task["slot"]
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    sys.path[:] = task["sys_path"]
    try:
        fn = _resolve(task["module"], task["file"], task["qualname"])
        args, kwargs = pickle.loads(task["arguments"])
        return {"state": "returned", "value": pickle.dumps(fn(*args, **kwargs))}
    except BaseException as error:  # SystemExit and KeyboardInterrupt are results of a test function too
        report = traceback.format_exc()
        try:
            exception = pickle.dumps(error)
            pickle.loads(exception)
        except Exception:
            exception = pickle.dumps(None)
        traceback.clear_frames(error.__traceback__)
        return {"state": "raised", "error": report, "exception": exception}


def _resolve(module: str, file: str, qualname: str) -> Any:
    """Import the test module by name, or from its file when pytest imported it under a name that only pytest knows."""
    loaded = sys.modules.get(module)
    if loaded is None:
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            spec = importlib.util.spec_from_file_location(module, file)
            if spec is None or spec.loader is None:
                raise
            loaded = importlib.util.module_from_spec(spec)
            sys.modules[module] = loaded
            spec.loader.exec_module(loaded)
    found: Any = loaded
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


class _Baseline:
    """The state in which every run starts, and what it takes to get back there."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = os.getcwd()
        self._excepthook = sys.excepthook
        self._handlers = {number: signal.getsignal(number) for number in _catchable()}

    def restore(self) -> list[str]:
        """Undo what the run has left; returns what could not be undone (then this process is not used again)."""
        import torch

        unclean: list[str] = []
        try:
            runtime = sys.modules.get("lightning_ntp.comm.runtime")
            if hasattr(runtime, "shutdown"):
                runtime.shutdown()  # type: ignore[union-attr]
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        except Exception:
            unclean.append(traceback.format_exc())
        gc.collect()
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._directory)
        sys.excepthook = self._excepthook
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is not handler:
                with contextlib.suppress(OSError, TypeError, ValueError):
                    signal.signal(number, handler)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                thread.join(0.5)
                if thread.is_alive():
                    unclean.append(f"thread {thread.name!r} still runs")
        return unclean


def _catchable() -> list[signal.Signals]:
    return [s for s in signal.Signals if s not in (signal.SIGKILL, signal.SIGSTOP, DUMP_SIGNAL)]
