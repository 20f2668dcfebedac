"""What can be known to be wrong before a job starts."""

from __future__ import annotations

from lightning_ntp.nvml import inventory
from lightning_ntp.power.loop.settings import PowerSettings


def check_bounds(settings: PowerSettings, slots: int) -> None:
    """Hold ceiling, budget and named GPUs against the hardware. Takes ten seconds at most; no driver has no objection.

    Args:
        settings: See there.
        slots: How many GPUs the job takes.

    Raises:
        ValueError: If they do not fit, or a GPU is named that is not there.
    """
    ceiling = settings.ceiling
    if not settings.writes or not (settings.gpus or settings.budget or not isinstance(ceiling, str)):
        return
    found = {each.uuid: each for each in inventory().gpus if each.uuid}
    if not found:
        return
    if missing := [gpu for gpu in settings.gpus if gpu not in found]:
        raise ValueError(
            f"gpus names {', '.join(missing)}, which the driver of this machine does not have; nvidia-smi -L lists"
            " those that it has"
        )
    known = [each for gpu, each in found.items() if each.power_limits_w and gpu in (settings.gpus or found)]
    if not isinstance(ceiling, str):
        wrong = [each for each in known if not each.power_limits_w[0] <= ceiling <= each.power_limits_w[1]]
        if wrong and (settings.gpus or len(wrong) == len(known)):  # the job may have others
            lowest, highest = wrong[0].power_limits_w
            raise ValueError(
                f"ceiling={ceiling:g} W is not between {lowest:g} W and {highest:g} W, the lowest and the highest limit"
                f" that {wrong[0].uuid} takes: choose one in between, 'found' or 'maximum'"
            )
    least = sum(sorted(each.power_limits_w[0] for each in known)[:slots])
    if settings.budget is not None and len(known) >= slots and settings.budget < least:
        raise ValueError(
            f"budget={settings.budget:g} W is below {least:g} W, the sum of the lowest limits of {slots} GPUs: give"
            " more, or None for the sum of the limits at start"
        )
