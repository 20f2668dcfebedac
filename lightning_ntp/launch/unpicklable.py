"""Find the one object inside a large one that pickle cannot take: pickle itself names no path to it."""

from __future__ import annotations

import pickle
from typing import Any

_DEPTH = 12


def explain_unpicklable(root: Any, error: Exception) -> str:
    """An error message: the path to the culprit inside ``root``, pickle's complaint and the ways out."""
    path, culprit, reason = _find("", root, error, set(), _DEPTH)
    return (
        f"{path.lstrip('.') or 'The function'} ({type(culprit).__qualname__}: {_short(culprit)}) cannot be sent to the"
        f' ranks, because pickle says: {reason}. Define it at the top level of a module, or use strategy="ntp" (ranks'
        ' re-run the script) or strategy="ntp_notebook" (ranks are forked), which pickle nothing.'
    )


def _find(path: str, value: Any, error: Exception, seen: set[int], depth: int) -> tuple[str, Any, Exception]:
    if depth > 0:
        for name, part in _parts(value):
            if id(part) in seen:
                continue
            seen.add(id(part))
            try:
                pickle.dumps(part)
            except Exception as inner:
                return _find(f"{path}{name}", part, inner, seen, depth - 1)
    return path, value, error


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What pickle would visit inside ``value``."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, type):
        return []
    bound = getattr(value, "__self__", None)
    if bound is not None and callable(value):
        return [(f".{value.__name__}.__self__", bound)]
    try:
        state = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:
        state = None
    parts: list[tuple[str, Any]] = []
    if isinstance(state, tuple) and len(state) > 2:
        inside = state[2]
        for item in inside if isinstance(inside, tuple) else (inside,):
            if isinstance(item, dict):
                parts += [(f".{key}", part) for key, part in item.items()]
    elif hasattr(value, "__dict__"):
        parts = [(f".{key}", part) for key, part in vars(value).items()]
    # torch keeps submodules in a dict of that name; people know them as attributes.
    unwrapped: list[tuple[str, Any]] = []
    for name, part in parts:
        if name == "._modules" and isinstance(part, dict):
            unwrapped += [(f".{key}", module) for key, module in part.items()]
        else:
            unwrapped.append((name, part))
    return unwrapped


def _short(value: Any) -> str:
    try:
        text = repr(value).splitlines()[0]
    except Exception:
        text = "?"
    return text if len(text) <= 80 else f"{text[:77]}..."
