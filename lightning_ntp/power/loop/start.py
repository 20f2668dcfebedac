"""What can be known to be wrong before a job starts."""

from __future__ import annotations

from lightning_ntp.power.bounds import PowerBounds, power_bounds
from lightning_ntp.power.loop.settings import PowerSettings


def check_bounds(settings: PowerSettings, slots: int) -> None:
    """Hold ceiling and budget against the hardware. Takes ten seconds at most; without a driver it says nothing.

    Args:
        settings: See there.
        slots: How many GPUs the job takes.

    Raises:
        ValueError: If they do not fit, or a GPU is named that is not there.
    """
    if not settings.writes:
        return
    found = power_bounds(settings.gpus or None)
    known = {gpu: bounds for gpu, bounds in found.items() if isinstance(bounds, PowerBounds)}
    if not known:
        return
    ceiling = settings.ceiling
    if not isinstance(ceiling, str):
        fits = [gpu for gpu, each in known.items() if each.minimum_w <= ceiling <= each.maximum_w]
        if len(fits) < (len(known) if settings.gpus else 1):
            gpu, each = next((gpu, each) for gpu, each in known.items() if gpu not in fits)
            raise ValueError(
                f"ceiling={ceiling:g} W is not between {each.minimum_w:g} W and {each.maximum_w:g} W, the lowest and"
                f" the highest limit that {gpu} takes: choose one in between, 'found' or 'maximum'"
            )
    least = sum(sorted(each.minimum_w for each in known.values())[:slots])
    if settings.budget is not None and len(known) >= slots and settings.budget < least:
        raise ValueError(
            f"budget={settings.budget:g} W is below {least:g} W, the sum of the lowest limits of {slots} GPUs: give"
            " more, or None for the sum of the limits at start"
        )
