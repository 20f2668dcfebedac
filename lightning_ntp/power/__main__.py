"""``python -m lightning_ntp.power --socket PATH``: the helper, alone; see :mod:`lightning_ntp.power.helper`."""

from __future__ import annotations

import argparse
import contextlib
import grp
import math
import os
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ntp.power.connection import Terms
from lightning_ntp.power.files import DIRECTORY_VARIABLE, default_directory
from lightning_ntp.power.hand import MAXIMUM
from lightning_ntp.power.helper import Helper, Options

_SOCKET_MODE = 0o660
_BACKLOG = 16


def main(args: Sequence[str] | None = None) -> None:
    """Be the helper. Does not return.

    Raises:
        SystemExit: With status 2 and one line, if the arguments are wrong or the socket cannot be made.
    """
    parser = _parser()
    given = parser.parse_args(args)
    if (given.socket is None) == (given.channel is None):
        parser.error("give --socket PATH")
    for name in ("lease", "rate"):
        if not (math.isfinite(getattr(given, name)) and getattr(given, name) > 0):
            parser.error(f"--{name}={getattr(given, name)} must be a number above 0")
    allowed = given.allow_uid or [os.geteuid()]
    terms = Terms(given.lease, given.rate)
    ceiling = MAXIMUM if given.ceiling == MAXIMUM else ""
    options = Options(given.directory or default_directory(), terms, ceiling, given.clients, allowed)
    if given.channel is not None:
        file, parent = given.channel
        Helper(options).run((parent, socket.socket(fileno=file)), None)
    try:
        listener = listen(given.socket, given.group)
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"cannot listen on {given.socket}: {error}")
    Helper(options).run(None, listener)


def listen(path: Path, group: str | None) -> socket.socket:
    """A socket for its owner and, if given, a group.

    Raises:
        OSError: If it cannot be made.
        ValueError: If there is something at ``path`` that is in use, or no socket.
        KeyError: If there is no such group.
    """
    number = grp.getgrnam(group).gr_gid if group else None
    if path.exists() or path.is_symlink():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ValueError("there is something else")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()  # nobody is behind it any more
            else:
                raise ValueError("another helper listens there")
    listener = socket.socket(socket.AF_UNIX)
    former = os.umask(0o777 & ~_SOCKET_MODE)
    try:
        listener.bind(str(path))
        if number is not None:
            os.chown(path, -1, number, follow_symlinks=False)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(former)
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ntp.power",
        description="Write power limits and clocks of NVIDIA GPUs for training jobs, within bounds, and put them back.",
    )
    add = parser.add_argument
    add("--socket", type=Path, metavar="PATH", help="where clients connect to (file mode 0660)")
    add("--group", help="the group that the socket belongs to")
    add("--allow-uid", type=int, action="append", metavar="UID", help="who may connect (default: this user; repeat it)")
    add("--ceiling", choices=["found", MAXIMUM], default="found", help="the highest limit: the one that is set (found),"
        " or the highest that the hardware takes")  # fmt: skip
    add("--lease", type=float, default=5.0, metavar="SECONDS", help="a client that is silent for so long is gone (5)")
    add("--rate", type=float, default=50.0, metavar="N", help="writes per second of a client (50)")
    add("--clients", type=int, default=16, metavar="N", help="how many at a time (16)")
    add("--directory", type=Path, help=f"where journals lie (default: ${DIRECTORY_VARIABLE}, or see docs/power.md)")
    add("--channel", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
