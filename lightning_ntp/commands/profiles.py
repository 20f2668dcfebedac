"""What ``lightning-ntp doctor`` says of workload power profiles: one line for each kind of GPU."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_ntp.nvml import Gpu, Profiles
from lightning_ntp.nvml.profiles import show_profiles


def profile_lines(gpus: Iterable[Gpu]) -> list[str]:
    """A line for GPUs that have the same name and say the same of their profiles.

    Args:
        gpus: Of the inventory; those that have not said even their name are left out.
    """
    kinds: dict[str, list[int]] = {}
    for gpu in gpus:
        if gpu.name and gpu.reading is not None:
            kinds.setdefault(f"{gpu.name}: {_text(gpu.profiles)}", []).append(gpu.index)
    return [f"GPU {_show(indexes)} {text}" for text, indexes in kinds.items()]


def _text(profiles: Profiles | None) -> str:
    if profiles is None:
        return "no workload power profiles"
    text = f"workload power profiles: {show_profiles(profiles.supported)}"
    text += f"; requested: {show_profiles(profiles.requested)}"
    if profiles.enforced != profiles.requested:
        text += f"; enforced: {show_profiles(profiles.enforced)}"
    return text


def _show(indexes: list[int]) -> str:
    """``0-3, 5``."""
    ranges: list[list[int]] = []
    for index in indexes:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
