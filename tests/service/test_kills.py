"""What a service needs ends, again and again, while two users search: nothing is lost."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import psutil
import pytest

from autofit.client.http import Service
from autofit.storage import Queue, SearchRecord, State, Store
from tests.postgresql import server
from tests.service.live import LiveService

KILLS = 10
PAUSES = (0.0, 5.0, 20.0)
"""Seconds for which PostgreSQL is away."""
SEARCHES = 4
"""Searches that are under way while something is killed."""
LIMIT = 3400.0
"""Seconds for all searches."""
GONE_WITHIN = 20.0
"""Seconds after the last search in which its processes have to be gone."""


class Searches:
    """Searches of two users of a service: while things are killed, so many are under way."""

    def __init__(self, live: LiveService) -> None:
        self._live = live
        self._draw = random.Random(0)
        self._deadline = time.monotonic() + LIMIT
        self._owners = [Service(live.url, live.token(name)) for name in ("alice", "bob")]
        self._numbers: list[int] = []
        self._known: set[tuple[str, int]] = set()
        """The finished trials that were seen, by study and number."""

    def survive(self, kills: Sequence[Callable[[], object]]) -> None:
        """Kill at random moments, then wait for all searches; assert that nothing was lost.

        Before every other kill, a search runs; the others come at any time.
        """
        for count, kill in enumerate(kills):
            while len(self.records(ended=False)) < SEARCHES:
                self._submit()
            while count % 2 and not any(e.state == "running" for e in self.records(ended=False)):
                self._wait()
            time.sleep(self._draw.uniform(0.0, 15.0))
            self._check_trials()
            kill()
        while self.records(ended=False):
            self._wait()
        self._check_trials()
        ends = [(each.state, each.outcome) for each in self.records(ended=True)]
        assert ends == [("finished", None)] * len(self._numbers), ends
        for number in self._numbers:
            text = self._owner(number).text(f"/api/searches/{number}/plan")
            plan = json.loads(text)["plan"]
            assert {plan["checkpointing"], plan["micro_batch"]} != {"as_is"}, text

    def records(self, *, ended: bool) -> list[SearchRecord]:
        """Return those that have ended, or have not."""
        with Store(self._live.storage, create=False) as store:
            found = map(Queue(store).search, self._numbers)
            return [each for each in found if each.state.ended == ended]

    def one_process(self) -> psutil.Process | None:
        """Return the process of a search that starts or runs, if there is one."""
        owners = [each.owner.pid for each in self.records(ended=False) if each.owner is not None]
        alive = [pid for pid in owners if psutil.pid_exists(pid)]  # one may have ended with Ray
        return psutil.Process(self._draw.choice(alive)) if alive else None

    def _submit(self) -> None:
        seed = len(self._numbers)
        self._numbers.append(self._live.submit(self._owner(seed + 1), self._live.folder(seed)))

    def _owner(self, number: int) -> Service:
        return self._owners[number % len(self._owners)]

    def _wait(self) -> None:
        assert time.monotonic() < self._deadline, self.records(ended=False)
        time.sleep(0.5)

    def _check_trials(self) -> None:
        with Store(self._live.storage, create=False) as store:
            found = {
                (study.id, trial.number)
                for study in store.studies()
                for trial in store.trials(study, state=State.FINISHED)
            }
        assert self._known <= found
        self._known = found


def check_nothing_stays(live: LiveService) -> None:
    until = time.monotonic() + GONE_WITHIN
    while live.orphans() and time.monotonic() < until:
        time.sleep(0.5)
    assert live.orphans() == []
    assert live.stop().returncode == 0
    assert live.processes() == []


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_nothing_is_lost_when_processes_are_killed_ten_times_each() -> None:
    """The service starts Ray again, and says meanwhile that it is alive."""
    killed = [name for name in ("service", "raylet", "gcs_server", "actor") for _ in range(KILLS)]
    random.Random(0).shuffle(killed)
    with LiveService(searches=SEARCHES) as live:
        live.start()
        searches, probe = Searches(live), Service(live.url, "")

        def kill(name: str) -> None:
            if name == "service":
                live.kill()
                live.start()
            elif name == "actor":
                if (process := searches.one_process()) is not None:
                    process.kill()
            else:
                for process in live.found(name):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            assert probe.get("/healthz") == {"status": "ok"}

        searches.survive([partial(kill, name) for name in killed])
        check_nothing_stays(live)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_nothing_is_lost_when_postgresql_is_restarted() -> None:
    with server() as postgresql, LiveService(searches=SEARCHES, storage=postgresql()) as live:
        live.start()
        Searches(live).survive([partial(postgresql.restart, each) for each in PAUSES])
        check_nothing_stays(live)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_search_is_cancelled_while_the_service_is_killed() -> None:
    with LiveService(searches=1) as live:
        live.start()
        service = Service(live.url)
        number = live.submit(service, live.folder(0))
        path = f"/api/searches/{number}"
        while service.get(path)["state"] != "running":
            time.sleep(0.2)
        service.post(f"{path}/cancel")
        live.kill()
        live.start()
        while (found := service.get(path))["ended"] is None:
            time.sleep(0.2)
        assert found["state"] == "cancelled"
        check_nothing_stays(live)
