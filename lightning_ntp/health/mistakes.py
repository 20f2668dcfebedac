"""Whose fault is a mistake of the program? It shows on all devices, or on the one that runs into it.

A bad device shows the same mistake alone, again and again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Occasion:
    """A mistake was made once, as one or several devices have shown it.

    Args:
        key: The mistake: ``xid.13``.
        places: Devices or slots that have shown it.
        times: How often a device has, if it was alone, on this occasion and others of the window; else 0.
        seconds: Since the first of those times.
    """

    key: str
    places: frozenset[str]
    times: int = 0
    seconds: float = 0.0


@dataclass
class _Mistake:
    begun: float = 0.0
    places: set[str] = field(default_factory=set)
    """Who has shown it on the occasion that is open."""
    occasions: deque[tuple[float, frozenset[str]]] = field(default_factory=deque)


class Mistakes:
    """Remembers which devices have shown which mistake.

    Args:
        together: Seconds in which all that is shown is one occasion: one fault in a kernel raises many XIDs on one
            device, and the same fault others on its peers.
        window: Seconds after which an occasion is forgotten.
    """

    def __init__(self, together: float, window: float) -> None:
        self._together, self._window = together, window
        self._mistakes: dict[str, _Mistake] = {}

    def show(self, key: str, where: str, now: float) -> None:
        """A device shows a mistake."""
        mistake = self._mistakes.setdefault(key, _Mistake())
        if not mistake.places:
            mistake.begun = now
        mistake.places.add(where)

    def ended(self, now: float) -> list[Occasion]:
        """Occasions that are over. To be called before what is shown at ``now``."""
        over = []
        for key, mistake in list(self._mistakes.items()):
            occasions = mistake.occasions
            while occasions and occasions[0][0] < now - self._window:
                occasions.popleft()
            if mistake.places and now - mistake.begun >= self._together:
                places = frozenset(mistake.places)
                mistake.places.clear()
                occasions.append((mistake.begun, places))
                alone = len(places) == 1 and all(others == places for _, others in occasions)
                times, seconds = (len(occasions), now - occasions[0][0]) if alone else (0, 0.0)
                over.append(Occasion(key, places, times, seconds))
            elif not occasions and not mistake.places:
                del self._mistakes[key]
        return over

    def times(self, key: str, where: str) -> int:
        """How often a device has shown a mistake in the window."""
        mistake = self._mistakes.get(key)
        return 0 if mistake is None else sum(where in places for _, places in mistake.occasions)

    def forget(self, where: str) -> None:
        """A device is as good as new."""
        for mistake in self._mistakes.values():
            mistake.places.discard(where)
            kept = [(at, places - {where}) for at, places in mistake.occasions if places != {where}]
            mistake.occasions = deque(kept)
