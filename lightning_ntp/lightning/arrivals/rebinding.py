"""Carries Python objects from one rank to another: what both have becomes a reference, everything else a copy.

A pickle of a callback would drag its trainer along, and the trainer the whole model. Here the objects that every rank
has built from the same script (trainer, modules, parameters, optimizers, loaders) are written as names and read as the
reader's own. Tensors go through host memory; those on the writer's accelerator land on the reader's.
"""

from __future__ import annotations

import io
import pickle
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ntp.lightning.steps.attribute_copies import COPIED_BYTES

OBJECTS = 1_000_000
"""More objects than these are not copied: they take half a second. A tensor counts as several."""
_TENSOR_COUNTS = 30
_SMALL_BYTES = 1 << 20

Name = tuple[str | int, ...]


class Items(NamedTuple):
    """Named values, packed."""

    whole: bytes | None
    """In one piece, which keeps what they share; None if that is too large."""
    each: dict[str, bytes]
    """By name, in case the whole cannot be read; empty if nothing may be missing."""


_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_PLAIN = (
    *(dict, list, tuple, set, frozenset, deque, UserDict, UserList, range, slice, bytearray),
    *(Enum, PurePath, date, time, timedelta, np.ndarray, np.generic, np.dtype, torch.dtype),
    # written by their names
    *(type, FunctionType, BuiltinFunctionType),
)


class References:
    """Names for the objects that all ranks of a job have alike.

    Args:
        trainer: Set up: its module is cut, its optimizers are made.
        more: Further objects, by a name that means the same on all ranks.
    """

    def __init__(self, trainer: Trainer, more: Mapping[Name, Any] | None = None) -> None:
        self._objects: dict[Name, Any] = {}
        self._names: dict[int, Name] = {}
        for name, each in (*_objects_of(trainer), *(more or {}).items()):
            if type(each) not in _ATOMS:
                self._objects[name] = each
                self._names.setdefault(id(each), name)

    def name_of(self, each: Any) -> Name | None:
        """The name of an object; None if it has to be copied."""
        return self._names.get(id(each))

    def __getitem__(self, name: Name) -> Any:
        if name not in self._objects:
            raise pickle.UnpicklingError(f"there is no {' '.join(map(str, name))} here")
        return self._objects[name]


def _objects_of(trainer: Trainer) -> Iterator[tuple[Name, Any]]:
    module = trainer.lightning_module
    yield ("trainer",), trainer
    yield from ((("module", path), child) for path, child in module.named_modules(remove_duplicate=False))
    yield from ((("parameter", name), p) for name, p in module.named_parameters(remove_duplicate=False))
    yield from ((("buffer", name), b) for name, b in module.named_buffers(remove_duplicate=False))
    wrapped = module.optimizers() if trainer.optimizers else []
    lists: dict[str, Any] = {
        "optimizer": trainer.optimizers,
        "wrapped optimizer": wrapped if isinstance(wrapped, list) else [wrapped],
        "lr scheduler": [config.scheduler for config in trainer.lr_scheduler_configs],
        "lr scheduler's configuration": trainer.lr_scheduler_configs,
        "callback": trainer.callbacks,  # type: ignore[attr-defined]
        "logger": trainer.loggers,
        "training loader": _leaves(trainer.train_dataloader),
        "validation loader": _leaves(trainer.val_dataloaders),
    }
    for kind, each in lists.items():
        for number, one in enumerate(each):
            yield (kind, number), one
            for part in ("dataset", "sampler", "batch_sampler") if kind.endswith("loader") else ():
                yield (kind, number, part), getattr(one, part, None)
    yield ("datamodule",), trainer.datamodule  # type: ignore[attr-defined]
    for kind, owner in (("trainer", trainer), ("strategy", trainer.strategy)):
        yield (kind,), owner
        for name, part in vars(owner).items():
            if hasattr(part, "__dict__") and not isinstance(part, type | FunctionType | Enum):
                yield (kind, name), part
    yield ("precision plugin",), trainer.precision_plugin
    yield ("accelerator",), trainer.accelerator


def _leaves(loaders: Any) -> Iterator[Any]:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for each in loaders:
            yield from _leaves(each)
    elif loaders is not None:
        yield loaders


class Carrier:
    """Packs values on one rank, and unpacks them on another.

    Args:
        references: The names of what both have.
        device: This rank's own.

    Attributes:
        skipped: What could not be carried, and why.
    """

    def __init__(self, references: References, device: torch.device) -> None:
        self._references, self._device = references, device
        self.skipped: list[str] = []

    def pack(self, value: Any, plain: bool = False, limit: int | None = None) -> bytes:
        """Write one value.

        Args:
            value: What to write.
            plain: Whether only numbers, texts, tensors and containers of them may be in it.
            limit: The most bytes; also sets :data:`OBJECTS`.

        Raises:
            Exception: Whatever the value's own way to be pickled raises.
        """
        file = _LimitedFile(limit)
        _Pickler(file, self._references, self._device, plain, limit).dump(value)
        return file.getvalue()

    def pack_items(
        self, owner: str, items: Mapping[str, Any], plain: bool = False, limit: int | None = COPIED_BYTES
    ) -> Items:
        """Write named values; those that cannot be written are left out and told of in :attr:`skipped`.

        Args:
            owner: Whose they are, for people.
            items: The values.
            plain: As in :meth:`pack`.
            limit: The most bytes of each, as in :meth:`pack`. None: all of them matter.
        """
        if limit is None:
            try:
                return Items(self.pack(dict(items), plain), {})
            except Exception:  # a user's object may raise anything: look for the one that does
                pass
        each, found = {}, {}
        for name, value in items.items():
            try:
                each[name] = self.pack(value, plain, limit)
                found[name] = value
            except Exception as error:
                self.skip(owner, name, error)
        small = sum(map(len, each.values())) <= _SMALL_BYTES
        return Items(self.pack(found, plain) if small else None, each)

    def unpack(self, content: bytes) -> Any:
        """Read what :meth:`pack` has written.

        Reading a pickle can run anything: read only what came through the job's own store, which nobody but its ranks
        writes to.
        """
        return _Unpickler(io.BytesIO(content), self._references, self._device).load()

    def unpack_items(self, owner: str, items: Items) -> dict[str, Any]:
        """Read what :meth:`pack_items` has written; what cannot be read is told of in :attr:`skipped`."""
        if items.whole is not None:
            try:
                whole: dict[str, Any] = self.unpack(items.whole)
                return whole
            except Exception as error:
                if not items.each:
                    self.skip(owner, "", error)
        values = {}
        for name, content in items.each.items():
            try:
                values[name] = self.unpack(content)
            except Exception as error:
                self.skip(owner, name, error)
        return values

    def skip(self, owner: str, name: str, why: object) -> None:
        """Note that something is not carried."""
        self.skipped.append(f"{owner}.{name} ({why})" if name else f"{owner} ({why})")


class _TooLarge(Exception):
    pass


def _too_large(limit: int) -> _TooLarge:
    return _TooLarge(f"larger than {limit >> 20} MiB")


class _LimitedFile(io.BytesIO):
    """Ends a pickling early: a dataset of many gigabytes is not written to find out how large it is."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self._limit is not None and self.tell() + len(data) > self._limit:
            raise _too_large(self._limit)
        return super().write(data)


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, references: References, device: torch.device, plain: bool, limit: int | None) -> None:
        super().__init__(file, protocol=5)
        self._references, self._device, self._plain, self._limit = references, device, plain, limit
        self._left = OBJECTS

    def persistent_id(self, obj: Any) -> Name | None:
        self._left -= 1
        if self._left < 0 and self._limit is not None:
            raise _TooLarge(f"more than {OBJECTS} objects")
        return None if type(obj) in _ATOMS else self._references.name_of(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, torch.device):
            return (_own_device, ()) if self._is_own(obj) else NotImplemented
        if isinstance(obj, RemovableHandle):
            raise pickle.PicklingError("a handle of a hook, which each rank has its own of")
        if self._plain and not isinstance(obj, _PLAIN):
            raise pickle.PicklingError(f"there is a {type(obj).__name__} in it")
        return NotImplemented

    def _is_own(self, device: torch.device) -> bool:
        return device.type == self._device.type != "cpu"

    def _reduce_tensor(self, tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
            raise pickle.PicklingError(f"a tensor of the type {type(tensor).__name__}, layout {tensor.layout}")
        if tensor.device.type not in ("cpu", self._device.type):
            raise pickle.PicklingError(f"a tensor on {tensor.device}")
        if self._limit is not None and tensor.nbytes > self._limit:
            raise _too_large(self._limit)
        self._left -= _TENSOR_COUNTS
        values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return _tensor, (
            values.reshape(-1).view(torch.uint8).numpy().tobytes(),
            tensor.dtype,
            tuple(tensor.shape),
            self._is_own(tensor.device),
            tensor.requires_grad and tensor.is_leaf,
            isinstance(tensor, nn.Parameter),
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, references: References, device: torch.device) -> None:
        super().__init__(file)
        self._references, self._device = references, device

    def persistent_load(self, name: Any) -> Any:
        return self._references[name]

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _own_device.__name__:
            return lambda: self._device
        if module == __name__ and name == _tensor.__name__:
            return partial(_tensor, self._device)
        return super().find_class(module, name)


def _tensor(
    device: torch.device,
    values: bytes,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    own: bool,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    # bytearray: torch warns of memory that cannot be written to
    flat = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if own:
        tensor = tensor.to(device)
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _own_device() -> torch.device:
    raise pickle.UnpicklingError("read by a Carrier only")


def put_attributes(own: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set attributes. Containers stay the same objects, with other contents: others may hold them.

    Args:
        own: The ``vars`` of the owner.
        values: The new values.
    """
    for name, value in values.items():
        held: Any = own.get(name)
        if held is value:  # by a reference
            continue
        if type(held) is not type(value) or not isinstance(held, list | deque | dict | set):
            own[name] = value
        elif isinstance(held, dict):
            # by the class of the builtin: a subclass may do more on assignment
            dict.clear(held)
            dict.update(held, value)
        else:
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(value)


def names_of(parameters: Iterable[tuple[str, Tensor]]) -> dict[Tensor, str]:
    """The first name of every parameter."""
    names: dict[Tensor, str] = {}
    for name, parameter in parameters:
        names.setdefault(parameter, name)
    return names
