"""Without an overlay, what a rank writes stays private, and the rank sees it at its usual path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

HEAD = """\
import os, shutil, sys
from pathlib import Path
from autofit.worker.harness.process.private_files import PrivateFiles
PrivateFiles(Path(sys.argv[1])).attach()
"""
WRITES = """
Path("log.txt").write_text("mine")
with open("kept.txt", "a") as file:
    file.write(" and more")
os.makedirs("out/deep")
Path("out/deep/new.txt").write_text("new")
Path("folder/added.txt").write_text("added")
assert Path("log.txt").read_text() == "mine"
assert Path("kept.txt").read_text() == "first and more"
assert os.getcwd() == sys.argv[2]
assert sorted(os.listdir()) == ["folder", "kept.txt", "log.txt", "out"]
assert sorted(each.name for each in os.scandir("folder")) == ["added.txt", "inside.txt"]
assert [str(each) for each in Path("out").rglob("*.txt")] == ["out/deep/new.txt"]
os.chdir("out")
assert os.getcwd() == sys.argv[2] + "/out" and Path("deep/new.txt").exists()
"""
DELETES = """
os.remove("kept.txt")
assert not Path("kept.txt").exists() and "kept.txt" not in os.listdir()
try:
    open("kept.txt")
except FileNotFoundError:
    pass
else:
    raise AssertionError("it is there")
shutil.rmtree("folder")
assert not os.path.isdir("folder")
os.mkdir("folder")
assert os.listdir("folder") == []
try:
    os.mkdir("folder")
except FileExistsError:
    pass
else:
    raise AssertionError("made twice")
Path("kept.txt").write_text("again")
assert Path("kept.txt").read_text() == "again"
"""
RENAMES = """
os.replace("kept.txt", "moved.txt")
assert Path("moved.txt").read_text() == "first" and not Path("kept.txt").exists()
os.rename("folder", "other")
assert Path("other/inside.txt").read_text() == "inside" and not Path("folder").exists()
Path("tmp").write_text("checkpoint")
os.replace("tmp", "moved.txt")
assert Path("moved.txt").read_text() == "checkpoint"
os.symlink("moved.txt", "latest")
assert Path("latest").read_text() == "checkpoint"
shutil.copytree("other", "copied")
assert Path("copied/inside.txt").read_text() == "inside"
"""
CHECKPOINTS = """
import numpy, torch
torch.save({"x": torch.ones(3)}, "model.pt")
assert torch.load("model.pt", mmap=True)["x"].sum() == 3
numpy.save("values.npy", numpy.ones(2))
assert numpy.load("values.npy").sum() == 2
try:
    from safetensors.torch import load_file, save_file
except ImportError:
    pass
else:
    save_file({"x": torch.ones(3)}, "model.safetensors")
    assert load_file("model.safetensors")["x"].sum() == 3
"""


@pytest.mark.parametrize(
    "text",
    [WRITES, DELETES, RENAMES, CHECKPOINTS],
    ids=["writes", "deletes", "renames", "checkpoints"],
)
def test_nothing_real_changes(tmp_path: Path, text: str) -> None:
    place, private = tmp_path / "place", tmp_path / "private"
    (place / "folder").mkdir(parents=True)
    private.mkdir()
    (place / "kept.txt").write_text("first")
    (place / "folder" / "inside.txt").write_text("inside")
    command = [sys.executable, "-c", HEAD + text, str(private), str(place)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(str(each.relative_to(place)) for each in place.rglob("*")) == [
        "folder",
        "folder/inside.txt",
        "kept.txt",
    ]
    assert (place / "kept.txt").read_text() == "first"
