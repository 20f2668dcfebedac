"""Short-lived threads beside the work. None may be inside C++ when the interpreter ends: that would abort the process.

(A thread that comes back from C++ then and asks for the interpreter is ended by it, through C++ frames that do not
allow it: "terminate called without an active exception", measured on Python 3.11.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_running: list[threading.Thread] = []


def run(name: str, function: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start ``function(*args)`` in a thread that :func:`join_all` waits for."""
    _running[:] = [thread for thread in _running if thread.is_alive()]
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    _running.append(thread)
    thread.start()
    return thread


def join_all(seconds: float) -> None:
    """Wait until all have ended, at most ``seconds`` in total."""
    deadline = time.monotonic() + seconds
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
