"""A trial leaves the user's folders byte for byte as they were, also when it is killed half-way."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchEnded, LaunchRequest, Script, Uncontained

pytestmark = pytest.mark.quick

WRITER = """
import logging, mmap, os, pathlib, shutil, sqlite3, subprocess, sys, tempfile, time
here, elsewhere = pathlib.Path.cwd(), pathlib.Path(sys.argv[1])
(here / "kept.txt").write_text("changed")
(here / "gone.txt").unlink()
shutil.rmtree(here / "folder")
(here / "runs").mkdir()
(here / "runs" / "log.txt").write_text("new")
os.rename(here / "named.txt", here / "renamed.txt")
(elsewhere / "absolute.txt").write_text("new")
(pathlib.Path.home() / ".cache" / "autofit-test").mkdir(parents=True, exist_ok=True)
sqlite3.connect(here / "tracker.db").execute("create table runs (loss real)")
subprocess.run(["sh", "-c", "echo child > from_child.txt"], check=True)
with open(here / "mapped.bin", "r+b") as file:
    with mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0:1] = b"Z"
        mapped.flush()
logging.basicConfig(filename=elsewhere / "run.log", level="INFO")
logging.info("new")
folder = os.open(here, os.O_RDONLY)
os.close(os.open("by_descriptor.txt", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
os.symlink("kept.txt", here / "link")
os.chmod(here / "mode.txt", 0o600)
assert (here / "kept.txt").read_text() == "changed"  # the script sees what it wrote
assert sorted(os.listdir(here / "runs")) == ["log.txt"]
print("written", flush=True)
if len(sys.argv) > 2:
    time.sleep(60)
"""

NAMES = ("kept.txt", "gone.txt", "named.txt", "mapped.bin", "mode.txt", "folder/inside.txt")


def checksums(*folders: Path) -> dict[str, str]:
    """Return mode and digest of every file and the name of every folder."""
    return {
        str(path): f"{path.lstat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        if path.is_file()
        else "folder"
        for folder in folders
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here / "folder", elsewhere):
        folder.mkdir(parents=True)
    for name in NAMES:
        (here / name).write_text(name)
    (here / "train.py").write_text(WRITER)
    return here, elsewhere


def request(here: Path, *args: str, timeout: float = 60.0) -> LaunchRequest:
    return LaunchRequest(
        script=Script(target="train.py", args=args, cwd=str(here)),
        plans=(Plan(),),
        device="cpu",
        budget=1 << 30,
        timeout=timeout,
    )


def test_nothing_is_left(folders: tuple[Path, Path], tmp_path: Path) -> None:
    here, elsewhere = folders
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = checksums(here, elsewhere)
    events = list(launch(request(here, str(elsewhere)), scratch=str(scratch)))
    if any(isinstance(event, Uncontained) for event in events):
        pytest.skip("this system lets no user make a mount namespace")
    ended = events[-1]
    assert isinstance(ended, LaunchEnded)
    assert "written" in ended.output
    assert checksums(here, elsewhere) == before
    assert not (Path.home() / ".cache" / "autofit-test").exists()
    assert list(scratch.iterdir()) == []


ISOLATED = """
import sys
from pathlib import Path
from autofit.worker.harness.process.sandbox import isolate
print(isolate(Path(sys.argv[1])))
for folder in sys.argv[2:]:
    (Path(folder) / "new").write_text("written")
"""


def test_nothing_is_left_beside_a_mount(tmp_path: Path) -> None:
    """Where something is mounted below, children are covered: no links, not the scratch folder."""
    scratch, here, mounted = (tmp_path / name for name in ("scratch", "here", "mounted"))
    for folder in (scratch, here, mounted):
        folder.mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    mount = f"mount -t tmpfs none '{mounted}'"
    unshare = ["unshare", "-Urm", "sh", "-c"]
    if subprocess.run([*unshare, mount], capture_output=True).returncode:
        pytest.skip("this system gives no process mounts of its own")
    isolated = [sys.executable, "-c", ISOLATED, *map(str, (scratch, here, mounted))]
    both = [*unshare, f'{mount} && "$@" && ls {mounted}', "sh", *isolated]
    ran = subprocess.run(both, cwd=here, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("True\n", ""), "nothing is there once the process is gone"
    assert list(here.iterdir()) == []


@pytest.mark.full
def test_nothing_is_left_of_a_trial_that_is_killed(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    here, elsewhere = folders
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = checksums(here, elsewhere)
    begun = time.monotonic()
    asked = request(here, str(elsewhere), "linger", timeout=5.0)
    events = list(launch(asked, scratch=str(scratch)))
    if any(isinstance(event, Uncontained) for event in events):
        pytest.skip("this system lets no user make a mount namespace")
    assert time.monotonic() - begun < 30
    assert checksums(here, elsewhere) == before
    assert list(scratch.iterdir()) == []
