"""Ctrl-C and SIGTERM: all ranks stop after the same step; a rank that alone is told to go leaves alone."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ntp.comm import Generation
from lightning_ntp.engine import PeerMismatchError
from lightning_ntp.launch import StopRequest
from lightning_ntp.lightning import private

_SILENT = -(2**62)
"""Smaller than any checksum and its negative."""


class Riders(Protocol):
    """Something that ranks agree on in the vote of a step, by the largest of their numbers."""

    def ballot(self) -> tuple[int, ...]:
        """What this rank says; equally many numbers on all ranks."""

    def counted(self, votes: tuple[int, ...]) -> None:
        """What was said."""


class StopTogether:
    """The vote of a step; turns a signal that one rank got into a stop of all.

    In training the request rides in the vote of a step, so between steps nothing communicates. In evaluation the
    ranks of a replica agree before every batch: replicas may have different numbers of batches.

    A rank that alone got SIGTERM leaves, a machine that is taken away, say: in training as planned, else at once.

    Args:
        generation: Gives the current generation.
        leave: Leaves the job, given the reason; the others go on.
    """

    def __init__(self, generation: Callable[[], Generation], leave: Callable[[str], NoReturn]) -> None:
        self._generation, self._leave = generation, leave
        self._request = StopRequest()
        self._told = 0
        self.riders: list[Riders] = []
        """Whoever else has something to say in the vote of a step; the same on all ranks."""
        self.drain: Callable[[str], bool] = _cannot
        """Lets this rank leave as planned in one of the next steps; False if it cannot."""

    def install(self, trainer: Trainer) -> None:
        """Take the signals over, and Lightning's own handling of them."""
        self._told = 0
        private.replace_stop_broadcasts(trainer, lambda: self.stop_if_told(trainer))
        self._request.install()

    def uninstall(self) -> None:
        self._request.uninstall()

    def vote(self) -> None:
        """The last collective of a step: who returns from it knows that all ranks have complete gradients."""
        generation = self._generation()
        topology = generation.topology
        own = self._own(training=True)
        said = [rider.ballot() for rider in self.riders]
        riding = [number for numbers in said for number in numbers]
        # one number for all, then two for each replica: the largest and the smallest checksum of its random states
        ballot = torch.full((1 + 2 * len(topology.replicas) + len(riding),), _SILENT, dtype=torch.int64)
        ballot[0] = own
        if generation.degree > 1:
            checksum = _random_checksum(generation.device)
            ballot[1 + 2 * generation.replica] = checksum
            ballot[2 + 2 * generation.replica] = -checksum
        if riding:
            ballot[-len(riding) :] = torch.tensor(riding)
        ballot = ballot.to(generation.device)
        dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=generation.world)
        if generation.device.type == "cuda":
            # there `wait` only orders streams: what an aborted collective left behind is no vote
            generation.life.check("vote")
        self._told, *checksums = ballot.tolist()
        for replica in range(len(topology.replicas)):
            largest, smallest = checksums[2 * replica], -checksums[2 * replica + 1]
            if largest != _SILENT and largest != smallest:
                raise PeerMismatchError(
                    f"the ranks of replica {replica} have different random states at the end of a step: random numbers"
                    " were drawn on some ranks only, in a callback that acts on rank 0, say. Masks of dropout would"
                    " differ between tensor-parallel peers: draw from a torch.Generator of your own there"
                )
        heard = checksums[len(checksums) - len(riding) :]
        for rider, numbers in zip(self.riders, said, strict=True):
            rider.counted(tuple(heard[: len(numbers)]))
            heard = heard[len(numbers) :]

    def stop_if_told(self, trainer: Trainer) -> None:
        """Before a training batch.

        Raises:
            KeyboardInterrupt: After SIGINT, on all ranks.
            SIGTERMException: After SIGTERM, on all ranks.
        """
        self._stop(self._told, trainer)

    def vote_of_replica(self, trainer: Trainer) -> None:
        """Between evaluation batches: as :meth:`vote` and :meth:`stop_if_told`, on the ranks of a replica."""
        generation = self._generation()
        told = self._agree(generation.tensor_parallel)
        if generation.device.type == "cuda":
            generation.life.check("vote")
        self._stop(told, trainer)

    def _own(self, training: bool = False) -> int:
        """The signal that the job was sent, as far as this rank knows."""
        if self._request.is_alone():
            why = self._request.why_alone()
            if not (training and self.drain(why)):
                self._leave(why)
            return 0
        return 0 if self._request.is_undecided() else self._request.stop_requested() or 0

    def _agree(self, group: dist.ProcessGroup | None) -> int:
        told = self._own()
        if group is None:
            return told
        vote = torch.tensor([told], device=self._generation().device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
        return int(vote)

    def _stop(self, signum: int, trainer: Trainer) -> None:
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        if signum:
            private.mark_sigterm_received(trainer)
            raise SIGTERMException


def _cannot(reason: str) -> bool:
    # a function rather than a lambda: the strategy is pickled for spawned ranks
    return False


def _random_checksum(device: torch.device) -> int:
    checksum = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        checksum = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), checksum)
    return checksum
