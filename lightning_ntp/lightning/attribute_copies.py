"""What user code keeps in attributes of its module, counters and lists of outputs: put back when a step is undone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
LONG = 4096
"""From this length on a list is taken to grow only: it is cut back, rather than copied in every step."""


class AttributeRecorder:
    """Remembers a module's own plain attributes: numbers, texts, lists, deques, dictionaries and sets.

    Not those of its submodules, and nothing else that they may hold, such as tensors: ``ntp_snapshot`` is for them.
    Containers are remembered shallowly.
    """

    def __init__(self) -> None:
        self._module: LightningModule | None = None

    def look_around(self, module: LightningModule) -> None:
        """Remember attributes of this module."""
        self._module = module

    def take(self) -> Callable[[], None]:
        """Remember the attributes as they are now; the result puts them back."""
        assert self._module is not None
        own = self._module.__dict__
        plain = {k: v for k, v in own.items() if type(v) in _PLAIN and k not in _OF_LIGHTNING}
        held = [_held(v) for k, v in own.items() if isinstance(v, _CONTAINERS) and k not in _OF_LIGHTNING]

        def restore() -> None:
            own.update(plain)
            for put_back in held:
                put_back()

        return restore


def _held(container: Any) -> Callable[[], None]:
    length = len(container)
    if isinstance(container, list) and length > LONG:

        def cut() -> None:
            del container[length:]

        return cut
    copy = dict(container) if isinstance(container, dict) else list(container)

    def put_back() -> None:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(copy)

    return put_back


_CONTAINERS = (list, deque, dict, set)

# Lightning 2.6.6 and torch 2.13 keep their own there; what of it a step changes is put back elsewhere
_OF_LIGHTNING = frozenset(vars(LightningModule()))
