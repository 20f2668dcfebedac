"""Copies of a module's buffers: small ones at every step, large ones only when they change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SMALL_BYTES = 1 << 16
"""Up to this size copying is cheaper than asking: kernels may write statistics without counting a version."""


@dataclass(frozen=True, eq=False)
class BufferSlot:
    """A place for a buffer: the tensor in it may be replaced."""

    holder: dict[str, Tensor | None]
    name: str
    label: str


@dataclass
class _Copy:
    slot: BufferSlot
    tensor: Tensor
    version: int | None
    value: Tensor | None
    """None for a large buffer that never changed: it is not worth its memory."""


class BufferCopies:
    """All buffers at one moment."""

    def __init__(self, copies: list[_Copy]) -> None:
        self._copies = {copy.slot: copy for copy in copies}

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the tensors themselves, with the values of that moment.

        Raises:
            RuntimeError: If a large buffer that never changed before was changed.
        """
        for slot, copy in self._copies.items():
            if copy.value is None:
                if slot.holder.get(slot.name) is not copy.tensor or version_of(copy.tensor) != copy.version:
                    raise RuntimeError(
                        f"the buffer {slot.label!r} ({copy.tensor.nbytes} bytes) changed for the first time in the very"
                        " step that must be replayed, so there is no copy of it: return it from the module's"
                        " ntp_snapshot() and put it back in ntp_restore(state)"
                    )
                continue
            slot.holder[slot.name] = copy.tensor
            _assign(copy.tensor, copy.value)

    @torch.no_grad()
    def restore_values(self, slots: Iterable[BufferSlot]) -> None:
        """Put back the values of these slots, whatever tensor is there now; other shapes are left alone."""
        for slot in slots:
            copy, current = self._copies.get(slot), slot.holder.get(slot.name)
            if copy is not None and copy.value is not None and current is not None:
                if current.shape == copy.value.shape:
                    _assign(current, copy.value)

    def changed(self) -> set[BufferSlot]:
        """Slots whose tensor or values are other ones now."""
        return {
            slot
            for slot, copy in self._copies.items()
            if slot.holder.get(slot.name) is not copy.tensor
            or (copy.value is not None and not _same(copy.tensor, copy.value))
        }

    def differing(self, other: BufferCopies) -> set[BufferSlot]:
        """Slots with other values in another snapshot."""
        found = set()
        for slot, copy in self._copies.items():
            there = other._copies.get(slot)
            if there is None or copy.value is None or there.value is None or copy.value is there.value:
                continue
            if not _same(copy.value, there.value):
                found.add(slot)
        return found


class BufferRecorder:
    """Takes the copies, and shares those of unchanged large buffers between moments."""

    def __init__(self) -> None:
        self._slots: list[BufferSlot] = []
        self._large: dict[BufferSlot, _Copy] = {}
        self._judged: set[BufferSlot] = set()

    def look_around(self, module: nn.Module) -> None:
        """Find the buffers of a module; again when modules or buffers were added."""
        known = {(id(slot.holder), slot.name): slot for slot in self._slots}
        slots = []
        for path, child in module.named_modules():
            for name in child._buffers:
                label = f"{path}.{name}" if path else name
                slots.append(known.get((id(child._buffers), name)) or BufferSlot(child._buffers, name, label))
        self._slots = slots
        self._large = {slot: copy for slot, copy in self._large.items() if slot in set(slots)}

    @torch.no_grad()
    def take(self) -> BufferCopies:
        """Copy the buffers as they are now."""
        copies: list[_Copy] = []
        small: list[_Copy] = []
        for slot in self._slots:
            tensor = slot.holder.get(slot.name)
            if tensor is None:
                continue
            version = version_of(tensor)
            if tensor.nbytes <= SMALL_BYTES:
                copy = _Copy(slot, tensor, version, None)
                small.append(copy)
            else:
                last = self._large.get(slot)
                if last is not None and last.tensor is tensor and last.version == version is not None:
                    copy = last
                else:
                    copy = self._large[slot] = _Copy(slot, tensor, version, tensor.detach().clone())
            copies.append(copy)
        if small:
            values = torch._foreach_clone([copy.tensor.detach() for copy in small])
            for copy, value in zip(small, values, strict=True):
                copy.value = value
        return BufferCopies(copies)

    def committed(self) -> None:
        """After a step: large buffers that it has not changed (masks, tables) need no copy from now on."""
        if len(self._judged) == len(self._large):
            return
        for slot, copy in self._large.items():
            if slot not in self._judged:
                self._judged.add(slot)
                if slot.holder.get(slot.name) is copy.tensor and version_of(copy.tensor) == copy.version is not None:
                    copy.value = None

    def constant(self) -> frozenset[str]:
        """Large buffers that no step has changed so far: every rank has made them alike."""
        large = self._large.items()
        return frozenset(slot.label for slot, copy in large if copy.value is None and not _changed(copy))

    def uncopied(self) -> str:
        """A large buffer that was taken to be constant and has changed since; empty if there is none. Said once."""
        for slot, copy in self._large.items():
            if copy.value is None and _changed(copy):
                self._large[slot] = _Copy(slot, copy.tensor, None, copy.tensor)  # the next moment copies it
                return slot.label
        return ""


def _changed(copy: _Copy) -> bool:
    slot = copy.slot
    return slot.holder.get(slot.name) is not copy.tensor or version_of(copy.tensor) != copy.version


def version_of(tensor: Tensor) -> int | None:
    """Counts the changes of a tensor; None for one that was made in inference mode, where nobody counts."""
    return None if tensor.is_inference() else tensor._version


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _assign(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape:
        tensor.data = value.clone()
    elif not torch.equal(tensor, value):  # a write that changes nothing would still count as a change
        with torch.inference_mode(tensor.is_inference()):
            tensor.copy_(value)
