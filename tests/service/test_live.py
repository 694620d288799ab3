"""A search through a real service looks and ends as a local one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import autofit
from autofit.client.http import Service
from autofit.storage import Store
from tests.service.live import WORDS, LiveService

WITHOUT_GRPC = """\
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name == "grpc" else found(name, *more)
"""
"""Ray has its server for remote clients only with ``ray[client]``, which autofit does not need."""
FAILS = "import torch\n\nprint('begins')\nraise ValueError('no such data')\n"


@pytest.mark.quick
@pytest.mark.timeout(600)
def test_a_search_through_the_service(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_GRPC)
    with LiveService(searches=1, PYTHONPATH=str(tmp_path)) as live:
        live.start()
        folder = live.folder(0)
        few = (*WORDS, "--trials", "2")
        found = live.autofit("search", "--server", live.url, "train.py", *few, cwd=folder)
        assert found.returncode == 0, found.stdout + found.stderr
        head, *_, last = found.stdout.strip().splitlines()
        assert "budget 2.2 MiB as requested" in head
        assert "confirmed: " in found.stdout
        assert last.startswith("   autofit best train.py --format python")

        # the study is in the user's own store, under the script's own path
        best = autofit.best("train.py", cwd=folder, storage=folder / "autofit.db", quiet=True)
        assert best.script.cwd == str(folder)
        assert f"study {best.study}" in head
        assert found.stdout.splitlines()[-4].endswith(f"study {best.study}.")
        there = Service(live.url).get("/api/searches/1/study")
        with Store(str(folder / "autofit.db"), create=False) as store:
            study = store.study(best.study)
            assert len(store.trials(study)) == len(there["trials"]) == best.trials + 1
            assert study.launches == there["launches"]

        assert live.stop().returncode == 0
        assert live.processes() == []


@pytest.mark.full
def test_ctrl_c_cancels_the_search() -> None:
    with LiveService(searches=1) as live:
        live.start()
        line = [sys.executable, "-m", "autofit", "search", "--server", live.url, "train.py", *WORDS]
        client = subprocess.Popen(
            line,
            cwd=live.folder(0),
            env=live.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        service = Service(live.url)
        while not (found := service.get("/api/searches")) or found[0]["state"] != "running":
            time.sleep(0.1)
            assert client.poll() is None
        os.kill(client.pid, signal.SIGINT)
        _, errors = client.communicate(timeout=60)
        assert client.returncode == 130, errors
        assert service.get("/api/searches/1")["state"] == "cancelled"
        assert service.post("/api/searches/1/resume")["state"] == "queued"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_search_that_fails_ends_as_a_local_one() -> None:
    with LiveService(searches=1) as live:
        live.start()
        folder = live.folder(0)
        (folder / "fails.py").write_text(FAILS)
        local = live.autofit("search", "fails.py", *WORDS, cwd=folder)
        through = live.autofit("search", "--server", live.url, "fails.py", *WORDS, cwd=folder)
        assert (through.returncode, through.stderr) == (local.returncode, local.stderr)
        assert local.returncode == 1
        seen = Service(live.url).events("/api/searches/1/events")
        printed = [each.content["text"] for each in seen if each.kind == "NewOutput"]
        assert printed[-1].startswith("begins\n")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_search_waits_for_its_devices_and_says_so() -> None:
    with LiveService(searches=1) as live:
        live.start()
        service = Service(live.url)
        first, second = (live.submit(service, live.folder(seed)) for seed in range(2))
        while (found := service.get(f"/api/searches/{second}"))["state"] != "starting":
            time.sleep(0.1)
        assert service.get(f"/api/searches/{first}")["state"] == "running"
        while not found["waits_for"]:
            time.sleep(0.1)
            found = service.get(f"/api/searches/{second}")
        assert found["waits_for"] == "a CPU"
        service.post(f"/api/searches/{second}/cancel")
        deadline = time.monotonic() + 60
        while service.get(f"/api/searches/{second}")["state"] != "cancelled":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert service.get(f"/api/searches/{first}")["state"] == "running"
        service.post(f"/api/searches/{second}/resume")
        while service.get(f"/api/searches/{second}")["state"] != "finished":
            time.sleep(0.5)
        assert service.get(f"/api/searches/{first}")["state"] == "finished"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_another_user_has_searched_is_known_before_it_runs() -> None:
    with LiveService(searches=1) as live:
        alice, bob = (Service(live.url, live.token(name)) for name in ("alice", "bob"))
        live.start()
        same, edited = live.folder(0), live.folder(1)
        first = finished(alice, live.submit(alice, same))
        launches = alice.get(f"/api/searches/{first['id']}/study")["launches"]
        second = finished(bob, live.submit(bob, same))
        assert second["study"] == first["study"]
        assert bob.get(f"/api/searches/{second['id']}/study")["launches"] == launches
        third = finished(bob, live.submit(bob, edited))
        assert third["study"] != first["study"]
        stream = bob.events(f"/api/searches/{third['id']}/events")
        lines = [event.content["text"] for event in stream if event.kind == "Line"]
        assert any(f"Study {first['study']} has searched the same model" in line for line in lines)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_search_whose_deadline_comes_while_it_waits_fails() -> None:
    with LiveService(searches=1) as live:
        live.start()
        service = Service(live.url)
        first = live.submit(service, live.folder(0))
        while service.get(f"/api/searches/{first}")["state"] != "running":
            time.sleep(0.1)
        second = live.submit(service, live.folder(1), deadline="5s")
        while (found := service.get(f"/api/searches/{second}"))["ended"] is None:
            time.sleep(0.2)
        assert found["state"] == "failed"
        message = found["error"]["message"]
        assert message.startswith("its deadline passed while it waited for a CPU"), message
        assert finished(service, first)


def finished(service: Service, number: int) -> dict[str, Any]:
    """Return a search once it has finished."""
    found: dict[str, Any] = service.get(f"/api/searches/{number}")
    while found["ended"] is None:
        time.sleep(0.2)
        found = service.get(f"/api/searches/{number}")
    assert found["state"] == "finished", found["error"]
    return found
