"""The helper, seen from the launching process: started as a child or found at a socket, and never waited for long."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ntp.power.answers import Answer, answer_of
from lightning_ntp.power.entries import CLOCKS, POWER_LIMIT, PROFILE
from lightning_ntp.power.requests import Setting, setting_record

_BOOTSTRAP = (
    "import sys; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]\n"
    "from lightning_ntp.power.__main__ import main; main(sys.argv[1:])"
)
"""The package is found where this one is, and nothing in the working directory: a file there may be called like a
module."""
_MOST_UNREAD_BYTES = 1 << 20
_PIECE = 1 << 16
_PINGS_PER_LEASE = 5
_left_behind: list[subprocess.Popen[bytes]] = []
"""Told to end, and still putting back: the driver hangs. They end by themselves."""


def power_limit(gpu: str, watts: float) -> Setting:
    """A power limit for a GPU, in W."""
    return Setting(gpu, POWER_LIMIT, round(watts * 1000))


def locked_clocks(gpu: str, range_mhz: tuple[int, int] | None) -> Setting:
    """A range for the graphics clock of a GPU, in MHz; None unlocks it."""
    return Setting(gpu, CLOCKS, range_mhz)


def workload_profiles(gpu: str, profiles: Iterable[int]) -> Setting:
    """Workload power profiles to be requested of a GPU (Blackwell), in place of those that are; none clears them.

    Args:
        gpu: UUID.
        profiles: Their numbers (:class:`lightning_ntp.nvml.Profile`). Which ones the GPU has,
            :func:`lightning_ntp.nvml.inventory` says.
    """
    return Setting(gpu, PROFILE, frozenset(map(int, profiles)))


class PowerHelper:
    """Has limits, clocks and profiles written. Any thread may call; no method raises for what helper or driver do.

    While it is open a thread pings the helper. Once this process ends or stops, everything is put back.

    Args:
        job: Name of the job, for others who want the same GPUs.
        socket_path: Of a helper that runs by itself; without it one is started as a child of this process.
        on_lost: Called once, from a thread, with the reason, when the helper is gone though nobody has closed it: by
            then nothing can be set any more, and a helper that has not been killed has put everything back.
        lease: Of a child: seconds of silence after which it takes this process for dead.
        maximum: Of a child: let limits rise to the highest that the hardware takes, not only to the one that is set.
        seconds: The longest that any method waits for an answer; twice that if the helper takes no messages either.

    Raises:
        ValueError: If ``lease`` or ``seconds`` is not above 0.
    """

    def __init__(
        self,
        job: str,
        socket_path: str | os.PathLike[str] | None = None,
        on_lost: Callable[[str], None] | None = None,
        lease: float = 5.0,
        maximum: bool = False,
        seconds: float = 15.0,
    ) -> None:
        for name, value in (("lease", lease), ("seconds", seconds)):
            if not 0 < value <= 86400:
                raise ValueError(f"{name}={value!r} must be a number of seconds above 0, up to 86400")
        self._job, self._path, self._on_lost = job, socket_path, on_lost
        self._lease, self._maximum, self._seconds = lease, maximum, seconds
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._waiting: set[int] = set()
        self._last = 0
        self._why = "it was not opened"
        """Why there is no helper; empty if there is one."""
        self._closed = False
        self._ended = ""

    @property
    def pid(self) -> int | None:
        """Of the child, if it is one."""
        return self._process.pid if self._process is not None else None

    @property
    def lost(self) -> str:
        """Why there is no helper; empty if there is one."""
        return self._why

    def open(self, gpus: Sequence[str], clocks_mhz: tuple[int, int] | None = None) -> dict[str, Answer]:
        """Start or find the helper, and take GPUs; again: put back what it had, and take these.

        After its helper was lost it has none for good: make another one.

        Args:
            gpus: UUIDs.
            clocks_mhz: The range in MHz to which their clocks are locked already, which no call says: what is put back.

        Returns:
            By UUID: its limits, or why it cannot be had.
        """
        if self._socket is None and not self._closed:
            try:
                self._socket = self._connect() if self._path is not None else self._start()
            except OSError as error:
                self._why = f"it cannot be started or reached: {error}"
            else:
                self._socket.settimeout(self._seconds)
                self._why = ""
                for run in (self._listen, self._ping):
                    threading.Thread(target=run, name="ntp-power", daemon=True).start()
        locked = {} if clocks_mhz is None else {"clocks_mhz": list(clocks_mhz)}
        answer = self._ask(do="hello", job=self._job, gpus=list(gpus), **locked)
        return {gpu: answer_of(gpu, answer.get("gpus", {}).get(gpu), answer) for gpu in gpus}

    def set(self, *settings: Setting) -> list[Answer]:
        """Write values. Lower ones are written first, and higher ones only if those are done.

        Args:
            settings: From :func:`power_limit`, :func:`locked_clocks` and :func:`workload_profiles`.

        Returns:
            What has become of each, in their order.
        """
        if not settings:
            return []
        answer = self._ask(do="set", settings=[setting_record(setting) for setting in settings])
        answers = answer.get("settings") or [None] * len(settings)
        return [answer_of(setting.gpu, each, answer) for setting, each in zip(settings, answers, strict=False)]

    def release(self, gpu: str | None = None) -> dict[str, Answer]:
        """Give the levers of one GPU, or all, their first values.

        Returns:
            By UUID; of all and without a helper nothing.
        """
        answer = self._ask(do="release", gpu=gpu or "all")
        found = answer.get("gpus", {gpu: None} if gpu else {})
        return {name: answer_of(name, each, answer) for name, each in found.items()}

    def state(self) -> dict[str, dict[str, Any]]:
        """Every GPU that a client of the helper has: its job, its limit in W, its clocks in MHz, the numbers of
        the profiles that were requested; None of what it has not moved but the limit."""
        return dict(self._ask(do="state").get("gpus", {}))

    def close(self) -> None:
        """Hang up: the helper puts everything back. A child ends then, and is waited for, though not for ever."""
        with self._changed:
            self._closed, self._why = True, self._why or "it was closed"
            self._changed.notify_all()
        if self._socket is not None:
            _hang_up(self._socket)
        if self._process is not None:
            try:
                self._process.wait(self._seconds)
            except subprocess.TimeoutExpired:
                _left_behind.append(self._process)

    # ---- the helper -------------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        assert self._path is not None
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.settimeout(self._seconds)
            channel.connect(os.fspath(self._path))
        except BaseException:
            channel.close()
            raise
        return channel

    def _start(self) -> socket.socket:
        _left_behind[:] = [process for process in _left_behind if process.poll() is None]
        mine, its = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-c", _BOOTSTRAP, root, "--channel", str(its.fileno()), str(os.getpid())]
        command += ["--lease", str(self._lease), *(["--ceiling", "maximum"] if self._maximum else [])]
        try:
            # a session of its own: what ends this one's group by force leaves somebody who puts things back
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        except BaseException:
            mine.close()
            raise
        finally:
            its.close()
        return mine

    # ---- messages ---------------------------------------------------------------------------------------------

    def _ask(self, **message: Any) -> dict[str, Any]:
        """The answer to a message; one with only ``lost`` if there is none."""
        with self._changed:
            if self._why:
                return {"lost": self._why}
            self._last += 1
            number = self._last
            self._waiting.add(number)
        deadline = time.monotonic() + self._seconds
        self._send({"id": number, **message})
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._why, deadline - time.monotonic())
            self._waiting.discard(number)
            late = f"the helper has not answered within {self._seconds:g} s"
            return self._answers.pop(number, None) or {"lost": self._why or late}

    def _send(self, message: Mapping[str, Any]) -> None:
        """A helper that does not take it is lost, which the listening thread notices."""
        assert self._socket is not None
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode("ascii") + b"\n")
        except OSError:
            _hang_up(self._socket)

    def _ping(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: bool(self._why), self._lease / _PINGS_PER_LEASE):
                    return
            self._send({"do": "ping"})

    def _listen(self) -> None:
        assert self._socket is not None
        why, rest = "", b""
        while not why:
            try:
                piece = self._socket.recv(_PIECE)
            except TimeoutError:
                continue  # it need not say anything
            except OSError as error:
                piece, why = b"", str(error)
            *lines, rest = (rest + piece).split(b"\n")
            try:
                for line in lines:
                    self._take(json.loads(line))
            except (ValueError, AttributeError, TypeError):
                why = "it has said something that is no message"
            if not piece or len(rest) > _MOST_UNREAD_BYTES:
                why = self._ended or why or "it has ended"
        self._lose(why)

    def _take(self, message: dict[str, Any]) -> None:
        self._ended = message.get("ended", "") or self._ended
        with self._changed:
            self._lease = float(message.get("lease_s", self._lease))
            if message.get("id") in self._waiting:
                self._answers[message["id"]] = message
            self._changed.notify_all()

    def _lose(self, why: str) -> None:
        assert self._socket is not None
        with self._changed:
            told = self._closed
            self._why = self._why or why
            self._changed.notify_all()
        self._socket.close()
        if self._on_lost is not None and not told:
            self._on_lost(why)


def _hang_up(channel: socket.socket) -> None:
    """End both directions, so that who reads in another thread notices it."""
    try:
        channel.shutdown(socket.SHUT_RDWR)
    except OSError:  # there is nobody any more
        return
