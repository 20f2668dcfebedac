"""Checkpoint files that are whole or not there, whatever happens to the rank that writes them."""

from __future__ import annotations

import contextlib
import glob
import io
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_ntp.launch import progress


class WholeFileIO(TorchCheckpointIO):
    """Writes beside the file and puts the new one in its place at once.

    Lightning 2.6.6 makes up the whole file in memory, twice, and moves it from the temporary directory, which is a copy
    where that is another file system. Remote paths (``s3://...``) are left to it.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        beside = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with _WatchedFile(io.FileIO(beside, "wb")) as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise


class _WatchedFile(io.BufferedWriter):
    """A file whose every write shows that the rank goes on."""

    @override
    def write(self, content: Any) -> int:
        written = super().write(content)
        progress.current().beat()
        return written


def _remove_leftovers(target: Path) -> None:
    """Of a rank that died while it wrote this file. One rank of a job writes at a time."""
    for part in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with contextlib.suppress(OSError):
            part.unlink()
