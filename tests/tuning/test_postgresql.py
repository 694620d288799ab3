"""A search whose store is a real PostgreSQL: killed, carried on, and read, as with a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from autofit.storage import Purpose, State, Store

pytestmark = pytest.mark.quick

ASKED = ("train.py", "--only", "precision", "--only", "checkpointing", "--trials", "3")


@pytest.mark.full
def test_a_killed_search_is_carried_on(
    postgresql: Callable[[], str],
    script: Callable[..., Path],
    command: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    script()
    storage = postgresql()
    line = [sys.executable, "-m", "autofit", "search", *ASKED, "--storage", storage]
    killed = subprocess.Popen(
        line, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    with Store(storage) as store:
        while not (found := store.studies()) or not store.trials(found[0], state=State.FINISHED):
            assert killed.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        before = store.trials(found[0], state=State.FINISHED)
        assert store.holder(found[0]) is None

        resumed = command("search", *ASKED, "--storage", storage, cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stderr
        assert f"study {found[0].id} (" in resumed.stdout
        assert "stored)" in resumed.stdout
        assert "secret" not in resumed.stdout + resumed.stderr
        (study,) = store.studies()
        after = store.trials(study, state=State.FINISHED)
        kept = {trial.id: (trial.plan, trial.verdict) for trial in after}
        for trial in before:  # real steps may have given it other figures
            assert kept[trial.id] == (trial.plan, trial.verdict)
        searched = Counter(trial.plan for trial in after if trial.purpose is Purpose.SEARCH)
        assert set(searched.values()) == {1}
        assert not store.trials(study, state=State.RUNNING)
        (name,) = optuna.get_all_study_names(storage)
        copied = optuna.load_study(study_name=name, storage=storage).get_trials()
        ours = [trial.id for trial in after if trial.purpose is Purpose.SEARCH]
        assert [trial.user_attrs["autofit_trial"] for trial in copied] == ours

    best = command("best", "train.py", "--storage", storage, "--format", "json", cwd=tmp_path)
    assert best.returncode == 0, best.stderr
    assert f'"study": "{study.id}"' in best.stdout
    assert not list(tmp_path.glob("*.db*"))


def test_a_server_that_is_not_there_ends_a_search_in_one_line(
    script: Callable[..., Path],
    command: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    pytest.importorskip("psycopg")
    script()
    storage = "postgresql+psycopg://me:secret@127.0.0.1:1/db"
    ended = command("search", "train.py", "--storage", storage, cwd=tmp_path)
    assert ended.returncode == 1
    (said,) = ended.stderr.splitlines()
    assert said.startswith("autofit: the store postgresql+psycopg://me:***@127.0.0.1:1/db cannot")
    assert said.endswith("check that the server runs and that host and port are right")
