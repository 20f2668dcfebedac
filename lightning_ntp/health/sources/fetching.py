"""One answer of a server, within bounded time and memory, whatever the server does."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.request
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

_MOST_BYTES = 1 << 20
_MOST_REDIRECTS = 3


class FetchError(Exception):
    """There is no answer, or none that is taken; says why."""


def is_loopback(host: str) -> bool:
    """Whether a host's name is of this machine itself, whatever a resolver says."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") in ("localhost", "localhost.localdomain")


def fetch(url: str, seconds: float, token: str = "") -> bytes:
    """GET what is at a URL.

    Args:
        url: ``http`` or ``https``; a certificate is verified.
        seconds: For all of it, redirects included, but for the resolver of names, which cannot be hurried.
        token: Sent as a bearer's; to no other host, if the server redirects.

    Raises:
        FetchError: If there is no answer in time, none with a status of success, or one of more than 1 MiB.
    """
    deadline = time.monotonic() + seconds
    opener = urllib.request.OpenerDirector()
    handlers: list[urllib.request.BaseHandler] = [
        _Http(deadline),
        _Https(deadline),
        _Redirects(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ]
    if not is_loopback(urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler())
    for handler in handlers:
        opener.add_handler(handler)
    request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "lightning-ntp"})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with opener.open(request, timeout=seconds) as answer:
            body: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"it answers {error.code} {error.msg}") from None
    except urllib.error.URLError as error:
        raise FetchError(_reason(error.reason, seconds)) from None
    # a server may answer anything, and what the http package raises then is of many kinds
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchError(_reason(error, seconds)) from None
    if len(body) > _MOST_BYTES:
        raise FetchError(f"its answer has more than {_MOST_BYTES} bytes")
    return body


def _reason(error: object, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it has not answered within {seconds:g} s"
    said = str(error)
    return said if said and isinstance(error, OSError) else f"{type(error).__name__}: {said}"


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = _MOST_REDIRECTS
    max_repeats = _MOST_REDIRECTS

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        fp.close()  # or all of its body would be read, which may have no end
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or new.scheme == "http" and old.scheme == "https":
            raise FetchError(f"it redirects from {old.scheme} to {new.scheme}")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if request is not None and token is not None and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            request.add_unredirected_header("Authorization", token)
        return request


@lru_cache(maxsize=1)
def _verifying() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads all certificates of the system


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, req: Any) -> Any:
        return self.do_open(partial(_Connection, deadline=self._deadline), req)


class _Https(urllib.request.AbstractHTTPHandler):
    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def https_open(self, req: Any) -> Any:
        return self.do_open(partial(_SecureConnection, deadline=self._deadline), req, context=_verifying())

    def https_request(self, req: Any) -> Any:
        return self.do_request_(req)


class _Connection(http.client.HTTPConnection):
    def __init__(self, *args: Any, deadline: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline = deadline

    def connect(self) -> None:
        self.timeout = _left(self._deadline)
        super().connect()
        self.sock = _Timed(self.sock, self._deadline)


class _SecureConnection(http.client.HTTPSConnection):
    def __init__(self, *args: Any, deadline: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline = deadline

    def connect(self) -> None:
        self.timeout = _left(self._deadline)
        super().connect()
        self.sock = _Timed(self.sock, self._deadline)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Timed:
    """A socket with one deadline for all that is sent and received: a server that sends a byte now and then would never
    time out otherwise.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline

    def sendall(self, data: Any) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, *args: Any, **options: Any) -> io.BufferedReader:
        return io.BufferedReader(_TimedReads(self._sock, self._deadline))

    def close(self) -> None:
        self._sock.close()


class _TimedReads(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._reads = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._reads.readinto(buffer)

    def close(self) -> None:
        self._reads.close()
        super().close()
