"""Run a job, and say how it went."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any, Literal

from lightning_ntp.launch.call import Call
from lightning_ntp.launch.outcome import Outcome, RanksFailedError
from lightning_ntp.launch.supervisor import Supervisor


def run_script(ranks: int, **options: Any) -> int:
    """Re-run this script in ``ranks`` ranks, print the cause if they fail, and return the exit code to leave with.

    Args:
        options: keyword arguments of :class:`Supervisor`.
    """
    outcome = Supervisor(ranks, "popen", **options).run()
    if outcome.cause is not None:
        sys.stdout.flush()
        print(outcome.describe(), end="", file=sys.stderr, flush=True)
    return outcome.exit_code


def run_call(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    start_method: Literal["spawn", "fork"] = "spawn",
    **options: Any,
) -> Any:
    """Call ``function(*args)`` in ``ranks`` ranks and return what slot 0 returned.

    Args:
        options: keyword arguments of :class:`Supervisor`.

    Raises:
        RanksFailedError: it raised, or a rank died.
        KeyboardInterrupt, SystemExit: the job was stopped by a signal before it finished.
    """
    outcome = Supervisor(ranks, start_method, Call(function, args), **options).run()
    return result_of(outcome)


def result_of(outcome: Outcome) -> Any:
    """The result of a call, or the exception which says why there is none."""
    if outcome.exit_code == 0:
        return outcome.result
    if outcome.cause is None:
        if outcome.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(outcome.exit_code)
    raise RanksFailedError(outcome)
