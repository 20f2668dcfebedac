"""Hosting the job's store on this machine."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

_BACKLOG = 1024


def host_store(timeout: timedelta = timedelta(seconds=300)) -> Any:
    """A TCPStore whose server runs in this process, for the processes of this machine.

    The server has one thread, and for every connection it accepts it asks who the peer is, for its log (torch 2.13).
    By itself torch listens on all addresses of both families. There 127.0.0.1 comes as ``::ffff:127.0.0.1``, of which
    /etc/hosts says nothing, so it asks the name server; one lost packet, and the store stands still for 5 s (measured),
    and with it the notice of a death. A socket of our own, IPv4 and loopback alone, needs no name server, and nobody on
    the network can reach it.

    Args:
        timeout: For the client that the result is.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket(socket.AF_INET) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
        host, port = listener.getsockname()
        # the store closes the descriptor it is given
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
