"""Who has written a limit: a process, in a way that outlives it and is not mistaken for another one (Linux)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MACHINE_ID = "/etc/machine-id"
_START_FIELD = 19
"""Of ``/proc/PID/stat``, after the name: ``starttime``, in clock ticks since the boot (proc(5), field 22)."""


@dataclass(frozen=True)
class Owner:
    """A process of one boot of one machine.

    Args:
        pid: Its number, as it sees it itself.
        started: When it was started, in clock ticks since the boot; pids are given again, these are not.
        boot: Id of the boot; the same in all containers of a machine.
        machine: Id of the machine, or its name if it has none.
        namespace: Of pids; in another one the number means nothing.
    """

    pid: int
    started: int
    boot: str
    machine: str
    namespace: str

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        machine = _read(_MACHINE_ID) or socket.gethostname()
        return cls(pid, start_time(pid) or 0, _read(_BOOT_ID), machine, _namespace())

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Owner:
        """Raises:
        ValueError: If it is no record of an owner.
        """
        kinds = {"pid": int, "started": int, "boot": str, "machine": str, "namespace": str}
        if set(record) != set(kinds) or any(type(record[name]) is not kind for name, kind in kinds.items()):
            raise ValueError("it names no process")
        return cls(**record)

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def seems_alive(self, here: Owner) -> bool | None:
        """Whether it runs, by its pid and start time. None: this cannot be told from here (another pid namespace)."""
        if self.boot != here.boot:
            return False
        if self.namespace != here.namespace:
            return None
        return start_time(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid}"


def start_time(pid: int) -> int | None:
    """In clock ticks since the boot; None if there is no such process, or nothing is left of it but its number."""
    try:
        # the command's name comes before, in brackets, and may hold anything
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
