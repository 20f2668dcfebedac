"""One exchange of several tensors between holders (indices of a replica, or slots), as a single all-to-all.

The plan floor says what moves; this packs the pieces of all tensors of a bucket, sends them once, and puts
them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ntp.plan import Exchange, Move


@dataclass(frozen=True)
class WireEntry:
    """What moves of one tensor.

    Args:
        exchange: The moves between the indices of the replica, or None if nothing of this tensor moves.
        dim: The cut dimension; None if a unit is the whole tensor.
        width: Elements of the tensor per element of the cut dimension (of the whole tensor, if ``dim`` is None).
        sums: Whether what arrives is summed, in order of the sender, or copied.
    """

    exchange: Exchange | None
    dim: int | None
    width: int
    sums: bool


class Wire:
    """The exchange of a bucket's tensors.

    Args:
        entries: One per tensor, in bucket order.
        indices: The holders that the exchanges name, in order of their rank in the group.
        index: The holder that is this rank.
    """

    def __init__(self, entries: Sequence[WireEntry], indices: Sequence[int], index: int) -> None:
        self._entries = tuple(entries)
        place = {i: position for position, i in enumerate(indices)}
        self._position = stays = place[index]
        self._sends: list[list[tuple[int, Move]]] = [[] for _ in place]
        self._receives: list[list[tuple[int, Move]]] = [[] for _ in place]
        for k, entry in enumerate(self._entries):
            for move in entry.exchange.moves if entry.exchange is not None else ():
                if move.sender == index:
                    self._sends[place[move.receiver]].append((k, move))
                if move.receiver == index:
                    self._receives[place[move.sender]].append((k, move))
        self._outgoing = [0 if p == stays else self._elements(moves) for p, moves in enumerate(self._sends)]
        self._incoming = [0 if p == stays else self._elements(moves) for p, moves in enumerate(self._receives)]

    @property
    def elements_sent(self) -> int:
        """Elements this rank sends to others."""
        return sum(self._outgoing)

    def run(
        self,
        sources: Sequence[Tensor | None],
        targets: Sequence[Tensor | None],
        group: dist.ProcessGroup,
        like: Tensor,
    ) -> None:
        """Move the pieces. Collective over the group, also for a holder that neither sends nor receives.

        Args:
            sources: For every entry this rank's tensor; None counts as zeros.
            targets: For every entry the tensor to fill; those that sum must be zero before. None if nothing
                arrives here. Where the target is the source itself, what stays is left alone.
            group: The process group of the holders.
            like: Gives dtype and device.
        """
        outgoing = like.new_empty(sum(self._outgoing))
        offset = 0
        for position, moves in enumerate(self._sends):
            if position == self._position:
                continue
            for k, start, length in _sent(moves):
                size, source = self._entries[k].width * length, sources[k]
                hole = outgoing.narrow(0, offset, size)
                if source is None:
                    hole.zero_()
                else:
                    piece = self._narrow(k, source, start, length)
                    hole.view(piece.shape).copy_(piece)
                offset += size
        incoming = like.new_empty(sum(self._incoming))
        dist.all_to_all_single(incoming, outgoing, self._incoming, self._outgoing, group=group)
        offset = 0
        for position, moves in enumerate(self._receives):  # in order of the sender: sums have a fixed order
            for k, move in moves:
                target = targets[k]
                assert target is not None
                for run in move.runs:
                    hole = self._narrow(k, target, run.target, run.length)
                    if position != self._position:
                        size = self._entries[k].width * run.length
                        self._put(k, hole, incoming.narrow(0, offset, size).view(hole.shape))
                        offset += size
                        continue
                    source = sources[k]
                    if source is None:
                        if not self._entries[k].sums:
                            hole.zero_()
                    elif source is not target:
                        self._put(k, hole, self._narrow(k, source, run.source, run.length))

    def _put(self, k: int, hole: Tensor, piece: Tensor) -> None:
        if self._entries[k].sums:
            hole.add_(piece)
        else:
            hole.copy_(piece)

    def _narrow(self, k: int, tensor: Tensor, start: int, length: int) -> Tensor:
        dim = self._entries[k].dim
        return tensor if dim is None else tensor.narrow(dim, start, length)

    def _elements(self, moves: Sequence[tuple[int, Move]]) -> int:
        return sum(move.length * self._entries[k].width for k, move in moves)


def _sent(moves: Sequence[tuple[int, Move]]) -> Iterator[tuple[int, int, int]]:
    for k, move in moves:
        for run in move.runs:
            yield k, run.source, run.length


def element_width(shape: torch.Size, dim: int | None) -> int:
    """Elements of a tensor of ``shape`` per element of ``dim``; all of them if ``dim`` is None."""
    numel = shape.numel()
    return numel if dim is None else numel // shape[dim]
