"""``autofit serve`` refuses to start where it should not, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.cli import main
from autofit.storage import Queue, Store

pytestmark = pytest.mark.quick


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the line with which ``autofit serve`` refuses."""
    assert main(["serve", "--storage", "service.db", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_another_address_without_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "--host", "0.0.0.0")
    assert line.startswith("autofit: --host 0.0.0.0: without a token")
    assert "autofit token create" in line


def test_a_second_user_without_trust(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "the service is not root"
    monkeypatch.setattr("autofit.service.server.uid_obstacle", lambda address: why)
    for user in ("alice", "bob"):
        assert main(["token", "create", user, "--storage", "service.db"]) == 0
    token = capsys.readouterr().out.split()[0]
    assert f"alice, bob), and their scripts would run under one uid ({why})" in refusal(capsys)
    assert token.encode() not in Path("service.db").read_bytes()
    with Store("service.db") as store:
        assert Queue(store).users() == ("alice", "bob")


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port} cannot be used" in refusal(capsys, "--port", port)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tls-certificate", "a.pem"], "give both, or none"),
        (["--tls-certificate", "a.pem", "--tls-key", "b.pem"], "No such file"),
    ],
)
def test_tls_files(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert why in refusal(capsys, *words)


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autofit.service.server.NEEDS", ("fastapi", "no_such_package"))
    line = refusal(capsys)
    assert line.endswith("needs no_such_package: pip install 'autofit-torch[serve]'")


def test_stop_when_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--stop", "--storage", "service.db"]) == 0
    assert capsys.readouterr().out == "nothing runs\n"


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "create", "a b", "--storage", "service.db"]) == 2
    assert "'a b' is not a valid user name" in capsys.readouterr().err
