"""What somebody wants done with a slot, a device or a host, as a line of text or an object of JSON.

::

    slot 3 drain maintenance at 18:00
    gpu GPU-7d2f0c3e-... suspect fan is loud
    host node7 drain the rack is moved      # every slot of the job there
    {"slot": 3, "action": "drain", "text": "maintenance at 18:00"}

A line begins with ``slot``, ``gpu`` or ``host`` and its number, UUID or name; then comes what shall be done
(``ignore``, ``log``, ``suspect``, ``restart``, ``drain``, ``dead``); the rest of the line is for people. An object has
the same as fields, and may name a host besides a slot or a gpu: then it is about that host's. Other fields are of no
interest, and so are GPUs on which no slot of the job works.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ntp.health.conditions import one_line
from lightning_ntp.health.findings import Action
from lightning_ntp.health.overrides import kind, shown

MOST_ENTRIES = 10_000
"""Who asks for more at once means something else."""
_MOST_SLOTS = 1_000_000
_LONGEST_NAME = 200
_EXAMPLE = "'slot 3 drain maintenance at 18:00'"


class EntryError(ValueError):
    """What was written cannot be understood; says why, and what to write instead."""


@dataclass(frozen=True)
class Entry:
    """What somebody wants.

    Args:
        action: What.
        text: Why, for people.
        slot: About which slot; -1 if about a device or a host.
        gpu: About which device.
        host: On which host; empty if on any.
    """

    action: Action
    text: str = ""
    slot: int = -1
    gpu: str = ""
    host: str = ""


def parse_line(line: str) -> Entry | None:
    """A line of text; None if it is empty or a comment.

    Raises:
        EntryError: If it says nothing that can be understood.
    """
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    if line.startswith("{"):
        return parse_object(parse_json(line))
    words = line.split(maxsplit=3)
    about = words[0].lower()
    if about not in ("slot", "gpu", "host"):
        raise EntryError(f"{shown(words[0])} is none of 'slot', 'gpu', 'host': write {_EXAMPLE}, or an object of JSON")
    if len(words) < 3:
        raise EntryError(f"{shown(line)} does not say which {about}, and what to do: write {_EXAMPLE}")
    named: Any = words[1]
    if about == "slot":
        if not (named.isascii() and named.isdecimal() and len(named) < 10):
            raise EntryError(f"{shown(named)} is no number of a slot: write {_EXAMPLE}")
        named = int(named)
    return parse_object({about: named, "action": words[2], "text": words[3] if len(words) > 3 else ""})


def parse_json(text: str) -> Any:
    """JSON, in which no name is there twice.

    Raises:
        EntryError: If it is none.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise EntryError("it is nested too deeply") from None
    except EntryError:
        raise
    except ValueError as error:  # also a number of too many digits
        raise EntryError(f"it is no JSON: {one_line(str(error))}") from None


def parse_object(content: object) -> Entry:
    """An object of JSON.

    Raises:
        EntryError: If it says nothing that can be understood.
    """
    if not isinstance(content, Mapping):
        raise EntryError(f"{kind(content)} where an object with 'slot', 'gpu' or 'host' was expected")
    slot, gpu, host = (content.get(name) for name in ("slot", "gpu", "host"))
    if slot is not None and gpu is not None:
        raise EntryError(f"it names both a slot, {shown(slot)}, and a gpu, {shown(gpu)}: name one")
    if slot is None and gpu is None and host is None:
        raise EntryError(f"it names neither 'slot' nor 'gpu' nor 'host': {shown(dict(content))}")
    if slot is not None and (isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < _MOST_SLOTS):
        raise EntryError(f"slot={shown(slot)} is no number of a slot")
    for name, value in (("gpu", gpu), ("host", host)):
        if value is not None and not _is_name(value):
            raise EntryError(f"{name}={shown(value)} is no name: a text without blanks")
    if gpu is not None and gpu.isdecimal():
        raise EntryError(f"gpu={gpu!r} is a number, which means another device to every process: write its UUID")
    action, text = content.get("action"), content.get("text")
    if action is None:
        raise EntryError(f"it does not say what to do: 'action' is one of {', '.join(map(str, Action))}")
    if text is not None and not isinstance(text, str):
        raise EntryError(f"text={kind(text)} where a text was expected")
    try:
        what = Action.of(action.lower())
    except (AttributeError, ValueError):
        names = ", ".join(map(str, Action))
        raise EntryError(f"action={shown(action)} is no action; there are {names}") from None
    return Entry(what, one_line(text or ""), -1 if slot is None else slot, gpu or "", host or "")


def is_this_host(named: str, host: str) -> bool:
    """Whether a host is called so. A name without a domain is the host of that name in any."""
    named, host = named.lower().rstrip("."), host.lower().rstrip(".")
    return named == host or "." not in named and named == host.partition(".")[0] or named.partition(".")[0] == host


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable() and " " not in value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise EntryError(f"{shown(name)} is there twice")
        content[name] = value
    return content
