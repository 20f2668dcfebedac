"""What the Trainer's world does when the members change: hooks, and the line a person reads."""

from __future__ import annotations

import logging

from lightning.pytorch import Trainer

from lightning_ntp.engine import Change

log = logging.getLogger("lightning_ntp")


def follow_change(trainer: Trainer, change: Change) -> None:
    """Tell the module and the callbacks of a change, and the log.

    Args:
        trainer: The running trainer.
        change: What has changed.
    """
    if trainer.is_global_zero:
        log.warning(describe(change))
    for listener in (trainer.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
        hook = getattr(listener, "on_topology_change", None)
        if hook is not None:
            hook(change)


def describe(change: Change) -> str:
    """One line: who is gone, what moved, how long it took."""
    lost = ", ".join(map(str, change.lost)) or "none"
    degrees = f"{change.before.degrees} -> {change.after.degrees}"
    took = ", ".join(f"{phase} {1000 * seconds:.0f} ms" for phase, seconds in change.seconds.items())
    moved = f"{change.moved_bytes / 2**20:.1f} MiB from slots {', '.join(map(str, change.sources)) or 'none'}"
    return f"lost slots: {lost}; degrees {degrees}; moved {moved}; {took}; step {change.step + 1} goes on"
