"""What stands in front of every route refuses before it reads, and then stores nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import event

from autofit.client import archive
from autofit.client.http import Service
from autofit.exceptions import UsageError
from autofit.service import boundary, confined
from autofit.storage import Accounts, Limits, Store, Submission
from tests.service.serving import LIMIT, Running

pytestmark = pytest.mark.quick

TOKEN_FREE = {"/healthz", "/readyz"}
"""Documented paths that answer without a token."""
SURROGATE = "\ud800.py"
SENT: dict[str, dict[str, Any]] = {
    "lone surrogate": {"script": SURROGATE},
    "surrogate in a launch line": {"script": ["torchrun", SURROGATE]},
    "surrogate as a field": {SURROGATE: 1},
    "surrogate as an option": {"options": {SURROGATE: 1}},
    "NUL": {"args": ["a\0b"]},
    "deadline": {"deadline": "99999999999h"},
    "memory": {"options": {"memory": "9" * 5000 + "GiB"}},
    "memory, shorter": {"options": {"memory": "9" * 300 + "GiB"}},
    "GPUs of 10^30": {"options": {"gpus": 10**30}},
    "GPUs of 10^9": {"options": {"gpus": 10**9}},
    "GPUs of a trial": {"options": {"gpus_per_trial": 10**9}},
    "infinite": {"options": {"tolerance": float("inf")}},
    "priority": {"priority": 10**30},
    "long script": {"script": "a" * 5000},
    "many words": {"args": ["a"] * 2000},
    "deep": {"options": {"only": [[[["a"]]]]}},
    "folder": {"upload": None, "folder": "/" + "a" * 5000},
    "upload": {"upload": "../" * 20},
}
"""Requests of a search that used to be answered with 500, or to be stored."""
PATHS = (
    *("/api/searches/99999999999999999999", "/api/searches?before=99999999999999999999"),
    *("/searches/99999999999999999999", "/?before=99999999999999999999", "/api/searches/0"),
    *("/api/searches/%ed%a0%80", "/api/searches/1/plan?format=%00", "/api/searches?before=%ff"),
)


def raw(
    running: Running, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=20)
    with contextlib.closing(connection):
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def bearer(user: Service) -> str:
    return f"Bearer {user.token}"


@contextlib.contextmanager
def writes(store: Store) -> Iterator[list[str]]:
    """Yield the list of what is written to the store inside this context."""
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("INSERT", "UPDATE", "DELETE")):
            seen.append(statement)

    event.listen(store._reader, "before_cursor_execute", note)
    yield seen
    event.remove(store._reader, "before_cursor_execute", note)


@pytest.fixture
def uploaded(running: Running, tmp_path: Path) -> tuple[Service, str]:
    """A user, and the name of an uploaded folder."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text("pass\n")
    alice = running.user("alice")
    return alice, alice.post("/api/uploads", archive.pack(tmp_path / "project"))["upload"]


@pytest.mark.parametrize("what", SENT)
def test_what_cannot_be_meant_is_refused_and_stores_nothing(
    what: str, running: Running, uploaded: tuple[Service, str]
) -> None:
    alice, upload = uploaded
    sent = {"script": "train.py", "upload": upload, **SENT[what]}
    with writes(running.store) as seen:
        status, text = raw(
            *(running, "POST", "/api/searches", json.dumps(sent)),
            Authorization=bearer(alice),
            Content_Type="application/json",
        )
    assert 400 <= status < 500, text
    assert json.loads(text)["error"]
    assert seen == []
    assert alice.get("/api/searches") == []


@pytest.mark.parametrize("path", PATHS)
def test_numbers_that_no_row_has(path: str, running: Running) -> None:
    status, _ = raw(running, "GET", path, Authorization=bearer(running.user("alice")))
    assert 400 <= status < 500


def test_every_route_refuses_who_does_not_belong_there(running: Running) -> None:
    """The table is made of the OpenAPI document: no token, a wrong one, another user's."""
    alice, bob = running.user("owner"), running.user("bob")
    user = next(each for each in running.queue.users() if each.startswith("owner"))
    number = running.queue.submit(user, Submission(script=("t.py",), upload="aa")).id
    document = Service(running.url, "").get("/openapi.json")
    routes = [(m.upper(), path) for path, methods in document["paths"].items() for m in methods]
    assert len(routes) >= 13
    for method, path in routes:
        at = path.replace("{number}", str(number))
        refused = [raw(running, method, at)[0]]
        refused.append(raw(running, method, at, Authorization="Bearer autofit_guessed")[0])
        expected = [200, 200] if path in TOKEN_FREE else [401, 401]
        assert refused == expected, (method, path)
        if "{number}" in path:
            answer = raw(running, method, at, Authorization=bearer(bob))
            assert answer[0] == 404, (method, path)
    for path in ("/", f"/searches/{number}", "/nothing", "/docs"):
        assert raw(running, "GET", path)[0] == 401, path
    assert alice.get(f"/api/searches/{number}")["state"] == "queued"


@pytest.mark.parametrize("path", ["/login", "/api/searches", "/api/uploads", "/nothing"])
def test_a_body_is_refused_before_it_is_read(path: str, running: Running) -> None:
    """Without a token; ``/login`` needs none, but no large body either."""
    memory = psutil.Process().memory_info().rss
    began = time.monotonic()
    host, port = running.url.removeprefix("http://").split(":")
    running.user("alice")
    with socket.create_connection((host, int(port)), 20) as sent:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {1 << 31}\r\n\r\n"
        sent.sendall(head.encode())
        part, count = bytes(1 << 20), 0
        with contextlib.suppress(OSError):
            while count < 200:
                sent.sendall(part)
                count += 1
        answer = b""
        with contextlib.suppress(OSError):
            answer = sent.recv(100)
    assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 413"))
    assert time.monotonic() - began < 15.0
    assert psutil.Process().memory_info().rss - memory < 50 << 20


def test_a_client_that_sends_first_reads_why_it_is_refused(running: Running) -> None:
    stranger = Service(running.url, "autofit_guessed")
    with pytest.raises(UsageError, match="no valid token"):
        stranger.post("/api/uploads", bytes(LIMIT))


def test_a_slow_body_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "ANSWER", 1.0)
    with Running.start(tmp_path) as running:
        alice = running.user("alice")
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 20) as slow:
            head = "POST /api/searches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n"
            slow.sendall(f"{head}Authorization: {bearer(alice)}\r\n\r\n{{".encode())
            began = time.monotonic()
            answer = slow.recv(100)
            assert answer.startswith(b"HTTP/1.1 408")
            assert time.monotonic() - began < 10.0
        assert alice.get("/api/searches") == []


def test_connections_without_a_request_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "HEAD", 3.0)
    with Running.start(tmp_path, connections=10) as running, contextlib.ExitStack() as stack:
        alice = running.user("alice")
        host, port = running.url.removeprefix("http://").split(":")
        slow = []
        for _ in range(60):
            each = stack.enter_context(socket.create_connection((host, int(port)), 20))
            with contextlib.suppress(OSError):
                each.sendall(b"POST /api/searches HTTP/1.1\r\nHost: x\r\n")
            slow.append(each)
            if len(slow) % 20 == 0:
                assert alice.get("/api/searches") == []
        assert len(os.listdir("/proc/self/fd")) < 200
        for each in slow:
            with contextlib.suppress(OSError):
                assert each.recv(100) == b"", "it is closed after a while"


def test_forwarded_headers_of_strangers_do_not_count(tmp_path: Path) -> None:
    with Running.start(tmp_path, rate=1.0) as running:
        running.user("alice")
        statuses = [
            raw(
                *(running, "GET", "/api/searches"),
                X_Forwarded_For=f"10.0.0.{number}",
                Authorization="Bearer autofit_guessed",
            )[0]
            for number in range(20)
        ]
        assert statuses.count(429) >= 10
        addresses = {each.address for each in Accounts(running.store).trail()}
        assert addresses == {"", "127.0.0.1"}


def test_forwarded_headers_of_a_trusted_proxy_count(tmp_path: Path) -> None:
    with Running.start(tmp_path, proxies=("127.0.0.1",)) as running:
        running.user("alice")
        for forged in ("10.9.9.9, 10.0.0.1", "10.0.0.1"):
            refused = raw(
                *(running, "GET", "/api/searches"),
                X_Forwarded_For=forged,
                Authorization="Bearer autofit_guessed",
            )
            assert refused[0] == 401
        assert {each.address for each in Accounts(running.store).trail()} == {"", "10.0.0.1"}


def test_a_submission_with_a_key_exists_once(
    running: Running, uploaded: tuple[Service, str]
) -> None:
    alice, upload = uploaded
    sent = {"script": "train.py", "upload": upload, "key": "one"}
    numbers = {alice.post("/api/searches", sent)["id"] for _ in range(3)}
    assert len(numbers) == 1
    assert alice.post("/api/searches", {**sent, "key": "two"})["id"] not in numbers
    bob = running.user("bob")
    assert bob.post("/api/searches", sent)["id"] not in numbers
    trail = Accounts(running.store).trail(alice.get("/api/searches")[0]["user"])
    assert [each.action for each in trail] == ["submit", "submit", "upload"]


def test_quotas(running: Running, uploaded: tuple[Service, str], tmp_path: Path) -> None:
    alice, upload = uploaded
    user = alice.get(f"/api/searches/{alice.post('/api/searches', _of(upload))['id']}")["user"]
    Accounts(running.store).limit(user, Limits(queued=2, upload_bytes=1000))
    second = alice.post("/api/searches", _of(upload))["id"]
    with pytest.raises(UsageError, match=f"2 searches of {user} wait already"):
        alice.post("/api/searches", _of(upload))
    alice.post(f"/api/searches/{second}/cancel")
    assert alice.post("/api/searches", _of(upload))
    with pytest.raises(UsageError, match="wait already"):
        alice.post(f"/api/searches/{second}/resume")
    (tmp_path / "project/data").write_bytes(os.urandom(2000))
    with pytest.raises(UsageError, match=r"your folders would be .* and you may have 1000"):
        alice.post("/api/uploads", archive.pack(tmp_path / "project"))


def test_the_uploads_of_one_user_do_not_stall_another(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = running.user("alice"), running.user("bob")
    read = threading.Event()

    def slow(*_: object) -> str:
        read.wait(30)
        raise UsageError("it is no archive")

    monkeypatch.setattr(confined, "digest", slow)
    with ThreadPoolExecutor(45) as pool:  # more than the threads that answer requests
        asked = (running, "POST", "/api/uploads", b"x")
        answers = [pool.submit(raw, *asked, Authorization=bearer(alice)) for _ in range(45)]
        time.sleep(1.0)
        began = time.monotonic()
        assert bob.get("/api/searches") == []
        assert time.monotonic() - began < 10.0
        assert not any(each.done() for each in answers)
        read.set()
        assert {each.result()[0] for each in answers} == {400}


def _of(upload: str) -> dict[str, str]:
    return {"script": "train.py", "upload": upload}


def test_the_client_waits_while_the_service_is_restarted(tmp_path: Path) -> None:
    """The port is taken by nobody for a moment, as when a service is started again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sent: list[Any] = []
    said: list[str] = []
    service = Service(f"http://127.0.0.1:{port}", "", say=said.append)
    waiting = threading.Thread(target=lambda: sent.append(service.post("/api/searches", {})))
    waiting.start()
    time.sleep(0.5)
    with socket.create_server(("127.0.0.1", port)) as server:
        for status in (503, 201):
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                head = f"HTTP/1.1 {status} x\r\nContent-Length: 10\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode() + b'{"id": 10}')
    waiting.join(20)
    assert sent == [{"id": 10}]
    (line,) = said
    assert line.startswith(
        f"{service.url} cannot answer now ([Errno 111] Connection refused): trying"
    )


def test_a_certificate_that_is_not_trusted_ends_the_client_at_once(tmp_path: Path) -> None:
    if (program := shutil.which("openssl")) is None:
        pytest.skip("openssl, which makes a certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    line = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    line += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(line, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    plain = socket.create_server(("127.0.0.1", 0))
    with context.wrap_socket(plain, server_side=True) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                server.accept()

        accepting = threading.Thread(target=accept)
        accepting.start()
        service = Service(f"https://127.0.0.1:{server.getsockname()[1]}", "")
        with pytest.raises(UsageError, match=r"certificate of .* is not accepted \(self.signed"):
            service.get("/api/searches")
        accepting.join()


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    """It is alive, and not ready; the answer does not say where the store is."""
    with Running.start(tmp_path) as running:
        alice = running.user("alice")
        (tmp_path / "service.db").rename(tmp_path / "away.db")
        running.store._reader.dispose()
        (tmp_path / "service.db").mkdir()
        assert raw(running, "GET", "/healthz")[0] == 200
        status, text = raw(running, "GET", "/readyz")
        assert (status, "service.db" in text) == (503, False)
        status, text = raw(running, "GET", "/api/searches", Authorization=bearer(alice))
        assert (status, "service.db" in text) == (503, False)
