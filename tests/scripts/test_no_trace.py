"""A search over these scripts leaves the user's folders byte for byte as they were.

Their folder, an absolute one elsewhere, and ``~/.cache``; ``autofit.db`` is the search's own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.storage import State, Store, TrialRecord
from tests.scripts._runner import HERE

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

OURS = ("autofit.db", "autofit.db-wal", "autofit.db-shm")
SEARCHES = (
    ("loader.py", "--", "--epochs", "80"),
    ("evaluation.py",),
    ("hf_trainer.py",),
)


@dataclass(frozen=True)
class Home:
    """A user's home with a copy of the scripts, and a folder for results elsewhere."""

    top: Path
    scratch: Path
    """For temporary files; its path is short, because Ray's sockets are there."""

    @property
    def project(self) -> Path:
        return self.top / "home" / "project"

    @property
    def results(self) -> Path:
        return self.top / "results"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "AUTOFIT_STORAGE"}
        ours = {"HOME": str(self.top / "home"), "TMPDIR": str(self.scratch)}
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        kept.pop("XDG_CACHE_HOME", None)
        return kept | ours | settings

    def checksums(self) -> dict[str, str]:
        """A digest of every file, the name of every folder."""
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
            for folder in (self.top / "home", self.results)
            for path in sorted(folder.rglob("*"))
            if path.name not in OURS
        }

    def search(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a search of a few trials, in a process group of its own."""
        asked = [sys.executable, "-m", "autofit", "search", "--trials", "3", "--json", *arguments]
        return subprocess.Popen(
            asked,
            cwd=self.project,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def writing(self) -> tuple[str, ...]:
        """The arguments that let a script write here, beside it, and to ~/.cache."""
        return ("writes.py", "--", "--steps", "2000", "--folder", str(self.results / "new"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """Files are there already where the script writes; the meter's shim is built beforehand."""
    with tempfile.TemporaryDirectory(prefix="styles-", ignore_cleanup_errors=True) as scratch:
        yield prepared(Home(tmp_path, Path(scratch)))


def prepared(home: Home) -> Home:
    shutil.copytree(HERE, home.project, ignore=shutil.ignore_patterns("__pycache__"))
    (home.project / "log.csv").write_text("the user's\n")
    (home.top / "home" / ".cache" / "writes").mkdir(parents=True)
    (home.top / "home" / ".cache" / "writes" / "last.txt").write_text("the user's\n")
    (home.results / "old").mkdir(parents=True)
    (home.results / "old" / "step5.pt").write_bytes(b"the user's")
    cap = [sys.executable, "-m", "autofit.worker.cap", "1GiB", "--", "true"]
    subprocess.run(cap, env=home.environment, check=True)
    return home


def test_searches_leave_nothing(home: Home) -> None:
    before = home.checksums()
    for arguments in (home.writing(), *SEARCHES):
        process = home.search(*arguments)
        printed, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
        assert json.loads(printed)["baseline"]["step_seconds"] > 0, "it trained"
        assert home.checksums() == before, arguments
    assert not list(home.scratch.rglob("log.csv")), "what the trials wrote goes with them"


def test_a_search_killed_half_way_leaves_nothing(home: Home) -> None:
    before = home.checksums()
    process = home.search("--trials", "30", *home.writing())
    killed = False
    try:
        deadline = time.monotonic() + 240
        while not (any(written(path) for path in contained(home)) and running(home)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no trial was seen to write"
            time.sleep(0.02)  # a trial of so small a script is over within a second
        killed = process.poll() is None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert killed, "it was half-way"
    deadline = time.monotonic() + 60
    while contained(home):
        assert time.monotonic() < deadline, "a trial's scratch folder is left"
        time.sleep(0.2)
    assert home.checksums() == before


def contained(home: Home) -> list[Path]:
    """The copies that trials have of the log, in their overlays; folders vanish meanwhile."""
    walked = os.walk(home.scratch)
    return [Path(folder) / "log.csv" for folder, _, files in walked if "log.csv" in files]


def written(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def running(home: Home) -> tuple[TrialRecord, ...]:
    with Store(str(home.project / "autofit.db"), create=False) as store:
        return store.trials(store.studies()[0], state=State.RUNNING)
