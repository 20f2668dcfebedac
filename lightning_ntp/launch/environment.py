"""The environment variables through which a supervisor tells a rank who it is.

They are the whole interface between the two: a rank started by anything else (a test, an agent on another node) that
sets the same variables is a rank. The standard variables (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``NODE_RANK``,
``MASTER_ADDR``, ``MASTER_PORT``) are set as well, so that Lightning's and torch's own readers work inside a rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STORE = "LIGHTNING_NTP_STORE"
"""``host:port`` of the TCPStore. Its presence means: this process is a rank."""
SLOT = "LIGHTNING_NTP_SLOT"
"""Launch number 0..W-1 of the rank: its fixed place."""
UID = "LIGHTNING_NTP_UID"
"""Unique per process incarnation, never reused."""
JOB = "LIGHTNING_NTP_JOB"
"""Unique per job; names files and logs."""
JOINS = "LIGHTNING_NTP_JOINS"
"""``1``: this process is a newcomer, started again to join the job while it runs. Absent otherwise."""
JOB_DIR = "LIGHTNING_NTP_JOB_DIR"
"""Directory, owned by the supervisor and removed at the job's end, in which ranks leave tracebacks and results."""


def is_rank(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a rank of a job (and not its supervisor, or a process without a job)."""
    return STORE in (os.environ if environ is None else environ)


@dataclass(frozen=True)
class RankIdentity:
    """Who a rank is."""

    slot: int
    """Its place, 0..world_size-1."""
    world_size: int
    """Number of slots of the job at launch."""
    uid: str
    """Unique per process incarnation."""
    job: str
    """Unique per job."""
    store_host: str
    store_port: int
    job_dir: Path | None = None
    """Where tracebacks and results go; ``None`` when no supervisor reads them (a hand-made test world)."""
    joins: bool = False
    """The others are at work already: it is a newcomer, which joins them."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> RankIdentity:
        """Read the identity from ``environ`` (default: ``os.environ``).

        Raises:
            RuntimeError: a variable is missing or malformed; the message names it.
        """
        env = os.environ if environ is None else environ
        missing = [name for name in (STORE, SLOT, UID, JOB, "WORLD_SIZE") if name not in env]
        if missing:
            raise RuntimeError(
                f"This process is not a complete rank: {', '.join(missing)} not set in the environment."
                " Ranks are started by the launcher; to start one by hand set all of them."
            )
        host, _, port = env[STORE].rpartition(":")
        try:
            slot, world_size, store_port = int(env[SLOT]), int(env["WORLD_SIZE"]), int(port)
        except ValueError:
            raise RuntimeError(
                f"Malformed rank identity: {STORE}={env[STORE]!r} must be host:port, {SLOT}={env[SLOT]!r} and"
                f" WORLD_SIZE={env['WORLD_SIZE']!r} must be integers."
            ) from None
        if not 0 <= slot < world_size:
            raise RuntimeError(f"Malformed rank identity: {SLOT}={slot} is not in 0..{world_size - 1} (WORLD_SIZE-1).")
        job_dir = Path(env[JOB_DIR]) if env.get(JOB_DIR) else None
        return cls(slot, world_size, env[UID], env[JOB], host, store_port, job_dir, env.get(JOINS) == "1")

    def to_environ(self) -> dict[str, str]:
        """The variables which make a process this rank."""
        env = {
            STORE: f"{self.store_host}:{self.store_port}",
            SLOT: str(self.slot),
            UID: self.uid,
            JOB: self.job,
            "RANK": str(self.slot),
            "LOCAL_RANK": str(self.slot),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "NODE_RANK": "0",
            "MASTER_ADDR": self.store_host,
            "MASTER_PORT": str(self.store_port),
        }
        if self.job_dir is not None:
            env[JOB_DIR] = str(self.job_dir)
        if self.joins:
            env[JOINS] = "1"
        return env
