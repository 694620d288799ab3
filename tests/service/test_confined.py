"""What a user sent is read by a process with the user's rights and with limits."""

from __future__ import annotations

import io
import os
import resource
import tempfile
from pathlib import Path

import pytest

from autofit.client import archive
from autofit.exceptions import AutofitError, UsageError
from autofit.service import confined
from autofit.storage import Submission
from autofit.worker.launch.other_uid import allowed
from tests.service.archives import bomb
from tests.uids import UID, interpreter, open_folder, search_path

pytestmark = pytest.mark.quick

SECRETS = (
    *("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "AUTOFIT_TOKEN", "AUTOFIT_STORAGE", "PGPASSWORD"),
    *("NVIDIA_API_KEY", "SSH_AUTH_SOCK", "https_proxy", "WANDB_API_KEY", "RAY_AUTH_TOKEN"),
)

ENDLESS = """
import gzip, os

def read(self, size=-1):
    while True:
        os.write(1, bytes(1 << 20))

gzip.GzipFile.read = read
"""
"""Makes the process that reads an archive write without end."""


def test_a_script_sees_the_allowed_variables_alone() -> None:
    seen = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "NCCL_P2P_DISABLE": "1"}
    assert allowed({**dict.fromkeys(SECRETS, "x"), **seen}) == seen


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a header of the archive is too long"):
        confined.unpack(bomb(b"x"), tmp_path / "there", archive.LIMIT, None)
    assert list((tmp_path / "there").iterdir()) == []


def test_a_process_without_memory_or_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "SECONDS", 0.0)
    too_much = pytest.raises(UsageError, match=r"more than 0 s or too much memory")
    with tempfile.TemporaryFile() as file, too_much:
        confined.digest(file, archive.LIMIT, None)


def test_an_answer_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills a file up to a limit, and not the memory of the service."""
    (tmp_path / "sitecustomize.py").write_text(ENDLESS)
    paths = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryFile() as file, pytest.raises(UsageError, match="send less"):
        confined.digest(file, archive.LIMIT, None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_script_is_understood(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    submission = Submission(script=("train.py",), args=("--epochs", "3"), folder=str(tmp_path))
    found = confined.understand(submission, tmp_path, None)
    assert (found.script.target, found.script.args) == ("train.py", ("--epochs", "3"))
    (tmp_path / "train.py").write_text("print(\n")
    with pytest.raises(AutofitError, match=r"train\.py"):
        confined.understand(submission, tmp_path, None)


def test_what_root_may_read_is_not_read_for_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a launch line's configuration, as a script, and as a folder."""
    python = interpreter()
    if python is None:
        pytest.skip("this is not root, or other users cannot run Python here")
    monkeypatch.setattr("sys.executable", python)
    monkeypatch.setenv("PYTHONPATH", search_path())
    with open_folder() as there:
        folder, closed = there / "files", there / "closed"
        for each in (folder, closed):
            each.mkdir()
        folder.chmod(0o755)
        closed.chmod(0o700)
        secret = closed / "secret.yaml"
        answers = []
        for text in ("machine_rank: 7777\n", "password: 'not read'\n", None):
            secret.unlink() if text is None else secret.write_text(text)
            for words in (
                ("accelerate", "launch", "--config_file", str(secret), "train.py"),
                (str(secret),),
            ):
                submission = Submission(script=words, folder=str(folder))
                with pytest.raises(UsageError) as refused:
                    confined.understand(submission, folder, UID)
                answers.append(str(refused.value))
        assert not any("cannot be read at all" in answer for answer in answers), answers
        assert not any("7777" in answer or "password" in answer for answer in answers)
        assert len(set(answers[::2])) == len(set(answers[1::2])) == 1, "they tell what is there"
        with pytest.raises(UsageError, match="cannot enter the folder"):
            confined.understand(Submission(script=("a.py",), folder=str(closed)), closed, UID)


def test_an_unpacked_folder_is_its_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = interpreter()
    if python is None:
        pytest.skip("this is not root, or other users cannot run Python here")
    monkeypatch.setattr("sys.executable", python)
    monkeypatch.setenv("PYTHONPATH", search_path())
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("pass\n")
    with open_folder() as scratch:
        there = scratch / "files/there"
        there.parent.mkdir()
        confined.unpack(archive.pack(project), there, archive.LIMIT, UID)
        assert {(each.stat().st_uid, each.stat().st_mode & 0o77) for each in there.iterdir()} == {
            (UID, 0)
        }
        assert os.listdir(there) == ["train.py"]
    with tempfile.TemporaryFile() as file:
        file.write(archive.pack(project))
        file.seek(0)
        found = confined.digest(file, archive.LIMIT, UID)
    assert found == archive.digest(io.BytesIO(archive.pack(project)))
