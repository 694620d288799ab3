"""A real card: who holds how much of it, and a second process that takes some."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from autofit.worker import meter
from autofit.worker.harness.patching.observers import Calls

HOG = """
import sys, time, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(600)
"""

Hog = Callable[[int], AbstractContextManager[int]]


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.clear()


@pytest.fixture
def hog() -> Hog:
    """Let another process hold so many bytes of the card; gives its process id."""

    @contextmanager
    def hold(size: int) -> Iterator[int]:
        command = [sys.executable, "-c", HOG, str(size)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "held\n"
                yield process.pid
            finally:
                process.kill()

    return hold


@pytest.fixture
def free() -> Iterator[int]:
    """Bytes free on the card; as many must be free again within seconds of the test."""
    before = meter.free_bytes("cuda")
    yield before
    deadline = time.monotonic() + 5
    while (missing := before - meter.free_bytes("cuda")) > 64 << 20:
        assert time.monotonic() < deadline, f"{missing} bytes have not come back"
        time.sleep(0.05)
