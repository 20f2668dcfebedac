"""Reads a user's file of severities: whatever it holds, the answer comes soon, and names the line of a mistake."""

from __future__ import annotations

import os
import reprlib
import stat
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # Lightning depends on it

_MOST_BYTES = 65536
"""A file with a rule for everything, and comments, takes a third of that. PyYAML needs a second for so much."""
_BROKEN = (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, LookupError)
"""What PyYAML lets through of what its constructors raise: dates, numbers, deep nesting."""


class OverrideError(ValueError):
    """What a user has written about severities is wrong; says where and what to write instead."""


def read_overrides(path: Path) -> Any:
    """What a YAML file says; an empty mapping if it is empty.

    Raises:
        OverrideError: If it cannot be read, is no YAML, or has a name twice; with the file's name, and the line.
    """
    text = _read(path)
    try:
        loader = _UniqueLoader(text)
    except yaml.YAMLError as error:  # a character that YAML does not have
        at = getattr(error, "position", 0)
        raise OverrideError(f"{path}: line {text.count(chr(10), 0, at) + 1}: is no YAML: {_brief(error)}") from None
    try:
        content = loader.get_single_data()
    except OverrideError as error:
        raise OverrideError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = (mark.line if mark is not None else loader.line) + 1
        raise OverrideError(f"{path}: line {line}: is no YAML: {_brief(error)}") from None
    except _BROKEN as error:
        raise OverrideError(f"{path}: line {loader.line + 1}: is no YAML: {_brief(error)}") from None
    finally:
        loader.dispose()
    return {} if content is None else content


def shown(value: object) -> str:
    """``repr(value)``, short and at once, whatever it is: aliases in YAML make small files into endless values."""
    try:
        return _SHORT.repr(value)
    except Exception:  # an integer of too many digits, or what a user's own class does
        return f"<{type(value).__name__}>"


def kind(value: object) -> str:
    """A value that is of the wrong kind, in an error message."""
    return f"{type(value).__name__} {shown(value)}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 60, 60, 40


class _UniqueLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a mapping with a key that is there twice, of which PyYAML would silently keep the last."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except OverrideError:
            raise
        except _BROKEN as error:
            raise OverrideError(f"line {node.start_mark.line + 1}: is no YAML: {_brief(error)}") from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise OverrideError(f"line {node.start_mark.line + 1}: is no mapping, but is tagged as one")
        seen = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise OverrideError(f"line {line}: '<<' is not known here: write what it would merge")
            key = self.construct_object(key_node, deep=True)
            try:
                again = key in seen
            except TypeError:
                raise OverrideError(f"line {line}: {kind(key)} as a name") from None
            if again:
                raise OverrideError(f"line {line}: {shown(key)} is there twice")
            seen.add(key)
        return dict(super().construct_mapping(node, deep))


def _read(path: Path) -> str:
    try:
        # a pipe that nobody writes to would block for ever
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OverrideError(f"{path}: cannot be read: it is no regular file")
            content = file.read(_MOST_BYTES + 1)
    except OverrideError:
        raise
    except (OSError, ValueError) as error:  # a path with a zero byte
        raise OverrideError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > _MOST_BYTES:
        raise OverrideError(f"{path}: has more than {_MOST_BYTES} bytes: name only what differs from the defaults")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise OverrideError(f"{path}: line {line}: cannot be read: it is no UTF-8: {error.reason}") from None


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
