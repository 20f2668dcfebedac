"""Lines over time as an SVG, written by hand: no plotting package is needed for a few panels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BETWEEN, BOTTOM = 860, 150, 70, 150, 30, 34, 40
COLOURS = ("#1b6ca8", "#c8511b", "#3d8b37", "#7a4fa3", "#8a6d1a", "#555555")


@dataclass(frozen=True)
class Panel:
    """One plot: name of a line -> its values, one for each time."""

    title: str
    lines: Mapping[str, Sequence[float]]


def draw(title: str, times: Sequence[float], panels: Sequence[Panel], marks: Mapping[str, float], unit: str) -> str:
    """All panels below each other over one time axis.

    Args:
        title: Above all.
        times: Where the values are, ascending.
        panels: See there.
        marks: Name -> a time that is marked in all panels.
        unit: Of the times.
    """
    height = TOP + len(panels) * (HEIGHT + BETWEEN) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif"'
        f' font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    first, last = times[0], times[-1]

    def across(time: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (time - first) / (last - first)

    for number, panel in enumerate(panels):
        top = TOP + number * (HEIGHT + BETWEEN) + 18
        parts += _panel(panel, times, top, across)
        for name, time in marks.items():
            x = across(time)
            parts.append(f'<path d="M{x:.1f} {top}v{HEIGHT}" stroke="#999" stroke-dasharray="4 3"/>')
            if number == 0:
                parts.append(f'<text x="{x + 3:.1f}" y="{top - 5}" fill="#666">{escape(name)}</text>')
    bottom = TOP + len(panels) * (HEIGHT + BETWEEN) + 4
    for tick in _ticks(first, last, 8):
        parts.append(f'<text x="{across(tick):.1f}" y="{bottom}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 18}" text-anchor="middle">{escape(unit)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, times: Sequence[float], top: float, across: object) -> list[str]:
    assert callable(across)
    values = [value for line in panel.lines.values() for value in line]
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 1.0
    low, high = low - room, high + room
    right = WIDTH - RIGHT
    parts = [
        f'<text x="{LEFT}" y="{top - 5}">{escape(panel.title)}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{right - LEFT}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
    ]
    for tick in _ticks(low, high, 4):
        y = top + HEIGHT * (high - tick) / (high - low)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for place, (name, line) in enumerate(panel.lines.items()):
        points = " ".join(
            f"{across(time):.1f},{top + HEIGHT * (high - value) / (high - low):.1f}"
            for time, value in zip(times, line, strict=True)
        )
        colour = COLOURS[place % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<text x="{right + 8}" y="{top + 14 + 16 * place}" fill="{colour}">{escape(name)}</text>')
    return parts


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two values, about so many."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    return [round(k * step, 10) for k in range(first, math.floor(high / step) + 1)]
