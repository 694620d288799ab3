"""Which checkpoints a script writes is told to the parent, whoever opens the file."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

# An audit hook lasts as long as its process: one of its own runs what all tests look at.
PREAMBLE = """\
import io, os, sys
import torch
from autofit.worker.harness.process.saved_files import SavedFiles

class Reporter:
    def send(self, event):
        if type(event).__name__ == "Saved":
            print(os.path.relpath(event.path), flush=True)

SavedFiles(Reporter()).attach(checkpoints=True)
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.zeros(1)
step = torch.optim.SGD([weight]).step
"""


WRITTEN = """
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
READ = """
torch.save({}, "a.pt")
step()
torch.load("a.pt")
open("a.pt", "rb").close()
open("log.txt", "w").close()
step()
"""
AGAIN = """
torch.save({}, "a.pt")
torch.save({}, "b.pt")
torch.save({}, "a.pt")
print("step")
step()
torch.save({}, "never-told.pt")
"""
PARTS = (WRITTEN, READ, AGAIN)

Told = dict[str, list[str]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What was told of each part."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + "print('part', flush=True)\n".join(PARTS)],
        cwd=tmp_path_factory.mktemp("saves"),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (part.split() for part in done.stdout.split("part\n"))
    return dict(zip(PARTS, lines, strict=True))


def test_whoever_writes_it(told: Told) -> None:
    assert told[WRITTEN] == [
        "zip.pt",
        "keyword.pt",
        "old.pth",
        "library.ckpt",
        "atomic.pt",
        "model.safetensors",
    ]


def test_what_is_read_or_is_no_checkpoint_is_not_told(told: Told) -> None:
    assert told[READ] == ["a.pt"]


def test_at_the_next_step_the_newest_last(told: Told) -> None:
    assert told[AGAIN] == ["step", "b.pt", "a.pt"]
