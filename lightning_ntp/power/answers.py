"""What the helper has answered, for who has asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ntp.power.putting_back import Status

_LOST = "there is no helper (any more)"


@dataclass(frozen=True)
class Answer:
    """What the helper says of a GPU.

    Args:
        gpu: UUID.
        status: ``done``, or what kept it from being done; ``denied`` if the helper may not write, ``lost`` if there is
            none.
        why: In words, if it is not done.
        values: What came along: ``limit_w``, ``clocks_mhz``, ``profiles``, of a GPU that was taken also ``minimum_w``,
            ``ceiling_w`` and ``maximum_w``.
    """

    gpu: str
    status: Status
    why: str
    values: Mapping[str, Any]

    @property
    def done(self) -> bool:
        return self.status is Status.DONE


def answer_of(gpu: str, record: Mapping[str, Any] | None, message: Mapping[str, Any]) -> Answer:
    """What a message says of a GPU.

    Args:
        gpu: UUID.
        record: Its part of the message, if it has one.
        message: The message; one with ``lost`` stands for none.
    """
    if record is None:
        if "refused" in message:
            return Answer(gpu, Status.REFUSED, str(message["refused"]), {})
        return Answer(gpu, Status.LOST, str(message.get("lost", _LOST)), {})
    values = {key: value for key, value in record.items() if key not in ("gpu", "lever", "status", "why")}
    return Answer(gpu, Status(record["status"]), str(record["why"]), values)
