"""What the service makes of a request, before the search begins."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.service import requests
from autofit.service.runner import _within_deadline
from autofit.storage import Queue, Store, Submission
from autofit.tuning.options import SearchOptions
from autofit.worker.records.trials import Script

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ({}, 1),
        ({"gpus": 4}, 4),
        ({"gpus_per_trial": 2}, 2),
        ({"gpus": 5, "gpus_per_trial": 2}, 4),
    ],
)
def test_the_gpus_of_a_search(options: dict[str, int], gpus: int) -> None:
    """As many as ``reserve`` asks Ray for: whole trainings."""
    submission = Submission(script=("train.py",), upload="aa", options=options)
    assert requests.gpus(submission) == gpus


def test_a_running_search_ends_at_its_deadline(tmp_path: Path) -> None:
    options = SearchOptions(script=Script(target="train.py", cwd="/"), storage="sqlite://")
    with Store(str(tmp_path / "service.db")) as store:
        search = Queue(store).submit("alice", Submission(script=("train.py",), upload="aa"))
    assert _within_deadline(options, search) == options
    search = replace(search, deadline=datetime.now(UTC) + timedelta(seconds=100))
    assert 90 < (_within_deadline(options, search).timeout or 0) <= 100
    assert _within_deadline(replace(options, timeout=5.0), search).timeout == 5.0
    assert 0 < (_within_deadline(replace(options, timeout=500.0), search).timeout or 0) <= 100
    late = replace(search, deadline=datetime.now(UTC) - timedelta(seconds=100))
    assert _within_deadline(options, late).timeout == 1.0


def test_a_priority_is_of_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    for words in (["--priority", "1"], ["--deadline", "2h"]):
        assert main(["search", str(tmp_path / "train.py"), *words]) == 2
        assert "add --server" in capsys.readouterr().err
