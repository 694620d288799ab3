"""A real Ray head with its job server, for tests: on loopback only, with a token, soon gone."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.worker.launch.reaper import SESSION, Reaper

_SECONDS = 60.0
TOOLS = Path(sys.executable).parent
"""Where ``ray``, ``autofit`` and ``python`` are."""


@dataclass(frozen=True)
class Head:
    """A running head, of two CPUs."""

    address: str
    """Of the cluster, as ``ray.init`` takes it."""
    dashboard: str
    """URL of the job server."""
    environment: dict[str, str]
    """What a process needs to be let in: the token, and tools on its ``PATH``."""
    folder: Path
    """Goes with the head; the ``HOME`` of its jobs."""


def needs_a_job_server() -> None:
    """Skip the test, with a reason, where Ray has none."""
    for package in ("aiohttp_cors", "opencensus"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"Ray's job server needs {package}: pip install -e '.[dev]'")


@contextlib.contextmanager
def head() -> Iterator[Head]:
    """Start one, and leave nothing behind; skip the test where Ray has no job server."""
    needs_a_job_server()
    folder = Path(tempfile.mkdtemp(prefix="head-", dir="/tmp"))  # short: sockets are in it
    mark = uuid.uuid4().hex
    reaper = Reaper(mark, folder)
    try:
        ports = free_ports(4)
        environment = {
            **os.environ,
            SESSION: mark,
            "SPT_NOENV": "1",  # else the mark is overwritten
            "HOME": str(folder),
            "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback
            "RAY_enable_metrics_collection": "0",
        }
        options = {
            "node-ip-address": "127.0.0.1",
            "port": ports[0],
            "include-dashboard": "true",
            "dashboard-host": "127.0.0.1",
            "dashboard-port": ports[1],
            "ray-client-server-port": ports[2],
            "dashboard-agent-listen-port": ports[3],
            "temp-dir": folder / "ray",
            "plasma-directory": folder,
            "object-store-memory": 80 << 20,
            "num-cpus": 2,
            "num-gpus": 0,
        }
        command = [str(TOOLS / "ray"), "start", "--head", "--disable-usage-stats"]
        command += [f"--{name}={value}" for name, value in options.items()]
        started = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
        assert started.returncode == 0, started.stdout + started.stderr
        running = Head(
            address=f"127.0.0.1:{ports[0]}",
            dashboard=f"http://127.0.0.1:{ports[1]}",
            environment={
                **{key: value for key, value in environment.items() if key != SESSION},
                "RAY_ADDRESS": "",
            },
            folder=folder,
        )
        _wait(running)
        yield running
    finally:
        reaper.finish()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(head: Head) -> None:
    """Wait until its job server takes jobs: its agent is up a little later than itself."""
    token = head.environment["RAY_AUTH_TOKEN"]
    request = urllib.request.Request(
        f"{head.dashboard}/api/jobs/", headers={"Authorization": f"Bearer {token}"}
    )
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                assert json.load(answer) == []
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def free_ports(many: int) -> list[int]:
    """Return ports of loopback that nobody has."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(many)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
