"""A real service in processes of its own: the command, a Ray on this machine, its actors."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from autofit.client import archive
from autofit.client.http import Service

SCRIPT = """\
import torch
from torch import nn

torch.manual_seed({seed})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.mean(-1)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    x = torch.randn(256, 8)
    loss = nn.functional.mse_loss(model(x), x.mean(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
OPTIONS = {
    "memory": "2.25MiB",
    "trials": 3,
    "only": ["checkpointing", "micro_batch"],
    "allow": "exact",
}
"""The script does not fit as it is."""
WORDS = (
    *("--memory", "2.25MiB", "--trials", "3", "--allow", "exact"),
    *("--only", "checkpointing", "--only", "micro_batch"),
)
"""``OPTIONS`` as words of the command line."""
OF_RAY = (
    *("gcs_server", "raylet", "dashboard", "runtime_env", "ray/_private"),
    *("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray.util.client.server"),
)
"""Words in the command lines of Ray's own processes."""
OF_THE_SERVICE = (" serve ", "autofit.service.supervisor")
START = 180.0
"""Seconds within which a service has to answer; it takes some ten on an idle machine."""


class LiveService:
    """A service with a store, a port and a temporary folder of its own; a context manager."""

    def __init__(
        self,
        searches: int = 2,
        *,
        words: tuple[str, ...] = ("--trusted-users",),
        python: str = sys.executable,
        storage: str = "",
        **more: str,
    ) -> None:
        """``words``: more options of the command; ``more``: variables of the environment.

        ``storage``: the URL of the store, if it is not a file of the service.
        """
        self.root = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))  # short: sockets lie below it
        self.storage = storage or str(self.root / "service.db")
        self._searches = searches
        self._words = words
        self._python = python
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.environment = {
            **{name: text for name, text in os.environ.items() if name != "AUTOFIT_STORAGE"},
            "TMPDIR": str(self.root / "t"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
            **more,
        }
        (self.root / "t").mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    def autofit(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of autofit to its end."""
        return subprocess.run(
            [self._python, "-m", "autofit", *words],
            cwd=cwd or self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def start(self) -> None:
        """Start the service and wait until it answers."""
        line = [self._python, "-m", "autofit", "serve", "--storage", self.storage]
        line += ["--port", str(self._port), "--searches", str(self._searches), *self._words]
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                line, cwd=self.root, env=self.environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=5).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError((self.root / "log").read_text())

    def kill(self) -> None:
        """End the service with SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def token(self, user: str) -> str:
        """Return a new token for a user."""
        made = self.autofit("token", "create", user, "--storage", self.storage)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()

    def folder(self, seed: int) -> Path:
        """Return a folder with a script, another one for each seed."""
        folder = self.root / f"script{seed}"
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT.replace("{seed}", str(seed)))
        return folder

    def submit(self, service: Service, folder: Path, **more: object) -> int:
        """Submit the script of a folder; return the number of the search.

        ``more``: further fields of the request.
        """
        upload = service.post("/api/uploads", archive.pack(folder))["upload"]
        request = {"script": "train.py", "upload": upload, "options": OPTIONS, **more}
        number: int = service.post("/api/searches", request)["id"]
        return number

    def processes(self) -> list[str]:
        """Return the command lines of the processes that the service has started, and its own."""
        return [line for _, line in self._all() if line]

    def found(self, word: str) -> list[psutil.Process]:
        """Return those of these processes whose command line begins with a path or word of it."""
        return [each for each, line in self._all() if word in line.partition(" ")[0]]

    def _all(self) -> list[tuple[psutil.Process, str]]:
        mark, found = self.environment["TMPDIR"], []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == mark and process.is_running():
                    found.append((process, " ".join(process.cmdline())))
            except psutil.Error:
                continue
        return found

    def orphans(self) -> list[str]:
        """Return the processes that are neither Ray's nor the service."""
        return [
            line
            for line in self.processes()
            if not any(word in line for word in OF_THE_SERVICE)
            and not any(word in line for word in OF_RAY)
        ]

    def stop(self) -> subprocess.CompletedProcess[str]:
        """End the service and its Ray."""
        stopped = self.autofit("serve", "--stop", "--storage", self.storage)
        if self._process is not None:
            self._process.wait(30)
        return stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self.root, ignore_errors=True)
