"""Is this process being watched by something that only a cold start carries over to the ranks?"""

from __future__ import annotations

import os
import sys


def observed_reason() -> str | None:
    """Why this process is being watched (coverage, a debugger, a tracer, a profiler), or ``None`` if it is not.

    A watcher hooks in at interpreter start; only a cold start gives it the chance to do so in the ranks.
    """
    for variable in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COVERAGE_RUN"):
        if os.environ.get(variable):
            return f"coverage ({variable})"
    if "pydevd" in sys.modules or any(name.startswith("PYDEVD_") for name in os.environ):
        return "a debugger (pydevd)"
    if sys.gettrace() is not None:
        return "tracing (sys.settrace)"
    if sys.getprofile() is not None:
        return "profiling (sys.setprofile)"
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None:
        tools = [tool for tool in map(monitoring.get_tool, range(6)) if tool is not None]
        if tools:
            return f"monitoring (sys.monitoring: {', '.join(tools)})"
    return None


def measured_apart(command: list[str]) -> list[str]:
    """``command`` such that ``coverage run`` in several ranks does not write one data file over and over.

    ``coverage combine --append`` then adds the ranks' files to the supervisor's.
    """
    for position, word in enumerate(command[:-1]):
        if os.path.basename(word) in ("coverage", "coverage3") and command[position + 1] == "run":
            return [*command[: position + 2], "--parallel-mode", *command[position + 2 :]]
    return command
