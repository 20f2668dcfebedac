"""How this process was started: what it takes to start it once more, warm or cold."""

from __future__ import annotations

import multiprocessing.process
import os
import sys
from dataclasses import dataclass
from typing import Literal

_HARMLESS_FLAGS = frozenset({"-u", "-B"})
"""Interpreter flags which a warm start passes on to the fork server. All others lead to a cold start."""


@dataclass(frozen=True)
class Origin:
    """The command line and directory of a Python process at its start."""

    kind: Literal["script", "module", "code", "interactive"]
    flags: tuple[str, ...]
    """Interpreter flags before the target."""
    target: str
    """The script as typed, the module's name, or the code; empty when interactive or read from stdin."""
    arguments: tuple[str, ...]
    """What follows the target."""
    cwd: str
    """Working directory at the start."""

    @classmethod
    def of_this_process(cls) -> Origin:
        """Read it from ``sys.orig_argv``: ``sys.argv`` may have been edited since."""
        return cls.parse(list(sys.orig_argv[1:]), _initial_cwd())

    @classmethod
    def parse(cls, argv: list[str], cwd: str) -> Origin:
        """Split ``argv`` (without the interpreter) as CPython does."""
        flags: list[str] = []
        position = 0
        while position < len(argv):
            arg = argv[position]
            rest = tuple(argv[position + 1 :])
            if arg in ("-m", "-c") and rest:
                return cls("module" if arg == "-m" else "code", tuple(flags), rest[0], rest[1:], cwd)
            if arg == "-":
                break
            if not arg.startswith("-"):
                return cls("script", tuple(flags), arg, rest, cwd)
            flags.append(arg)
            if arg in ("-X", "-W", "--check-hash-based-pycs") and rest:
                flags.append(rest[0])
                position += 1
            elif not arg.startswith("--") and arg[1:2] not in ("X", "W") and ("m" in arg or "c" in arg):
                # `-mfoo` or `-Bc code`: legal, rare, and only ever started cold.
                return cls("code", tuple(flags), "", rest, cwd)
            position += 1
        return cls("interactive", tuple(flags), "", (), cwd)

    @property
    def path(self) -> str:
        """``__main__.__file__`` of a script (CPython joins, and does not normalise)."""
        return os.path.join(self.cwd, self.target)

    @property
    def path0(self) -> str:
        """``sys.path[0]`` as CPython sets it for this start."""
        if self.kind == "script":
            return os.path.dirname(os.path.realpath(self.path))
        return self.cwd if self.kind == "module" else ""

    def cold_command(self) -> list[str]:
        """The command line that starts the same program in a new interpreter."""
        return [sys.executable, *sys.orig_argv[1:]]

    def cold_reason(self) -> str | None:
        """Why a warm (forked) process could not stand for a fresh one, or ``None`` if it can."""
        odd = [flag for flag in self.flags if flag not in _HARMLESS_FLAGS]
        if odd:
            return f"interpreter flags {' '.join(odd)}"
        if sys.flags.safe_path if sys.version_info >= (3, 11) else False:
            return "PYTHONSAFEPATH"
        if self.kind in ("code", "interactive"):
            return "no script file or module"
        if self.kind == "script" and not (os.path.isfile(self.path) and not self.path.endswith((".pyc", ".pyz"))):
            return f"{self.target} is not a source file"
        return None


def _initial_cwd() -> str:
    """The working directory at process start.

    Nobody records it. Importing torch imports multiprocessing, which notes the directory it is imported in; this is
    before any code of the user can run after ``import torch``. Hydra knows better when it has changed the directory.
    """
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is not None and hydra.HydraConfig.initialized():
        return str(hydra.HydraConfig.get().runtime.cwd)
    return multiprocessing.process.ORIGINAL_DIR or os.getcwd()  # type: ignore[attr-defined]
