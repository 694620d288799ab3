"""``autofit search --submit``, against the job server of a real Ray head."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.exceptions import UsageError
from autofit.storage import State, Store, script_path
from autofit.storage.records import ORIGIN
from autofit.storage.url import VARIABLE
from autofit.tuning.job import storage_of_job
from autofit.worker.records.trials import Script
from tests.ray_head import Head

SCRIPT = """
import pathlib
import sys
import time

import torch

import shipped

assert not pathlib.Path("data").exists()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(32, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "--slow" in sys.argv:
        time.sleep(5)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a script, a module of its own, and data that stays here."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "large.bin").write_text("x")
    (folder / ".autofitignore").write_text("data/\n")
    (folder / "shipped.py").write_text("")
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def submitting(ray_head: Head, project: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``autofit search --submit`` in the project's folder."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "autofit", "search", "--submit", ray_head.dashboard]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=project,
            env=ray_head.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.full
def test_a_job_searches_what_is_here_and_its_store_is_read_here(
    submitting: Callable[..., subprocess.Popen[str]],
    ray_head: Head,
    project: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = submitting("train.py", "--only", "precision", "--trials", "1", "--", "--epochs", "3")
    said, told = job.communicate(timeout=120)
    assert job.returncode == 0, said + told
    assert "samples/s in" in said
    assert "the trials are in ~/autofit.db on the machine the job ran on" in told
    store = str(ray_head.folder / "autofit.db")
    with Store(store, create=False) as kept:
        (study,) = kept.studies()
        assert study.key.script == str(project / "train.py")
        assert study.key.args == ("--epochs", "3")
        assert len(kept.trials(study, state=State.FINISHED)) == 2  # and the last word

    monkeypatch.chdir(project)
    assert main(["best", "train.py", "--storage", store, "--", "--epochs", "3"]) == 0
    assert f"study {study.id}" in capfd.readouterr().out


@pytest.mark.full
def test_a_scripts_own_error_comes_back_with_its_code(
    submitting: Callable[..., subprocess.Popen[str]], project: Path
) -> None:
    (project / "train.py").write_text("raise SystemExit('no data here')\n")
    job = submitting("train.py")
    said, told = job.communicate(timeout=120)
    assert job.returncode == 1, said + told
    assert "no data here" in said


@pytest.mark.full
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_job(
    submitting: Callable[..., subprocess.Popen[str]], ray_head: Head, stop: signal.Signals
) -> None:
    store = ray_head.folder / f"stopped-{stop}.db"
    job = submitting("train.py", "--storage", str(store), "--", "--slow")
    deadline = time.monotonic() + 60
    running = False
    while not running:
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
        if store.exists():
            with Store(str(store)) as kept:
                running = any(kept.trials(study) for study in kept.studies())
    job.send_signal(stop)
    said, told = job.communicate(timeout=60)
    assert job.returncode == 130, said + told
    assert "finished trials are stored" in said, "the search itself has ended in good order"
    with Store(str(store)) as kept:
        (study,) = kept.studies()
        assert kept.holder(study) is None
        assert not kept.trials(study, state=State.RUNNING)
    command = ["ray", "job", "list", "--address", ray_head.dashboard]
    environment = {**ray_head.environment, "RAY_ADDRESS": ray_head.dashboard}
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "STOPPED" in listed.stdout + listed.stderr


@pytest.mark.quick
def test_who_has_no_token_is_told(ray_head: Head, project: Path) -> None:
    command = [sys.executable, "-m", "autofit", "search", "--submit", ray_head.dashboard]
    environment = {**os.environ, "HOME": str(project), "RAY_AUTH_MODE": "disabled"}
    ran = subprocess.run(
        [*command, "train.py"], cwd=project, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert "set RAY_AUTH_TOKEN" in line


@pytest.mark.quick
def test_nobody_there_is_one_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)

    def said(*arguments: str) -> str:
        assert main(["search", "train.py", *arguments]) in (1, 2)
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "no job server answers at http://127.0.0.1:1" in said("--submit", "http://127.0.0.1:1")
    assert "give the URL of a Ray dashboard" in said("--submit=head:8265")
    assert "--submit and --json" in said("--submit=http://a", "--json")
    assert "drop --address" in said("--submit=http://a", "--address", "auto")
    assert "absolute path on the cluster's head" in said("--submit=http://a", "--storage", "x.db")
    (project.parent / "other.py").touch()
    assert main(["search", str(project / "train.py"), "--submit=http://a"]) == 2
    assert "by its path below it" in capsys.readouterr().err


@pytest.mark.quick
def test_a_store_for_a_job_is_a_server_or_has_a_place_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for storage in ("/a/b.db", "~/b.db", "sqlite:////a/b.db", "postgresql+psycopg://host/db"):
        assert storage_of_job(storage) == storage
    assert storage_of_job(None) == "~/autofit.db"
    for named, store in {
        "postgresql+psycopg://host/db": "postgresql+psycopg://host/db",
        "/here/a.db": "~/autofit.db",
        "sqlite:////here/a.db": "~/autofit.db",
    }.items():
        monkeypatch.setenv(VARIABLE, named)
        assert storage_of_job(None) == store
    for storage in ("b.db", "sqlite:///b.db", "./b.db"):
        with pytest.raises(UsageError, match="postgresql"):
            storage_of_job(storage)


@pytest.mark.quick
def test_a_shipped_script_is_called_as_where_it_came_from(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(target="train.py", cwd=str(project))
    monkeypatch.setenv(ORIGIN, "/home/me/work")
    assert script_path(script) == "/home/me/work/train.py"
    outside = Script(target="../other.py", cwd=str(project))
    assert script_path(outside) == str(project.parent / "other.py")
