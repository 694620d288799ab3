"""Which checkpoints a script writes is told to the parent, whoever opens the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

# An audit hook lasts as long as its process: each test has one of its own.
PREAMBLE = """\
import io, os, sys
import torch
from autofit.worker.harness.saves import Saves

class Reporter:
    def send(self, event):
        print(os.path.relpath(event.path), flush=True)

Saves(Reporter()).attach()
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.zeros(1)
step = torch.optim.SGD([weight]).step
"""


def told(folder: Path, code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_whoever_writes_it(tmp_path: Path) -> None:
    code = """
from safetensors.torch import save_file
torch.save({}, "zip.pt")
torch.save({}, f="keyword.pt")
torch.save({}, "old.pth", _use_new_zipfile_serialization=False)
buffer = io.BytesIO()
torch.save({}, buffer)
with open("library.ckpt", "wb") as file:
    file.write(buffer.getvalue())
torch.save({}, "half.tmp")
os.replace("half.tmp", "atomic.pt")
save_file({"a": torch.zeros(1)}, "model.safetensors")
step()
"""
    assert told(tmp_path, code) == [
        "zip.pt",
        "keyword.pt",
        "old.pth",
        "library.ckpt",
        "atomic.pt",
        "model.safetensors",
    ]


def test_at_the_next_step_the_newest_last(tmp_path: Path) -> None:
    code = """
torch.save({}, "a.pt")
torch.save({}, "b.pt")
torch.save({}, "a.pt")
print("step")
step()
torch.save({}, "never-told.pt")
"""
    assert told(tmp_path, code) == ["step", "b.pt", "a.pt"]


def test_what_is_read_or_is_no_checkpoint_is_not_told(tmp_path: Path) -> None:
    code = """
torch.save({}, "a.pt")
step()
torch.load("a.pt")
open("a.pt", "rb").close()
open("log.txt", "w").close()
step()
"""
    assert told(tmp_path, code) == ["a.pt"]
