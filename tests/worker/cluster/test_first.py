"""A search's first process starts before Ray does, and the actor of its slot takes it over."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.cluster.pool import Pool
from autofit.worker.launch.reaper import marked, processes
from autofit.worker.records.trials import (
    Entered,
    LaunchEnded,
    LaunchRequest,
    Script,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

TRAINS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def request_for(tmp_path: Path) -> Callable[[str], LaunchRequest]:
    def request_for(body: str) -> LaunchRequest:
        (tmp_path / "train.py").write_text(textwrap.dedent(body))
        script = Script(target="train.py", cwd=str(tmp_path))
        return LaunchRequest(
            script=script, plans=(Plan(),), device="cpu", budget=4 << 30, timeout=120
        )

    return request_for


def reports(pool: Pool) -> Iterator[TrialReport]:
    """The reports on slot 0, until it is free."""
    while 0 not in pool.free:
        for _, event in pool.events(timeout=60):
            if isinstance(event, TrialReport):
                yield event


def test_the_actor_takes_it_over(request_for: Callable[[str], LaunchRequest]) -> None:
    request = request_for(TRAINS)
    with Pool() as pool:
        pool.prepare_first(request)
        assert pool.open()
        pool.submit(0, request)
        (report,) = reports(pool)
        session = pool._ray.session
    assert report.verdict is Verdict.MEASURED
    assert report.startup_seconds > 0.5, "the import of torch counts, although Ray started too"
    assert not marked(session, processes())


def test_one_that_fails_at_once_is_told_before_ray_runs(
    request_for: Callable[[str], LaunchRequest],
) -> None:
    request = request_for("raise ModuleNotFoundError('torchy')")
    with Pool() as pool:
        pool.prepare_first(request)
        assert not pool.open()
        assert pool.first_ended
        events = [e for e in pool.first_events(request) if not isinstance(e, Entered)]
        session = pool._ray.session
    failed, ended = events
    assert isinstance(failed, TrialReport)
    assert failed.verdict is Verdict.SCRIPT_FAILED
    assert failed.reason == "ModuleNotFoundError: torchy"
    assert isinstance(ended, LaunchEnded)
    assert not marked(session, processes()), "Ray was ended while it started"


def test_one_that_fails_with_its_actor_is_not_run_again(
    request_for: Callable[[str], LaunchRequest],
) -> None:
    go = Path("/dev/shm", f"autofit-test-{os.getpid()}")  # trials share that folder
    request = request_for(f"""
        import os, time
        while not os.path.exists({str(go)!r}):
            time.sleep(0.1)
        os.remove({str(go)!r})
        raise ValueError(os.getpid())
    """)
    with Pool() as pool:
        pool.prepare_first(request)
        assert pool._first is not None
        pid = pool._first._child.pid
        pool.submit(0, request)
        go.touch()
        (report,) = reports(pool)
    assert (report.verdict, report.reason) == (Verdict.SCRIPT_FAILED, f"ValueError: {pid}")


def test_it_ends_with_its_launch(request_for: Callable[[str], LaunchRequest]) -> None:
    request = request_for("import time\ntime.sleep(99)")
    with Pool() as pool:
        pool.prepare_first(request)
        assert pool._first is not None
        pid = pool._first._child.pid
        pool.submit(0, request)
        assert processes()[pid].parent == os.getpid()
        pool.cancel(0)
        (report,) = reports(pool)
        assert report.verdict is Verdict.INTERRUPTED
        assert pid not in processes()
