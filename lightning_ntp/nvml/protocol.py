"""Messages between the process that asks the driver and the one that launched it: JSON, one object a line.

To it: ``{"watch": [uuid, ...], "interval": s, "renew": s, "known": {uuid: memory}}``, again when the devices change.

From it, each line with one of:

=============  ======================================================================================================
``findings``   :class:`~lightning_ntp.health.findings.Finding` objects
``look``       with the findings of every look at a device, complete or not: what another process needs to go on from
               there (:meth:`~lightning_ntp.nvml.changes.Changes.memory`), with the ``reading``
``heartbeat``  a number, and ``calls``: which call, about which device (``""``: about all), since when on the
               machine's monotonic clock, for every thread that is in one
``note``       a line for the log
``off``        why there is nothing to watch: it ends for good
=============  ======================================================================================================
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Any

from lightning_ntp.health.findings import Finding

UNAVAILABLE = "gpu_unavailable"
"""Signal of the one condition that begins with an event and ends with a look."""


def finding_to_message(finding: Finding) -> dict[str, Any]:
    message: dict[str, Any] = {"signal": finding.signal, "text": finding.text, "gpu": finding.gpu}
    if finding.code is not None:
        message["code"] = finding.code
    if finding.clears:
        message["clears"] = True
    if finding.values:
        message["values"] = dict(finding.values)
    return message


def finding_from_message(message: Mapping[str, Any]) -> Finding:
    return Finding(**message)


class Lines:
    """Puts lines together from the pieces that come out of a pipe."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """The messages that are whole by now.

        Raises:
            ValueError: If a line is no message.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]


class Outlet:
    """Writes messages, from any thread. Where nobody reads any more, the process ends.

    Args:
        file: The descriptor.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self.lock = threading.RLock()
        """Held over several messages, nothing comes in between."""

    def send(self, **message: Any) -> None:
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self.lock:
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError:
                os._exit(0)

    def find(self, finding: Finding) -> None:
        self.send(findings=[finding_to_message(finding)])
