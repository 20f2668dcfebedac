"""On which device a rank works, in the driver's words."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from lightning_ntp.launch import jobs


def note_device(directory: Path, slot: int, device: torch.device) -> None:
    """Let those who watch the job's devices know which is this rank's. CUDA devices only."""
    if device.type == "cuda":
        with contextlib.suppress(OSError):
            jobs.write_whole(jobs.device_note(directory, slot), device_uuid(device.index or 0))


def device_uuid(index: int) -> str:
    """UUID of a CUDA device as the driver writes it; of a MIG instance, its own."""
    # torch gives the digits alone, for both kinds
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].strip().startswith("MIG-"):
        return visible[index].strip()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
