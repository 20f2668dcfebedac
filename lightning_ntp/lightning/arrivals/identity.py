"""What must be the same in all ranks of a job, so that a newcomer of another version is refused rather than let in."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_ntp.parallel import ShardedModel

_PACKAGES = ("lightning-ntp", "torch", "lightning", "torchmetrics", "numpy")
_TRAINER = ("max_epochs", "max_steps", "min_epochs", "min_steps", "precision", "limit_train_batches", "num_nodes")
_SHOWN = 3
"""Differences that are told; of more only the number."""
_OF_PYTHON = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


def describe_job(trainer: Trainer, model: ShardedModel) -> dict[str, str]:
    """What this rank runs, as texts by name: packages, the user's files, the model, its data and settings.

    Args:
        trainer: In a fit, before its first batch.
        model: The cut model.
    """
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[f"package {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[f"package {package}"] = "not installed"
    for path in sorted({*_users_files(trainer, model)}):
        found[f"file {path}"] = _checksum(path)
    for entry in model:
        kind = "trainable" if entry.parameter.requires_grad else "frozen"
        how = "whole" if entry.sharding.replicated else f"split in dimension {entry.sharding.dim}"
        found[f"parameter {entry.name}"] = f"{tuple(entry.shape)}, {entry.parameter.dtype}, {kind}, {how}"
    for number, optimizer in enumerate(trainer.optimizers):
        found[f"optimizer {number}"] = f"{type(optimizer).__name__}({_show(optimizer.defaults)})"
    for name in _TRAINER:
        found[f"Trainer({name})"] = repr(getattr(trainer, name, None))
    found["number of training batches"] = str(trainer.num_training_batches)
    for number, loader in enumerate(_loaders(trainer)):
        found[f"training data {number}"] = _describe_data(loader)
    return found


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """What differs between two descriptions, for people; empty if nothing does.

    Args:
        here: Of this rank.
        there: Of the job.
    """
    names = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    told = [f"{name} is {here.get(name, 'missing')} here and {there.get(name, 'missing')} there" for name in names]
    more = f"; and {len(told) - _SHOWN} more differences" if len(told) > _SHOWN else ""
    return "; ".join(told[:_SHOWN]) + more


def _users_files(trainer: Trainer, model: ShardedModel) -> Iterator[str]:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and sys.argv and sys.argv[0]:
        yield from _foreign(sys.argv[0])
    objects: list[Any] = [*model.module.modules(), *trainer.callbacks]  # type: ignore[attr-defined]
    objects += [trainer.datamodule, *(getattr(loader, "dataset", None) for loader in _loaders(trainer))]  # type: ignore[attr-defined]
    for kind in {type(each) for each in objects if each is not None}:
        for base in kind.__mro__:
            try:
                yield from _foreign(inspect.getfile(base))
            except (TypeError, OSError):  # built in, or of a notebook
                continue


def _foreign(file: str) -> Iterator[str]:
    """The file, if it is the user's own."""
    path = Path(file).absolute()
    ours = Path(__file__).parents[1]
    if path.is_file() and not any(path.is_relative_to(each) for each in (*_OF_PYTHON, ours)):
        yield str(path)


def _checksum(path: str) -> str:
    return "version " + hashlib.sha1(Path(path).read_bytes()).hexdigest()[:12]


def _loaders(trainer: Trainer) -> list[Any]:
    loaders = trainer.train_dataloader
    if isinstance(loaders, dict):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]


def _describe_data(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    try:
        size = f"{len(loader.dataset)} samples"  # type: ignore[arg-type]
    except TypeError:
        size = "of unknown size"
    return f"{type(loader.dataset).__name__}, {size}, batch_size={loader.batch_size}"


def _show(settings: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in settings.items() if isinstance(v, bool | int | float | str | tuple | type(None))}
    return ", ".join(f"{k}={v!r}" for k, v in sorted(plain.items()))
