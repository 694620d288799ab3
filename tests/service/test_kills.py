"""kill -9 of the service, again and again, while two users search: nothing is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from autofit.client.http import Service
from autofit.storage import Queue, State, Store
from tests.service.live import LiveService

KILLS = 10
LIMIT = 900.0
"""Seconds for all searches; they take some two minutes on an idle machine."""
GONE_WITHIN = 20.0
"""Seconds after the last search in which its processes have to be gone."""


def finished(storage: str) -> set[tuple[str, int]]:
    """Return the finished trials of a store, by study and number."""
    with Store(storage, create=False) as store:
        return {
            (study.id, trial.number)
            for study in store.studies()
            for trial in store.trials(study, state=State.FINISHED)
        }


def state(service: Service, number: int) -> str:
    return str(service.get(f"/api/searches/{number}")["state"])


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_nothing_is_lost_when_the_service_is_killed_ten_times() -> None:
    with LiveService(searches=2) as live:
        live.start()
        alice = Service(live.url, live.token("alice"))
        bob = Service(live.url, live.token("bob"))
        owners = [alice, bob, alice, bob, alice]
        searches = [
            (service, live.submit(service, live.folder(seed)))
            for seed, service in enumerate(owners)
        ]
        unwanted = live.submit(bob, live.folder(len(owners)))
        deadline, kills, meanwhile = time.monotonic() + LIMIT, 0, 0
        known: set[tuple[str, int]] = set()
        draw, over = random.Random(0), False
        while time.monotonic() < deadline and not (over and kills == KILLS):
            time.sleep(draw.uniform(0.0, 1.5))
            before = finished(live.storage)
            assert known <= before
            known = before
            if kills < KILLS:
                live.kill()
                kills, meanwhile = kills + 1, meanwhile + (not over)
                live.start()
            if state(bob, unwanted) == "running":
                bob.post(f"/api/searches/{unwanted}/cancel")
            over = state(bob, unwanted) == "cancelled" and all(
                state(*each) == "finished" for each in searches
            )
        states = [service.get(f"/api/searches/{number}") for service, number in searches]
        assert [each["state"] for each in states] == ["finished"] * 5, states
        assert state(bob, unwanted) == "cancelled"
        assert kills == KILLS
        assert meanwhile >= KILLS / 2, "most searches ended before the service was killed"
        for service, number in searches:
            plan = json.loads(service.text(f"/api/searches/{number}/plan"))
            assert plan["plan"]["checkpointing"] != "as_is", plan
        assert known <= finished(live.storage)
        until = time.monotonic() + GONE_WITHIN
        while live.orphans() and time.monotonic() < until:
            time.sleep(0.5)
        assert live.orphans() == []
        assert live.stop().returncode == 0
        assert live.processes() == []


def runner(live: LiveService, searches: list[int]) -> int | None:
    """Return the process of a running search."""
    with Store(live.storage, create=False) as store:
        running = [each for each in map(Queue(store).search, searches) if each.state == "running"]
    return running[0].owner.pid if running and running[0].owner else None


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_nothing_is_lost_when_a_process_of_ray_or_of_a_search_is_killed() -> None:
    """The service starts Ray again, and says meanwhile that it is alive but not ready."""
    with LiveService(searches=2) as live:
        live.start()
        service = Service(live.url)
        searches = [live.submit(service, live.folder(seed)) for seed in range(4)]
        deadline, draw = time.monotonic() + LIMIT, random.Random(0)
        for name in ("raylet", "gcs_server", "") * 2:
            while "running" not in (states := [state(service, each) for each in searches]):
                assert time.monotonic() < deadline, states
                if set(states) == {"finished"}:
                    break
                time.sleep(0.5)
            time.sleep(draw.uniform(0.0, 4.0))
            if name:
                for process in live.found(name):
                    process.kill()
            elif pid := runner(live, searches):
                os.kill(pid, signal.SIGKILL)
            assert service.get("/healthz") == {"status": "ok"}
        while {state(service, each) for each in searches} != {"finished"}:
            assert time.monotonic() < deadline, [
                service.get(f"/api/searches/{n}") for n in searches
            ]
            time.sleep(0.5)
        assert live.stop().returncode == 0
        assert live.processes() == []
