"""Checkpoint files that are whole or not there, whatever happens to the rank that writes them."""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_ntp.launch import progress


class CheckpointError(OSError):
    """A checkpoint could not be written: no rank's fault, since any other one would write to the same place."""

    __plain_reason__ = True  # no bug: the supervisor prints the message alone


class WholeFileIO(TorchCheckpointIO):
    """Writes beside the file and puts the new one in its place at once.

    Lightning 2.6.6 makes up the whole file in memory, twice, and moves it from the temporary directory, which is a copy
    where that is another file system. Remote paths (``s3://...``) are left to it.
    """

    half_way: Callable[[], None] | None = None
    """Called when part of the file is written, for fault injection."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        beside = _beside(target)
        raw = _WatchedFile(beside, self.half_way)
        try:
            with io.BufferedWriter(raw) as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            if raw.failure is not None and error is not raw.failure:
                raise raw.failure from error  # torch.save may tell another story
            raise


def put_link(target: str, link: str) -> None:
    """Make a relative link, in place of whatever is there; a copy where the file system has no links."""
    place = Path(link)
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    _remove_leftovers(place)
    beside = _beside(place)
    try:
        os.symlink(os.path.relpath(target, place.parent), beside)
    except OSError:
        shutil.copy(target, beside)
    os.replace(beside, place)


def newest_checkpoint(trainer: Trainer | None) -> str:
    """Which checkpoint to start again from, for people."""
    paths = [
        path
        for callback in (trainer.checkpoint_callbacks if trainer is not None else ())
        for path in (getattr(callback, "last_model_path", ""), getattr(callback, "best_model_path", ""))
        if path and os.path.exists(path)
    ]
    if not paths:
        return "this run has saved none"
    return f"newest checkpoint: {max(paths, key=os.path.getmtime)}"


def why_not_written(error: OSError) -> str:
    """The reason as the operating system gives it."""
    name = errno.errorcode.get(error.errno or 0, "")
    reason = error.strerror or str(error) or type(error).__name__
    reason = f"{reason} ({name})" if name else reason
    return f"{reason}: {error.filename}" if error.filename is not None else reason


class _WatchedFile(io.FileIO):
    """A new file whose every write shows that the rank goes on, and which remembers why one failed."""

    def __init__(self, path: Path, half_way: Callable[[], None] | None) -> None:
        super().__init__(path, "wb")
        self._half_way = half_way
        self.failure: OSError | None = None

    @override
    def write(self, content: Any) -> int:
        try:
            written = super().write(content)
        except OSError as error:
            self.failure = error
            raise
        progress.current().beat()
        if self._half_way is not None:
            half_way, self._half_way = self._half_way, None
            half_way()
        return written


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.part")


def _remove_leftovers(target: Path) -> None:
    """Of a rank that died while it wrote this file. One rank of a job writes at a time."""
    for part in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with contextlib.suppress(OSError):
            part.unlink()
