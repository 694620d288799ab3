"""Programs under a real cap, in processes of their own."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Capped = Callable[..., Any]

PRELUDE = """
import gc, json, sys
import torch
from torch import nn
import autofit, autofit.exceptions
from autofit.worker.meter.kinds.cpu import ShimMeter
meter = ShimMeter.loaded()
MiB = 1 << 20
def say(**values):
    print("SAID " + json.dumps(values))
def tensor(mib):
    return torch.ones(mib * MiB // 4)
"""


@pytest.fixture
def capped(tmp_path: Path) -> Capped:
    """Run a program under a cap of ``mib`` MiB and return what it says, as JSON."""

    def run(body: str, *, mib: int, **variables: str) -> Any:
        script = tmp_path / "program.py"
        script.write_text(PRELUDE + textwrap.dedent(body))
        command = [sys.executable, "-m", "autofit.worker.cap", f"{mib}MiB", "--"]
        done = subprocess.run(
            [*command, sys.executable, str(script)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
        said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
        return json.loads(said[-1].removeprefix("SAID ")) if said else None

    return run


Launch = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run a program on so many ranks, each under a cap on the CPU; return what each says."""

    def run(
        size: int, *arguments: str, program: str = "ranks.py", timeout: float = 150
    ) -> list[dict[str, Any]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
        if arguments[0] == "cpu":
            command = [sys.executable, "-m", "autofit.worker.cap", "200MiB", "--", *command]
        files = [tmp_path / f"rank{rank}.log" for rank in range(size)]
        ranks = []
        for rank, file in enumerate(files):
            with file.open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        command,
                        env={**environment, "RANK": str(rank)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + timeout
        try:
            for process in ranks:
                process.wait(timeout=max(1.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            texts = [file.read_text() for file in files]
            print(*texts, sep="\n----\n")
        found = [line for text in texts for line in text.splitlines() if line.startswith("SAID ")]
        assert [process.returncode for process in ranks] == [0] * size
        return [json.loads(line.removeprefix("SAID ")) for line in found]

    return run


@pytest.fixture
def two_gpus() -> None:
    """Skip where there are fewer."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    if listed.count("GPU ") < 2:
        pytest.skip("needs two NVIDIA GPUs")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store for this test alone, not made yet."""
    path = tmp_path / "fitted.db"
    monkeypatch.setenv("AUTOFIT_STORAGE", str(path))
    return path


@pytest.fixture(autouse=True)
def switches_as_they_were() -> Any:
    """Leave no switch or hook behind."""
    from autofit.resilience import switches

    yield
    switches.set_active(True)
    switches.set_hooks()
