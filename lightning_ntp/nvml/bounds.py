"""What may be done to the power of devices, asked once at the start of a job, in a short-lived process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ntp.nvml.child import ask_once


@dataclass(frozen=True)
class PowerBounds:
    """The power bounds of one device.

    Which range its clocks are locked to is not among them: no call of NVML says it.

    Args:
        start_w: The power limit that is set now, in W. (The one in force may be lower.)
        minimum_w: The lowest limit that the hardware takes, in W.
        maximum_w: The highest limit that the hardware takes, in W.
        max_clock_mhz: The highest graphics clock, in MHz; None if it does not say it.
    """

    start_w: float
    minimum_w: float
    maximum_w: float
    max_clock_mhz: int | None = None


def power_bounds(uuids: Sequence[str], seconds: float = 10.0) -> dict[str, PowerBounds | str]:
    """The power bounds of devices. Raises nothing: a text says why there are none.

    A job that was killed may have left a limit that is not the operator's: take the devices first
    (:meth:`lightning_ntp.power.client.PowerHelper.open`), which puts it back.

    Args:
        uuids: Of whole devices; MIG instances have no power of their own.
        seconds: The longest that it may take; a device that hangs holds up no other.

    Returns:
        By UUID, in the order of ``uuids``.
    """
    found: dict[str, PowerBounds | str] = {}
    problem = "the driver has not answered"
    for message in ask_once(["bounds", *uuids], seconds) if uuids else ():
        if "limits_mw" in message:
            start, lowest, highest = (limit / 1000 for limit in message["limits_mw"])
            found[message["bounds"]] = PowerBounds(start, lowest, highest, message["max_clock_mhz"])
        elif "bounds" in message:
            found[message["bounds"]] = message["why"]
        else:
            problem = message.get("off") or message.get("silent", problem)
    return {uuid: found.get(uuid, problem) for uuid in uuids}
