"""What a user says about power."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_ntp.power.control import GpuBounds, Lever

Straggler = Literal["power+rebalance", "power", "rebalance", "none"]
"""What is done about a replica that is slower than the others."""
Denied = Literal["rebalance", "warn", "error"]
"""What is done if limits may not be written."""
Ceiling = float | Literal["found", "maximum"]
"""The highest limit: in watts, the one that was found, or the highest that the hardware takes."""

_MOST_W = 100_000.0
_LEAST_INTERVAL = 0.01
"""Seconds: the driver is asked twice in each."""


@dataclass(frozen=True)
class PowerSettings:
    """See :class:`lightning_ntp.callbacks.PowerManager`.

    Raises:
        ValueError: If one of them is out of range; the message names it.
    """

    straggler: Straggler = "power+rebalance"
    budget: float | None = None
    lend: Literal["replica", "node"] = "replica"
    lost_draw: float | None = None
    ceiling: Ceiling = "found"
    margin: float = 4.0
    max_temperature: float | None = None
    levers: tuple[Lever, ...] = ("power_limit", "clocks")
    locked_clocks: tuple[int, int] | None = None
    profiles: tuple[int, ...] = ()
    on_denied: Denied = "rebalance"
    interval: float = 2.0
    socket: str | None = None
    gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _choice("straggler", self.straggler, get_args(Straggler))
        _choice("lend", self.lend, ("replica", "node"))
        _choice("on_denied", self.on_denied, get_args(Denied))
        if not self.levers or not set(self.levers) <= set(get_args(Lever)):
            raise ValueError(f"levers={list(self.levers)!r} must be some of {list(get_args(Lever))}")
        if isinstance(self.ceiling, str):
            _choice("ceiling", self.ceiling, ("found", "maximum"), " or a number of watts")
        else:
            _between("ceiling", self.ceiling, 0, _MOST_W, "watts, 'found' or 'maximum'")
        _between("budget", self.budget, 0, float("inf"), "watts, or None", optional=True)
        _between("margin", self.margin, 0, 60, "degrees C")
        _between("max_temperature", self.max_temperature, 20, 120, "degrees C, or None", optional=True)
        _between("interval", self.interval, _LEAST_INTERVAL - 1e-9, 600, "seconds")
        if self.lost_draw is not None and not (_is_number(self.lost_draw) and 0 <= self.lost_draw < _MOST_W):
            raise ValueError(f"lost_draw={self.lost_draw!r} must be watts of at least 0, or None")
        if self.socket is not None and not isinstance(self.socket, str):
            raise ValueError(f"socket={self.socket!r} must be a path, or None")
        _check_clocks(self.locked_clocks)
        if any(type(each) is not int or not 0 <= each < 256 for each in self.profiles):
            raise ValueError(f"profiles={list(self.profiles)!r} must be numbers of workload power profiles, 0 to 255")
        for gpu in self.gpus:
            if not isinstance(gpu, str) or not gpu.startswith(("GPU-", "MIG-")):
                raise ValueError(f"gpus: {gpu!r} is no UUID as nvidia-smi -L prints them; one per slot, or None")
        if len({*self.gpus}) < len(self.gpus):
            raise ValueError(f"gpus={list(self.gpus)!r} names a GPU twice: each slot has one of its own")

    @property
    def writes(self) -> bool:
        """Whether power may be used."""
        return "power" in self.straggler.split("+")

    @property
    def moves_samples(self) -> bool:
        """Whether samples may be moved."""
        return "rebalance" in self.straggler.split("+")

    def bounds(self, gpu: str, replica: int, node: str, values: Mapping[str, Any], writes: bool) -> GpuBounds:
        """What may be done to a GPU.

        Args:
            gpu: UUID.
            replica: Where it works.
            node: Where it is.
            values: ``limit_w``, ``minimum_w``, ``maximum_w`` and perhaps ``max_clock_mhz``, as they were found.
            writes: Whether its levers can be moved at all.

        Raises:
            BudgetError: If the ceiling is out of the hardware's bounds.
        """
        start, maximum = float(values["limit_w"]), float(values["maximum_w"])
        ceiling = self.ceiling if not isinstance(self.ceiling, str) else maximum if self.ceiling == "maximum" else start
        locked = None if self.locked_clocks is None else self.locked_clocks[1]
        top = values.get("max_clock_mhz")
        return GpuBounds(
            gpu,
            replica,
            node,
            start,
            float(values["minimum_w"]),
            maximum,
            ceiling if writes else start,
            locked if writes else None,
            None if top is None else int(top),
        )


def _choice(name: str, value: object, known: Collection[str], more: str = "") -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} must be one of {sorted(known)}{more}")


def _between(name: str, value: object, above: float, most: float, unit: str, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not (_is_number(value) and above < value <= most and value < float("inf")):  # type: ignore[operator]
        limit = f", up to {most:g}" if most < float("inf") else ""
        raise ValueError(f"{name}={value!r} must be a number above {max(above, 0):g}{limit}: {unit}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_clocks(clocks: object) -> None:
    if clocks is None:
        return
    whole = isinstance(clocks, tuple) and len(clocks) == 2 and all(type(each) is int for each in clocks)
    if not (whole and isinstance(clocks, tuple) and 0 < clocks[0] <= clocks[1]):
        raise ValueError(f"locked_clocks={clocks!r} must be two whole numbers of MHz, the lower one first, or None")
