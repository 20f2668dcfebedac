"""What there is to move: the GPUs of a job, their bounds, and who may move them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ntp.nvml.readings import Reading
from lightning_ntp.power.answers import Answer
from lightning_ntp.power.control import Domain, GpuBounds
from lightning_ntp.power.loop.settings import PowerSettings
from lightning_ntp.power.loop.writing import Writer

_POINT_W = 1.0
"""Of a device whose power cannot be had: its only limit. Its pace can be measured all the same."""


@dataclass(frozen=True)
class Levers:
    """What was found.

    Args:
        domain: The GPUs, with their bounds and budget.
        of_slot: Slot -> the GPU's name in the domain.
        writer: Moves them; None if nothing can be moved, or shall be.
        powered: Whether limits are known at all.
    """

    domain: Domain
    of_slot: Mapping[int, str]
    writer: Writer | None
    powered: bool


def find_levers(
    settings: PowerSettings,
    job: str,
    homes: Mapping[int, int],
    named: Mapping[int, str],
    readings: Mapping[str, Reading],
    alive: Collection[int],
    writes: bool,
    deny: Callable[[str], None],
) -> Levers:
    """Take a job's GPUs.

    Args:
        settings: See there.
        job: For others who want the same GPUs.
        homes: Slot -> replica at launch; spares have one of their own below 0.
        named: Slot -> UUID, of those that are known.
        readings: The driver's newest, by UUID.
        alive: Slots that work, or are about to. The GPU of another one may be off the bus: then it is not taken, and
            holds its share of the budget.
        writes: Whether limits are to be written.
        deny: Called with the reason if they cannot be.

    Raises:
        BudgetError: If budget or ceiling do not fit the hardware.
    """
    # a device that several slots share has no power that is one's own
    own = {slot: gpu for slot, gpu in named.items() if slot in homes and gpu and [*named.values()].count(gpu) == 1}
    of_slot = {slot: own.get(slot, f"slot {slot}") for slot in homes}
    gpus = [*own.values()]
    values: dict[str, Mapping[str, Any]] = {
        gpu: _as_found(readings[gpu]) for gpu in gpus if gpu in readings and "power_limit_set_w" in readings[gpu].values
    }
    writer = None
    if writes and len(gpus) == len(homes):
        writer = Writer(job, settings.socket, settings.ceiling != "found", settings.locked_clocks)
        answers = writer.open(gpus)
        needed = {gpu for slot, gpu in own.items() if slot in alive}
        taken = {gpu: _as_taken(each) for gpu, each in answers.items() if each.done}
        wrong = [each for each in answers.values() if not each.done and (each.gpu in needed or not taken)]
        if wrong:
            writer.close()
            writer = None
            deny(f"{len(wrong)} of {len(gpus)} GPUs cannot be had, {wrong[0].gpu} for one: {wrong[0].why}")
        else:
            # of one that says nothing: no less than its fellows
            most = max(taken.values(), key=lambda each: float(each["limit_w"]))
            values = {gpu: taken.get(gpu, most) for gpu in gpus}
    powered = bool(gpus) and all(gpu in values for gpu in gpus) and len(gpus) == len(homes)
    node = socket.gethostname()
    try:
        bounds = tuple(
            settings.bounds(of_slot[slot], replica, node, values[of_slot[slot]], writer is not None)
            if powered
            else GpuBounds(of_slot[slot], replica, node, _POINT_W, _POINT_W, _POINT_W)
            for slot, replica in homes.items()
        )
        budget = settings.budget if writer is not None else None
        return Levers(Domain(bounds, budget, settings.lend, settings.lost_draw), of_slot, writer, powered)
    except BaseException:
        if writer is not None:
            writer.close()
        raise


def _as_taken(answer: Answer) -> Mapping[str, Any]:
    clocks = answer.values.get("clocks_mhz")
    return {**answer.values, "max_clock_mhz": clocks[1] if clocks else None}


def _as_found(reading: Reading) -> Mapping[str, Any]:
    """As much as a look says: no bounds, so nothing can be moved."""
    limit = reading.values["power_limit_set_w"]
    return {"limit_w": limit, "minimum_w": limit, "maximum_w": limit}
