"""``redundancy="neighbor"``: every rank's shards are kept in a neighbour's host memory too."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ntp.comm import Generation, NeighbourCopies, ShardedState
from lightning_ntp.comm.neighbour_copies import COST, LONGEST_INTERVAL
from lightning_ntp.lightning.steps.transaction import Transaction
from lightning_ntp.parallel import ShardedModel

log = logging.getLogger("lightning_ntp")

_KEPT = 4
"""Own shards and the neighbour's, of two moments: the newest copy is made while the one before is still needed."""
_SAID = 3
"""How often it is said that the way back is lost."""


class NoRoomForCopies(RuntimeError):
    """The copies do not fit in host memory."""

    __plain_reason__ = True  # no bug: the supervisor prints the message alone


class Redundancy:
    """Makes the copies of a run when they are due, and lets the ranks agree on them in their votes.

    Args:
        model: The cut model.
        states: What moves with the parameters.
        generation: Gives the current generation.
        together: Runs a collective on all ranks, once more if anybody dies meanwhile.
        ranks_per_node: At launch; slots are counted through the nodes.
    """

    def __init__(
        self,
        model: ShardedModel,
        states: Callable[[], Iterable[ShardedState]],
        generation: Callable[[], Generation],
        together: Callable[[str, Callable[[], None]], None],
        ranks_per_node: int,
    ) -> None:
        self._model, self._generation, self._together = model, generation, together
        self._per_node = ranks_per_node
        self.copies = NeighbourCopies(model, states, lambda slot: slot // ranks_per_node)
        self._transaction: Transaction | None = None
        self._committed = 0
        self._last: float | None = None
        self._said_dear, self._lost = False, 0

    def keep_history(self, transaction: Transaction) -> None:
        """Of a fit: keep what must be done again after going back."""
        self._transaction = transaction
        transaction.keep_history(lambda: self.copies.oldest)
        transaction.on_commit.append(self._step_done)
        transaction.lose_way = self._lose_way

    def check_memory(self, optimizers: Iterable[Optimizer]) -> None:
        """Check that the copies will fit. Collective over all ranks.

        Raises:
            NoRoomForCopies: If they will not, on all ranks, with the numbers.
        """
        per_parameter: dict[Tensor, int] = {}
        for optimizer in optimizers:
            states = count_states(optimizer)
            per_parameter.update({p: states for group in optimizer.param_groups for p in group["params"]})
        shards = sum(e.parameter.nbytes * (1 + per_parameter.get(e.parameter, 0)) for e in self._model)
        table: dict[int, tuple[int, int]] = {}

        def share() -> None:
            generation = self._generation()
            numbers = torch.zeros(generation.topology.world_size, 2, dtype=torch.int64)
            numbers[generation.rank] = torch.tensor([_KEPT * shards, available_bytes()])
            torch.distributed.all_reduce(numbers, group=generation.copies)
            table.clear()
            table.update(zip(generation.topology.slots, map(tuple, numbers.tolist()), strict=True))

        self._together("comparing host memory", share)
        nodes: dict[int, list[tuple[int, int]]] = {}
        for slot, numbers in table.items():
            nodes.setdefault(slot // self._per_node, []).append(numbers)
        for node, ranks in nodes.items():
            needed, left = sum(need for need, _ in ranks), min(free for _, free in ranks)
            if needed > left:
                raise NoRoomForCopies(
                    f"redundancy='neighbor' needs {_size(needed)} of host memory for the copies of the"
                    f" {len(ranks)} ranks on node {node} (their own shards and a neighbour's, parameters and optimizer"
                    f" states, of two moments), but {_size(left)} are available there: use fewer ranks per node, an"
                    " optimizer with less state, or redundancy=None"
                )
        if self._generation().rank == 0:
            total = sum(need for need, _ in table.values())
            log.info("ntp: neighbours' copies take up to %s of host memory in all", _size(total))

    def copy_now(self, step: int) -> None:
        """Make a copy, and wait until all ranks have theirs. Collective over all ranks.

        Args:
            step: The steps that are committed.
        """
        generation = self._generation
        self._together("neighbours' copies", lambda: self.copies.take(step, generation(), wait=True))
        # all ranks have left the wait of `together`, so all are complete
        self.copies.counted(0, 0, self.copies.interval)
        self._last, self._committed = None, step
        if self._transaction is not None and self._transaction.history is not None:
            self._transaction.history.forget_old()
            self._transaction.history.settle()

    def renew(self, committed: int) -> None:
        """The membership has changed: make a new copy now, beside whatever goes on. All survivors call it alike.

        Not with manual optimization, which may be gathering gradients: there the next step makes it.
        """
        if self._model.module.automatic_optimization:
            self.copies.take(committed, self._generation())

    def ballot(self) -> tuple[int, ...]:
        """What this rank says in the vote of a step; the largest of each counts."""
        return self.copies.ballot()

    def counted(self, votes: tuple[int, ...]) -> None:
        """What the vote of a step has said."""
        if self._transaction is not None and self._transaction.redoing:
            return  # a vote of then
        pending, lost, interval = votes
        before = self.copies.interval
        self.copies.counted(pending, lost, interval)
        if self.copies.interval != before:
            self._tell()

    def _step_done(self, committed: int, gathering: bool) -> None:
        now = time.monotonic()
        if self._last is not None and committed == self._committed + 1:
            seconds, known = now - self._last, self.copies.step_seconds
            # slow to follow: one long step must not make the copies frequent
            self.copies.step_seconds = min(0.9 * known + 0.1 * seconds, 2 * known) if known else seconds
        if self.copies.is_due(committed) and not gathering:
            self.copies.take(committed, self._generation())
        self._last, self._committed = time.monotonic(), committed

    def _lose_way(self, why: str) -> None:
        if not self.copies.lost_way and self._lost < _SAID:
            self._lost += 1
            log.warning(
                "slot %d: %s; redundancy='neighbor' cannot go back across that, and makes a new copy%s",
                self._generation().slot,
                why,
                ". This is not said again: if it happens all the time, there is no way back most of the time"
                * (self._lost == _SAID),
            )
        self.copies.forget(why)

    def _tell(self) -> None:
        copies = self.copies
        if self._generation().rank:
            return
        log.info("ntp: neighbours' copies every %d steps (%.0f ms each)", copies.interval, 1e3 * copies.cost)
        share = copies.cost / (copies.interval * copies.step_seconds) if copies.step_seconds else 0.0
        if copies.interval == LONGEST_INTERVAL and share > 2 * COST and not self._said_dear:
            self._said_dear = True
            log.warning(
                "neighbours' copies cost %.1f %% of a step though they are made every %d steps only: steps are short"
                " for so much state",
                100 * share,
                copies.interval,
            )


def count_states(optimizer: Optimizer) -> int:
    """How many tensors of the parameter's shape an optimizer keeps per parameter: tried out on a parameter of two
    elements. 2 where that does not work, as in Adam.
    """
    parameter = nn.Parameter(torch.zeros(2))
    try:
        trial = type(optimizer)([{"params": [parameter], **optimizer.defaults}])  # type: ignore[call-arg]
        parameter.grad = torch.ones(2)
        trial.step()
        state: Mapping[str, object] = trial.state[parameter]
    except Exception:
        return 2
    return sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in state.values())


def available_bytes() -> int:
    """Host memory that this process can still get: the machine's, or what its control group leaves."""
    found = []
    for line in Path("/proc/meminfo").read_text().splitlines() if os.path.exists("/proc/meminfo") else []:
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if os.path.exists(limit) and os.path.exists(used):
            text = Path(limit).read_text().strip()
            if text.isdigit():
                found.append(max(0, int(text) - int(Path(used).read_text())))
    return min(found, default=1 << 62)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
