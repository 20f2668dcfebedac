"""Messages to the helper and from it: JSON, one object a line, over a Unix socket.

To it; each may have an ``id`` (a number, or a short text), which comes back in the answer:

======================================================  ==============================================================
``{"do": "hello", "job": name, "gpus": [uuid, ...]}``    take these GPUs; again: put back and let go of what it had.
                                                        ``"clocks_mhz": [a, b]``: their clocks are locked already
``{"do": "set", "gpu": uuid, "limit_w": watts}``        set a power limit
``{"do": "set", "gpu": uuid, "clocks_mhz": [a, b]}``    lock the graphics clock to a range; null: unlock it
``{"do": "set", "gpu": uuid, "profiles": [7, ...]}``    request these workload power profiles and no others
``{"do": "set", "settings": [{"gpu": ...}, ...]}``      several: lowered ones first, and raised only if that is done
``{"do": "release", "gpu": uuid}`` (or ``"all"``)       give levers their first values
``{"do": "state"}``                                     who has which GPU
``{"do": "ping"}``                                      nothing; without an ``id`` it is not answered
======================================================  ==============================================================

From it: ``{"id": ..., "gpus": {uuid: answer}}`` to hello, release and state, ``{"id": ..., "settings": [answer, ...]}``
to set, with a ``status`` (:class:`~lightning_ntp.power.putting_back.Status`) and ``why`` in each answer;
``{"id": ..., "refused": why}`` to what is no request; ``{"ended": why}`` before it hangs up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ntp.nvml.profiles import MOST_PROFILES
from lightning_ntp.power.entries import CLOCKS, POWER_LIMIT, PROFILE, UUID, Value, same

MOST_LINE_BYTES = 1 << 16
MOST_GPUS = 64
_MOST_PER_GPU = 3
"""Levers."""
_MOST_AT_ONCE = 32
"""Profiles: NVML names 25, and a message has to be a line of some length."""
_MOST_TEXT = 200
_MOST_WATTS = 10**5
_MOST_MHZ = 10**5


class Refusal(Exception):
    """A message is no request; says why.

    Args:
        why: In words.
        id: Of the message, if it has one.
    """

    def __init__(self, why: str, id: int | str | None = None) -> None:
        super().__init__(why)
        self.id = id


@dataclass(frozen=True)
class Setting:
    """A value for a lever of a GPU: mW, MHz from and to, or profiles (:data:`~lightning_ntp.power.entries.Value`)."""

    gpu: str
    lever: str
    value: Value

    def lowers(self, now: Value) -> bool:
        """Whether it asks for less than, or the same as, what there is now. Unlocked clocks are the highest; what a
        profile does to the power, only the driver knows."""
        if isinstance(self.value, frozenset):
            return self.value == now
        if isinstance(self.value, int) and isinstance(now, int):
            return self.value <= now or same(self.value, now)
        if self.value is None or isinstance(self.value, int):
            return now == self.value
        return not isinstance(now, tuple) or self.value[1] <= now[1]


@dataclass(frozen=True)
class Request:
    """A message that is well-formed.

    Args:
        do: ``hello``, ``set``, ``release``, ``state`` or ``ping``.
        id: To be given back.
        job: Of ``hello``.
        gpus: UUIDs, of ``hello`` and ``release``; of the latter empty for all.
        clocks_mhz: Of ``hello``: the range to which clocks are locked already, in MHz.
        settings: Of ``set``.
    """

    do: str
    id: int | str | None = None
    job: str = ""
    gpus: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    clocks_mhz: tuple[int, int] | None = None


def parse(line: bytes) -> Request:
    """Raises:
    Refusal: If it is no request.
    """
    try:
        message = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        raise Refusal("it is no JSON") from None
    if not isinstance(message, dict):
        raise Refusal("it is no JSON object")
    id = message.pop("id", None)
    if not (id is None or (type(id) is int and abs(id) < 2**53) or (isinstance(id, str) and len(id) <= _MOST_TEXT)):
        raise Refusal("its id is neither a number nor a short text")
    try:
        do = message.pop("do", None)
        if not isinstance(do, str) or do not in _PARTS:
            raise Refusal(f"it has to have do, one of {', '.join(_PARTS)}")
        return _PARTS[do](message, id)
    except Refusal as refusal:
        raise Refusal(str(refusal), id) from None


def setting_record(setting: Setting) -> dict[str, Any]:
    """A setting as it stands in a message."""
    return {"gpu": setting.gpu, **value_record(setting.lever, setting.value)}


def value_record(lever: str, value: Value) -> dict[str, Any]:
    """A value as it stands in a message."""
    if lever == POWER_LIMIT:
        return {"limit_w": value / 1000} if isinstance(value, int) else {}
    if lever == PROFILE:
        return {"profiles": sorted(value)} if isinstance(value, frozenset) else {}
    return {"clocks_mhz": list(value) if isinstance(value, tuple) else None}


def _hello(message: Mapping[str, Any], id: int | str | None) -> Request:
    _only(message, "job", "gpus", "clocks_mhz")
    job, gpus = message.get("job"), message.get("gpus")
    if not isinstance(job, str) or not 0 < len(job) <= _MOST_TEXT or not job.isprintable():
        raise Refusal(f"job has to be a text of up to {_MOST_TEXT} printable characters")
    if not isinstance(gpus, list) or len(gpus) > MOST_GPUS:
        raise Refusal(f"gpus has to be a list of up to {MOST_GPUS} UUIDs")
    return Request("hello", id, job, tuple(dict.fromkeys(_gpu(each) for each in gpus)), clocks_mhz=_clocks(message))


def _set(message: Mapping[str, Any], id: int | str | None) -> Request:
    if "settings" in message:
        _only(message, "settings")
        settings = message["settings"]
        if not isinstance(settings, list) or not 0 < len(settings) <= _MOST_PER_GPU * MOST_GPUS:
            raise Refusal(f"settings has to be a list of 1 to {_MOST_PER_GPU * MOST_GPUS} objects")
        found = tuple(_setting(each) for each in settings)
        if len({(each.gpu, each.lever) for each in found}) < len(found):
            raise Refusal("settings names a lever of a GPU twice")
        return Request("set", id, settings=found)
    return Request("set", id, settings=(_setting(message),))


def _setting(message: Any) -> Setting:
    if not isinstance(message, dict):
        raise Refusal("a setting has to be an object")
    gpu = _gpu(message.get("gpu"))
    if "limit_w" in message:
        _only(message, "gpu", "limit_w")
        watts = message["limit_w"]
        if type(watts) not in (int, float) or not 0 < watts < _MOST_WATTS:  # which no NaN is
            raise Refusal("limit_w has to be a number of watts")
        return Setting(gpu, POWER_LIMIT, round(watts * 1000))
    if "profiles" in message:
        _only(message, "gpu", "profiles")
        return Setting(gpu, PROFILE, _profiles(message["profiles"]))
    _only(message, "gpu", "clocks_mhz")
    if "clocks_mhz" not in message:
        raise Refusal("a setting has to have limit_w, clocks_mhz or profiles")
    return Setting(gpu, CLOCKS, _clocks(message))


def _clocks(message: Mapping[str, Any]) -> tuple[int, int] | None:
    clocks = message.get("clocks_mhz")
    if clocks is None:
        return None
    whole = isinstance(clocks, list) and len(clocks) == 2 and all(type(each) is int for each in clocks)
    if not whole or not 0 < clocks[0] <= clocks[1] < _MOST_MHZ:
        raise Refusal("clocks_mhz has to be null, or two whole numbers of MHz, the lower one first")
    return clocks[0], clocks[1]


def _profiles(numbers: Any) -> frozenset[int]:
    if isinstance(numbers, list) and len(numbers) <= _MOST_AT_ONCE:
        if all(type(each) is int and 0 <= each < MOST_PROFILES for each in numbers):
            return frozenset(numbers)
    raise Refusal(f"profiles has to be a list of up to {_MOST_AT_ONCE} whole numbers from 0 to {MOST_PROFILES - 1}")


def _release(message: Mapping[str, Any], id: int | str | None) -> Request:
    _only(message, "gpu")
    gpu = message.get("gpu")
    return Request("release", id, gpus=() if gpu == "all" else (_gpu(gpu),))


def _state(message: Mapping[str, Any], id: int | str | None) -> Request:
    _only(message)
    return Request("state", id)


def _ping(message: Mapping[str, Any], id: int | str | None) -> Request:
    _only(message)
    return Request("ping", id)


_PARTS: dict[str, Callable[[Mapping[str, Any], int | str | None], Request]] = {
    "hello": _hello,
    "set": _set,
    "release": _release,
    "state": _state,
    "ping": _ping,
}


def _gpu(value: Any) -> str:
    if not isinstance(value, str) or not UUID.fullmatch(value):
        raise Refusal("gpu has to be the UUID of a whole GPU (GPU-...); parts of one (MIG) have no limits of their own")
    return value


def _only(message: Mapping[str, Any], *names: str) -> None:
    more = sorted(set(message) - set(names))
    if more:
        raise Refusal(f"it has {more[0][:40]!r}, which does not belong there")
