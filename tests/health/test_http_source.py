"""What servers say, also such as nobody would want."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ntp.health import HttpSource
from lightning_ntp.health.sources import fetching
from tests.health.sourcing import PIECES, SECONDS, Job, Told, short


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    return Told(caplog)


Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """A real server on the loopback; what it answers can be changed at any time."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answer: Answer = says([])
        self.asked: list[tuple[str, str | None]] = []
        """Path and token of each request."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                outer.asked.append((self.path, self.headers.get("Authorization")))
                try:
                    outer.answer(self)
                except OSError:
                    pass  # the other side has had enough

            def log_message(self, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = False  # joined when it closes: no test leaves one behind

            def handle_error(self, *args: Any) -> None:
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self._server.server_port
        self.url = f"http{'s' * (context is not None)}://127.0.0.1:{self.port}/wanted"
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def raw(body: bytes, code: int = 200, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def says(content: object) -> Answer:
    return raw(json.dumps(content).encode())


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server(context)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


DRAIN = {"slot": 1, "action": "drain", "text": "at noon"}


def asked(source: HttpSource, job: Job) -> list[tuple[str | int, str, str]]:
    before = time.monotonic()
    found = short(source.look(job.watched))
    assert time.monotonic() - before < SECONDS
    return found


def test_a_server_says_what_it_wants(server: Server, job: Job, told: Told) -> None:
    source = HttpSource(server.url, host="node7")
    assert asked(source, job) == []
    elsewhere = [{**DRAIN, "host": "node8"}, {"host": "node8", "action": "dead"}, {"gpu": "GPU-9", "action": "dead"}]
    server.answer = says([DRAIN, *elsewhere, {"host": "node7", "gpu": "GPU-2", "action": "suspect", "text": "x"}])
    assert asked(source, job) == [(1, "drain", "at noon"), ("GPU-2", "suspect", "x")]
    server.answer = says({"findings": [DRAIN], "version": 3})
    assert asked(source, job) == [] and asked(source, job)[0][:2] == ("GPU-2", "over")
    server.answer = says({"findings": []})
    assert asked(source, job) == [] and asked(source, job)[0][:2] == (1, "over")
    assert told() == [] and {path for path, _ in server.asked} == {"/wanted"}


SAYS_NOTHING = {
    "error": raw(b"[]", 500),
    "not found": raw(b"[]", 404),
    "no content": raw(b"", 204),
    "empty": raw(b""),
    "text": raw(b"<html>"),
    "number": says(3),
    "null": says(None),
    "no list": says({"findings": {"slot": 1}}),
    "no findings": says({"slot": 1}),
    "twice": raw(b'{"findings": [], "findings": []}'),
    "deep": raw(b"[" * 500000),
    "digits": raw(b"[" + b"1" * 500000 + b"]"),
    "many": says([1] * 20000),
    "short": raw(b'[{"slot": 1, "act', Content_Length="1000"),
    "chunks": raw(b"zz\r\n", Transfer_Encoding="chunked"),
    "elsewhere": raw(b"", 302, Location="file:///etc/passwd"),
    "nowhere": raw(b"", 302),
    "ftp": raw(b"", 302, Location="ftp://127.0.0.1/"),
    "circle": raw(b"", 302, Location="/wanted"),
    "closed": lambda handler: handler.wfile.write(b""),
    "no http": lambda handler: handler.wfile.write(b"\x00\xff\r\n" * 100),
    "long line": lambda handler: handler.wfile.write(b"HTTP/1.0 200 " + b"x" * 100000),
    "headers": lambda handler: handler.wfile.write(b"HTTP/1.0 200 OK\r\n" + b"a: b\r\n" * 1000),
}


@pytest.mark.parametrize("kind", SAYS_NOTHING)
def test_what_a_server_says_holds_while_it_talks_nonsense(server: Server, job: Job, told: Told, kind: str) -> None:
    source = HttpSource(server.url)
    server.answer = says([DRAIN])
    assert asked(source, job) == [(1, "drain", "at noon")] and source.pause == 5.0
    server.answer = SAYS_NOTHING[kind]
    for failures in range(1, 6):
        assert asked(source, job) == []
        assert source.pause == min(5.0 * 2**failures, 60.0)
    (message,) = told()
    assert message.startswith(f"health, {server.url}: ") and message.endswith("and what it has said holds")
    server.answer = says([DRAIN, {"slot": 2, "action": "log", "text": "x"}])
    assert asked(source, job) == [(2, "log", "x")] and source.pause == 5.0
    assert told() == [f"health, {server.url}: answers again"]


def test_a_source_waits_and_ends_with_its_job(server: Server, job: Job) -> None:
    server.answer = says([DRAIN])
    found = HttpSource(server.url, interval=0.02)(job.watched)
    assert short([next(found)]) == [(1, "drain", "at noon")]
    server.answer = says([DRAIN, {"slot": 2, "action": "log", "text": "x"}])
    assert short([next(found)]) == [(2, "log", "x")]
    job.over = True
    assert list(found) == []


def test_a_list_with_garbage_in_it_is_taken_for_the_rest(server: Server, job: Job, told: Told) -> None:
    source = HttpSource(server.url)
    server.answer = says([3, DRAIN, {"slot": 1}, None])
    assert asked(source, job) == [(1, "drain", "at noon")]
    assert [message.partition(": ")[2][:25] for message in told()] == [
        "number 0 in its list: int",
        "number 2 in its list: it ",
        "number 3 in its list: Non",
    ]
    assert asked(source, job) == [] and told() == []


def dripping(start: bytes, drop: bytes) -> Callable[[Server], Answer]:
    def of(server: Server) -> Answer:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(start)
            while not server.closing.wait(0.02):
                handler.wfile.write(drop)

        return answer

    return of


def flooding(start: bytes, drop: bytes) -> Callable[[Server], Answer]:
    def of(server: Server) -> Answer:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(start)
            while not server.closing.is_set():
                handler.wfile.write(drop)

        return answer

    return of


LARGE = b" " * 65536
ENDLESS = {
    "body": dripping(b"HTTP/1.0 200 OK\r\n\r\n[", b" "),
    "status": dripping(b"", b"H"),
    "header": dripping(b"HTTP/1.0 200 OK\r\na: ", b"b"),
    "silence": dripping(b"", b""),
    "chunks": dripping(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "continue": flooding(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "flood": flooding(b"HTTP/1.0 200 OK\r\n\r\n[", LARGE),
    "flood of an error": flooding(b"HTTP/1.0 500 No\r\n\r\n[", LARGE),
    "flood of a redirect": flooding(b"HTTP/1.0 302 Go\r\nLocation: /wanted\r\n\r\n", LARGE),
    "flood of a chunk": flooding(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n", LARGE),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_answer_without_end_ends(
    server: Server, job: Job, told: Told, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HttpSource(server.url, timeout=0.3)
    server.answer = ENDLESS[kind](server)
    assert asked(source, job) == []
    (message,) = told()
    reasons = {"flood": "more than 1048576 bytes", "flood of an error": "500", "flood of a redirect": "302"}
    reasons["flood of a chunk"] = reasons["flood"]
    assert reasons.get(kind, "it has not answered within 0.3 s") in message


def test_a_server_that_is_not_there_is_told_once(job: Job, told: Told) -> None:
    with serving() as server:
        source = HttpSource(server.url)
    assert asked(source, job) == asked(source, job) == []
    (message,) = told()
    assert "refused" in message


def test_a_few_redirects_are_followed_with_the_token_for_the_same_server_only(
    server: Server, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER_TOKEN", "secret\n")
    with serving() as other:

        def answer(handler: BaseHTTPRequestHandler) -> None:
            to = {"/wanted": "/here", "/here": f"http://127.0.0.1:{other.port}/there"}[handler.path]
            raw(b"", 307, Location=to)(handler)

        server.answer, other.answer = answer, says([DRAIN])
        assert asked(HttpSource(server.url, token_env="CLUSTER_TOKEN"), job) == [(1, "drain", "at noon")]
        assert server.asked == [("/wanted", "Bearer secret"), ("/here", "Bearer secret")]
        assert other.asked == [("/there", None)]


def test_no_proxy_is_asked_for_this_machine(server: Server, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server.answer = says([DRAIN])
    assert asked(HttpSource(server.url), job) == [(1, "drain", "at noon")]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_certificates_are_verified(tmp_path: Path, job: Job, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    fetching._verifying.cache_clear()
    with serving(context) as server:
        server.answer = says([DRAIN])
        assert asked(HttpSource(server.url), job) == []
        assert "certificate verify failed" in told()[0] and server.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        fetching._verifying.cache_clear()
        try:
            assert asked(HttpSource(server.url), job) == [(1, "drain", "at noon")]
            server.answer = dripping(b"HTTP/1.0 200 OK\r\n\r\n[", b" ")(server)
            asked(HttpSource(server.url, timeout=0.3), job)
            assert "it has not answered within 0.3 s" in told()[0]
            server.answer = raw(b"", 302, Location="http://127.0.0.1:1/")
            asked(HttpSource(server.url), job)
            assert "it redirects from https to http" in told()[0]
        finally:
            fetching._verifying.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "file:///etc/passwd"}, "must be http"),
        ({"url": "http://"}, "must be http"),
        ({"url": "http://a:b/"}, "is no URL"),
        ({"url": 3}, "is no URL"),
        ({"url": "http://a b/"}, "must be http"),
        ({"url": "http://a/\n"}, "must be http"),
        ({"url": "http://ä/"}, "must be http"),
        ({"url": "http://me:secret@host/"}, "the url of host holds a user's name"),
        ({"url": "http://a/", "timeout": 0}, "timeout=0"),
        ({"url": "http://a/", "interval": float("nan")}, "interval=nan"),
        ({"url": "https://a/", "token_env": "NOT_THERE"}, "there is no such environment variable"),
        ({"url": "http://a/", "token_env": "CLUSTER_TOKEN"}, "for everybody to read: use https"),
        ({"url": "https://a/", "token_env": "BROKEN_TOKEN"}, "is no token"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_TOKEN", "secret")
    monkeypatch.setenv("BROKEN_TOKEN", "secret\r\nof two lines")
    with pytest.raises(ValueError, match=message) as raised:
        HttpSource(**arguments)
    assert "secret" not in str(raised.value).replace("secret@", "secret") or "token_env" in str(raised.value)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bodies=st.lists(
        st.binary(max_size=60)
        | st.lists(PIECES, max_size=20).map(lambda x: "".join(x).encode())
        | st.recursive(
            st.none() | st.booleans() | st.integers() | st.text() | st.just(DRAIN),
            lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["findings", "slot", "action"]), x),
            max_leaves=8,
        ).map(lambda content: json.dumps(content).encode()),
        max_size=4,
    )
)
def test_any_body_is_taken_or_told(server: Server, bodies: list[bytes]) -> None:
    job = Job()
    source = HttpSource(server.url)
    for body in bodies:
        server.answer = raw(body)
        asked(source, job)


HTTP = [
    *(b"HTTP/1.1 ", b"200", b"302", b" OK", b"\r\n", b"Location: ", b"/", b"Content-Length: ", b"9", b"[]"),
    *(b"Transfer-Encoding: chunked", b"1"),
]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answer=st.binary(max_size=80) | st.lists(st.sampled_from(HTTP), max_size=15).map(b"".join))
def test_any_answer_is_taken_or_told(server: Server, answer: bytes) -> None:
    server.answer = lambda handler: handler.wfile.write(answer) and None
    asked(HttpSource(server.url, timeout=0.5), Job())
