"""The cluster environment of a rank: rank and world size are those of the current generation."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override

from lightning_ntp.comm import runtime
from lightning_ntp.launch.environment import RankIdentity, is_rank

SUPERVISOR_RANK = 2**31 - 1
"""The supervisor trains nothing and is never rank zero: it must not log, save or print in a rank's place."""


class NTPEnvironment(ClusterEnvironment):
    """Answers from the live generation, or from the environment variables of the launch before it starts.

    Args:
        supervises: Whether this process, if it is no rank, will supervise ranks that re-run its script (and so is
            not rank zero). Callers of spawned ranks keep rank zero: results come back to them.
    """

    def __init__(self, supervises: bool) -> None:
        super().__init__()
        self._supervises = supervises
        self._launch_size = 1

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return False

    @property
    @override
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    @override
    def detect() -> bool:
        return is_rank()

    @override
    def world_size(self) -> int:
        current = runtime.current()
        if current is None or current.joining:
            return self._launch_size
        return current.generation.topology.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """Set the number of ranks at launch; once there is a generation, the world size is its."""
        self._launch_size = size

    @override
    def global_rank(self) -> int:
        current = runtime.current()
        if current is not None and not current.joining:
            return current.generation.rank
        if is_rank():
            # who joins a running job is nobody's rank 0, though it may be in the place of one that was
            return int(os.environ["RANK"]) or (SUPERVISOR_RANK if RankIdentity.from_environ().joins else 0)
        return SUPERVISOR_RANK if self._supervises else 0

    @override
    def set_global_rank(self, rank: int) -> None:
        """The rank follows the generation; setting it has no effect."""

    @override
    def local_rank(self) -> int:
        # one node: what its first rank does for all (`prepare_data`) falls to the first that lives
        current = runtime.current()
        if current is None:
            return device_number()
        return self.global_rank() if current.joining else current.generation.rank

    @override
    def node_rank(self) -> int:
        return int(os.environ.get("NODE_RANK", "0"))


def device_number() -> int:
    """The number of this rank's device on its node: fixed, while ranks change."""
    return int(os.environ.get("LOCAL_RANK", "0"))
