"""What the ranks run, as data that a fork server in another process can read."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_ntp.launch.observed import measured_apart, observed_reason
from lightning_ntp.launch.origin import Origin

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torchmetrics",
    "lightning.fabric",
    "lightning.pytorch",
    "lightning.pytorch.cli",
    "lightning_ntp.lightning",
    "jsonargparse",
    "rich",
    "tensorboard",
    "torch.utils.tensorboard",
    "torchvision",
    "transformers",
    "pandas",
    "hydra",
)
"""Modules worth having in the fork server. Importing them starts no thread and opens no device; a script's own modules
may do both, and are left to the ranks."""


@dataclass(frozen=True)
class Program:
    """A program and how to start it."""

    entry: Literal["script", "module", "call"]
    target: str
    """Absolute path of the script, name of the module, or path of the pickled call."""
    argv: list[str] = field(default_factory=list)
    """``sys.argv`` at start, its first item as typed."""
    cwd: str = ""
    path0: str = ""
    """``sys.path[0]``."""
    flags: list[str] = field(default_factory=list)
    """Interpreter flags for the fork server."""
    cold_command: list[str] = field(default_factory=list)
    """Starts the same in a new interpreter."""
    cold: str | None = None
    """Reason not to fork warm; ``None``: fork warm."""
    preload: list[str] = field(default_factory=list)
    """Modules which the fork server imports before it forks."""

    @classmethod
    def this_script(cls, cold: bool = False) -> Program:
        """The program this very process is running.

        Raises:
            RuntimeError: there is nothing to re-run (an interactive interpreter, or a program read from stdin).
        """
        origin = Origin.of_this_process()
        if origin.kind == "interactive":
            raise RuntimeError(
                'The start method "popen" re-runs the script in every rank, but this Python was started interactively'
                ' or reads its program from stdin. Use strategy="ntp_notebook" here, or put the code into a file.'
            )
        reason = "asked for" if cold else (origin.cold_reason() or observed_reason())
        return cls(
            entry="module" if origin.kind == "module" else "script",
            target=origin.target if origin.kind == "module" else origin.path,
            argv=["-m" if origin.kind == "module" else origin.target, *origin.arguments],
            cwd=origin.cwd,
            path0=origin.path0,
            flags=list(origin.flags),
            cold_command=measured_apart(origin.cold_command()),
            cold=reason,
            preload=_preload(),
        )

    @classmethod
    def pickled_call(cls, path: Path, cold: bool = False) -> Program:
        """A call saved by :func:`lightning_ntp.launch.call.save_call`."""
        from lightning_ntp.launch.call import COLD_START

        origin = Origin.of_this_process()
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        return cls(
            entry="call",
            target=str(path),
            argv=list(sys.argv),
            cwd=origin.cwd,
            path0=origin.path0,
            flags=flags,
            cold_command=[sys.executable, *flags, "-c", COLD_START, str(path)],
            cold="asked for" if cold else observed_reason(),
            preload=_preload(),
        )

    def to_message(self) -> dict[str, Any]:
        return asdict(self)


def _preload() -> list[str]:
    return [name for name in PRELOAD if name in sys.modules]
