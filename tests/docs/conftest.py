"""The folder in which the documentation's commands and programs run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autofit.worker.launch.reaper import SESSION, Reaper
from tests.docs.blocks import Block
from tests.docs.printed import is_printed
from tests.docs.prose import ROOT
from tests.ray_head import TOOLS

SCRIPT = """
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(32, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
print(loss.item())
"""
HEAD, DATABASE = "10.0.0.1", "10.0.0.5"
"""The addresses of a cluster's head and of a database in the pages."""
CLONE_NEWNET = 0x40000000
SECONDS = 120.0
"""What commands may take until they have printed what a page says, or until they end."""
Bash = Callable[[str, Path], subprocess.CompletedProcess[str]]
"""Runs commands in a folder, as a shell does into which they are typed."""


@pytest.fixture(scope="session")
def bash() -> Bash:
    """Return what runs commands; its output is what a terminal shows, errors included."""

    def run(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euc", commands],
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "COLUMNS": "120",
        "MAKEFLAGS": f"BIN={TOOLS} STAMP=",  # what it would install is there
    }


@contextlib.contextmanager
def started(block: Block, folder: Path) -> Iterator[None]:
    """Run commands that end with the page: wait for their output, and interrupt them at the end."""
    mark, scratch = uuid.uuid4().hex, folder / "session"
    scratch.mkdir()
    reaper = Reaper(mark, scratch)
    log = folder / "printed"
    try:
        with log.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-euc", block.commands],
                cwd=folder,
                env={**_environment(folder), SESSION: mark, "SPT_NOENV": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + SECONDS
        while not is_printed(block.output, log.read_text()):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=SECONDS)
    finally:
        reaper.finish()


@pytest.fixture
def network() -> Iterator[None]:
    """A network of this thread and of the processes that it starts, with the pages' machines."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as outside:
        if libc.unshare(CLONE_NEWNET):
            pytest.skip(f"no network of its own: {os.strerror(ctypes.get_errno())}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            for address in (HEAD, DATABASE):
                subprocess.run(["ip", "address", "add", address, "dev", "lo"], check=True)
            yield
        finally:
            assert not libc.setns(outside.fileno(), CLONE_NEWNET)


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory, bash: Bash) -> Path:
    """A folder as the pages expect it: the examples, and a script that has been searched."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "package").mkdir()
    (folder / "package/train.py").write_text(SCRIPT)
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("Makefile", "pyproject.toml", "constraints-cpu.txt"):
        shutil.copy2(ROOT / name, folder)
    ran = bash("autofit search train.py --trials 2", folder)
    assert ran.returncode == 0, ran.stdout
    return folder


@pytest.fixture
def workplace(searched: Path, tmp_path: Path) -> Iterator[Path]:
    """That folder at its path, which a study has in it; as it was, when the test has ended."""
    shutil.copytree(searched, tmp_path / "kept")
    yield searched
    shutil.rmtree(searched)
    shutil.move(tmp_path / "kept", searched)
