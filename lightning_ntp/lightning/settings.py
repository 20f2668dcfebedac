"""The strategy's settings: whether each is in its range, and whether times to wait go together."""

from __future__ import annotations

import math
from datetime import timedelta

DEFAULT_TIMEOUT = timedelta(minutes=30)
DEFAULT_HEARTBEAT = timedelta(seconds=30)
_LONGEST_SECONDS = 365 * 86400
"""Clocks in C++ overflow far beyond."""
_LEAST_HEARTBEAT = timedelta(seconds=1)
"""Healthy processes are silent for some tenths of a second on a busy machine."""


def is_number(value: object) -> bool:
    """Whether it is a finite number: not NaN, not True, not a text."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def as_timedelta(name: str, value: float | timedelta) -> timedelta:
    """Raises:
    ValueError: If it is no finite time above 0.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not (is_number(seconds) and 0 < seconds <= _LONGEST_SECONDS):
        raise ValueError(
            f"{name}={value!r} must be a finite number of seconds above 0 and up to {_LONGEST_SECONDS} (a year), or a"
            " timedelta"
        )
    return timedelta(seconds=seconds)


def check_times(
    timeout: float | timedelta | None, heartbeat: float | timedelta | None
) -> tuple[timedelta, timedelta | None]:
    """Both as timedeltas.

    Raises:
        ValueError: If one is out of range, or a collective would time out before the rank that hangs is found.
    """
    waits = DEFAULT_TIMEOUT if timeout is None else as_timedelta("timeout", timeout)
    if heartbeat is None:
        return waits, None
    silence = as_timedelta("heartbeat", heartbeat)
    if silence < _LEAST_HEARTBEAT:
        raise ValueError(
            f"heartbeat={heartbeat!r} is less than {_LEAST_HEARTBEAT.total_seconds():g} s: a rank that is only busy"
            " would be killed; set a longer one, or None to switch it off"
        )
    if waits <= silence:
        raise ValueError(
            f"timeout={waits.total_seconds():g} s is not longer than heartbeat={silence.total_seconds():g} s: the"
            " collectives of the others would time out before a rank that hangs is found; raise timeout (its default is"
            f" {DEFAULT_TIMEOUT.total_seconds():g}), lower heartbeat (its default is"
            f" {DEFAULT_HEARTBEAT.total_seconds():g}), or switch it off with heartbeat=None"
        )
    return waits, silence


def check_counts(spares: int, max_restarts: int, bucket_cap_mb: float) -> None:
    """Raises:
    ValueError: If one is out of range.
    """
    if isinstance(spares, bool) or not isinstance(spares, int) or spares < 0:
        raise ValueError(f"spares={spares!r} must be a whole number of devices that wait for a loss, 0 for none")
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(
            f"max_restarts={max_restarts!r} must be a whole number: how often a slot is started again, 0 for never"
        )
    if not (is_number(bucket_cap_mb) and bucket_cap_mb > 0):
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} must be a finite number of MiB above 0")


def check_choices(
    verify: object, redundancy: object, start_method: object, process_group_backend: object, distributed: object
) -> None:
    """Raises:
    ValueError: If one is none of those there are.
    """
    if redundancy not in (None, "neighbor"):
        raise ValueError(f"redundancy={redundancy!r} is neither None nor 'neighbor'")
    if not (isinstance(verify, bool) or verify == "auto"):
        raise ValueError(f"verify={verify!r} is none of 'auto', True, False")
    if start_method not in ("popen", "spawn", "fork"):
        raise ValueError(f"start_method={start_method!r} is none of 'popen', 'spawn', 'fork'")
    if process_group_backend not in (None, "gloo", "nccl"):
        raise ValueError(
            f"process_group_backend={process_group_backend!r} is not supported: use 'gloo', 'nccl', or None for what"
            " fits the device"
        )
    if distributed:
        raise ValueError(
            "save_distributed_checkpoint=True: this strategy writes one file with the unsharded model, which loads"
            " anywhere and at any degrees; leave it False"
        )
