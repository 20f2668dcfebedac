"""All ranks make neighbours' copies after the same steps, those that have joined too."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_ntp.comm import NeighbourCopies
from lightning_ntp.comm.neighbour_copies import Copy


class Copies(NeighbourCopies):
    """Makes copies of nothing, which are complete at once."""

    def __init__(self) -> None:
        super().__init__(None, list)  # type: ignore[arg-type]
        self.made: list[int] = []

    def _pack(self, step: int, generation: Any) -> Copy:
        self.made.append(step)
        return Copy(str(step), step, generation, {}, [], 0, complete=True)


def steps(ranks: list[Copies], numbers: range, interval: int, lost: tuple[int, ...] = ()) -> None:
    """Vote on steps, and make copies where they are due; after those of ``lost`` a parameter has changed."""
    for step in numbers:
        ballots = [rank.ballot()[:2] for rank in ranks]
        for rank in ranks:
            rank.counted(max(b[0] for b in ballots), max(b[1] for b in ballots), interval)
        for rank in ranks:
            if rank.is_due(step):
                rank.take(step, None)  # type: ignore[arg-type]
            if step in lost:
                rank.forget("a parameter has changed")


@pytest.mark.parametrize("lost", [(), (12,), (30,)])
def test_who_joins_soon_after_somebody_else_makes_the_copies_of_the_others(lost: tuple[int, ...]) -> None:
    """Also if the way is lost again later."""
    member = Copies()
    steps([member], range(1, 4), 20)
    member.joined(3)  # somebody else
    steps([member], range(4, 9), 20)
    newcomer = Copies()
    for rank in (member, newcomer):
        rank.joined(8)
    steps([member, newcomer], range(9, 80), 20, lost)
    assert newcomer.made == [step for step in member.made if step > 8]
    assert newcomer.made[0] == 9
    assert len(newcomer.made) > 3
