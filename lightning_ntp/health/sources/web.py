"""A server that says what it wants of a job's slots: a cluster manager's, or anybody's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from urllib.parse import urlsplit

from lightning_ntp.health.conditions import one_line
from lightning_ntp.health.findings import Finding, WatchedJob
from lightning_ntp.health.overrides import kind
from lightning_ntp.health.sources.board import Board, log, wait
from lightning_ntp.health.sources.entries import MOST_ENTRIES, Entry, EntryError, parse_json, parse_object
from lightning_ntp.health.sources.fetching import FetchError, fetch, is_loopback

_LONGEST_PAUSE = 60.0


class HttpSource:
    """Yields what a server says: it GETs a list in JSON, or ``{"findings": [...]}``, of objects as in
    :mod:`~lightning_ntp.health.sources.entries`: ``{"host": "node7", "slot": 3, "action": "drain", "text": "..."}``.

    What the list has no longer is over. Objects that name another host, or a GPU on which no slot of the job works, are
    of no interest. While the server cannot be reached, or says what is no such list, all stays as it was, that is told
    once, and it is asked less and less often, down to once a minute.

    Args:
        url: ``http://`` or ``https://``. Certificates are verified; at most 3 redirects are followed, and none from
            https to http. Proxies are the environment's, and none for this machine itself.
        interval: Seconds between two looks.
        timeout: Seconds that one may take.
        token_env: Environment variable of the launching process with a token, which is sent as a bearer's.
        host: This host's name; None asks the system.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(
        self,
        url: str,
        interval: float = 5.0,
        timeout: float = 2.0,
        token_env: str | None = None,
        host: str | None = None,
    ) -> None:
        for name, seconds in (("interval", interval), ("timeout", timeout)):
            if not 0.01 <= seconds <= 3600:
                raise ValueError(f"{name}={seconds!r} must be a number of seconds from 0.01 to 3600")
        self.url, self.interval, self.timeout = url, float(interval), float(timeout)
        self._name = _check(url)
        self._token = _token(url, token_env) if token_env is not None else ""
        self._host = host
        self._begin(None)

    def _begin(self, job: WatchedJob | None) -> None:
        self._watched, self._board = job, Board(self._name, self._host)
        self._entries: list[Entry] = []
        self._failures, self._told = 0, False

    def __call__(self, job: WatchedJob) -> Iterable[Finding]:
        while not job.ending():
            yield from self.look(job)
            wait(job, self.pause)

    @property
    def pause(self) -> float:
        """Seconds to the next look."""
        return max(self.interval, min(self.interval * 2.0 ** min(self._failures, 32), _LONGEST_PAUSE))

    def look(self, job: WatchedJob) -> list[Finding]:
        """Ask once: what has changed since the last look."""
        if self._watched is not job:
            self._begin(job)
        try:
            self._take(fetch(self.url, self.timeout, self._token))
        except (FetchError, EntryError) as error:
            self._failures += 1
            if not self._told:
                self._told = True
                log.warning(
                    "health, %s: %s; it is asked again, and what it has said holds", self._name, one_line(str(error))
                )
        else:
            if self._told:
                log.warning("health, %s: answers again", self._name)
            self._failures, self._told = 0, False
        return self._board.look(self._entries, job)

    def _take(self, body: bytes) -> None:
        content = parse_json(body.decode("utf-8-sig", errors="replace"))
        if isinstance(content, dict) and "findings" in content:
            content = content["findings"]
        if not isinstance(content, list):
            raise EntryError(f"it says {kind(content)} where a list, or an object with 'findings', was expected")
        if len(content) > MOST_ENTRIES:
            raise EntryError(f"it lists {len(content)} objects, more than {MOST_ENTRIES}")
        entries, problems = [], []
        for number, each in enumerate(content):
            try:
                entries.append(parse_object(each))
            except EntryError as error:
                problems.append(f"number {number} in its list: {error}")
        self._entries = entries
        self._board.complain(problems)


def _check(url: str) -> str:
    """Checks a URL. Returns it for logs, without what may be secret."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except (ValueError, AttributeError) as error:
        raise ValueError(f"url={url!r} is no URL: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"the url of {host} holds a user's name: give a token, in an environment variable (token_env)")
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"url={url!r} must be http://... or https://..., of ASCII characters, without blanks")
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _token(url: str, variable: str) -> str:
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"token_env={variable!r}: there is no such environment variable, or nothing is in it")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError(f"token_env={variable!r}: what is in it is no token: it has blanks, or more than ASCII")
    parts = urlsplit(url)
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ValueError(f"url={url!r} would send the token of {variable!r} for everybody to read: use https://")
    return token
