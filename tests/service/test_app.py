"""The HTTP interface, by real requests: what it answers, and what it refuses."""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.cli import main
from autofit.client import archive, messages
from autofit.client.http import ServerEvent, Service
from autofit.exceptions import UsageError
from autofit.export import FORMATS
from autofit.storage import (
    Accounts,
    Limits,
    Outcome,
    Owner,
    SearchRecord,
    Store,
    Submission,
)
from autofit.tuning.notices import Line
from autofit.worker.cluster.nodes import ClusterNode
from tests.report.stored import BF16, FACTS, add, figures, measured, opened
from tests.service.archives import entry, tar
from tests.service.serving import LIMIT, Running

pytestmark = pytest.mark.quick


@pytest.fixture
def upload(running: Running, tmp_path: Path) -> Callable[[Service], str]:
    """Upload a folder with a script as a user; return its name."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("import torch\n\nprint(1)\n")

    def send(user: Service) -> str:
        name: str = user.post("/api/uploads", archive.pack(folder))["upload"]
        return name

    return send


def submitted(user: Service, name: str, **more: Any) -> int:
    request = {"script": "train.py", "upload": name, "options": {"memory": "24GiB"}, **more}
    number: int = user.post("/api/searches", request)["id"]
    return number


def searched(running: Running, search: SearchRecord) -> None:
    """End a search with a study in which one plan was measured."""
    store: Store = running.store
    study = opened(store)
    store.set_facts(study, FACTS)
    add(store, study, measured(BF16, figures(20.0, 12.0)))
    running.queue.belongs_to(search, study.id)
    running.queue.finish(search, None)


def test_the_way_of_a_search(running: Running, upload: Callable[[Service], str]) -> None:
    alice = running.user("alice")
    number = submitted(alice, upload(alice), args=["--epochs", "3"])
    found = alice.get(f"/api/searches/{number}")
    assert found["state"] == "queued"
    assert found["script"] == "train.py --epochs 3"
    assert [each["id"] for each in alice.get("/api/searches")] == [number]
    search = running.queue.search(number)
    searched(running, search)
    path = f"/api/searches/{number}"
    assert alice.get(path)["state"] == "finished"
    assert json.loads(alice.text(f"{path}/plan"))["plan"]["precision"] == "bf16"
    assert alice.text(f"{path}/plan", format="toml").startswith("samples_per_second = 20.0\n")
    with pytest.raises(UsageError, match=f"formats are {FORMATS[0]}"):
        alice.text(f"{path}/plan", format="xml")
    report = alice.text(f"{path}/report")
    assert report.startswith("<!doctype html>")
    assert search.study is None
    copy = alice.get(f"{path}/study")
    assert len(copy["trials"]) == 1


def test_a_search_waits_for_the_gpus_of_its_user_and_says_so(
    running: Running, upload: Callable[[Service], str]
) -> None:
    alice = running.user("alice")
    name = upload(alice)
    first = submitted(alice, name, options={"gpus": 2})
    second = submitted(
        alice, name, options={"gpus": 3, "memory": "9GiB"}, priority=-1, deadline="2h"
    )
    user = alice.get(f"/api/searches/{first}")["user"]
    Accounts(running.store).limit(user, Limits(gpus=4, priority=5))
    assert running.queue.search(first).gpus == 2
    starting = running.queue.claim(Owner.current(), uuid.uuid4().hex)
    while starting is not None and starting.id != first:  # searches of other tests
        running.queue.finish(starting, None)
        starting = running.queue.claim(Owner.current(), uuid.uuid4().hex)
    assert starting is not None
    running.queue.run(starting)
    found = alice.get(f"/api/searches/{second}")
    waits = "GPUs of its user, who may hold 4 and holds 2"
    assert (found["waits_for"], found["gpus"], found["priority"]) == (waits, 3, -1)
    assert found["deadline"] is not None
    seen: list[ServerEvent] = []
    path = f"/api/searches/{second}/events"
    reading = threading.Thread(target=lambda: seen.extend(alice.events(path)))
    reading.start()
    deadline = time.monotonic() + 20
    while running.queue.search(second).state != "finished" and time.monotonic() < deadline:
        time.sleep(0.5)  # the stream has begun
        running.queue.finish(running.queue.search(first), None)
        running.queue.finish(running.queue.search(second), None)
    reading.join(20)
    assert seen[0].content["waits_for"] == waits
    assert (seen[0].kind, seen[-1].kind) == ("state", "end")
    with pytest.raises(UsageError, match=r"needs 5 GPUs, and .* may hold 4"):
        submitted(alice, name, options={"gpus": 5})
    with pytest.raises(UsageError, match="priority 6 is above 5"):
        submitted(alice, name, priority=6)


def test_cancel_and_resume(running: Running, upload: Callable[[Service], str]) -> None:
    alice = running.user("alice")
    number = submitted(alice, upload(alice))
    path = f"/api/searches/{number}"
    assert alice.post(f"{path}/cancel")["state"] == "cancelled"
    assert alice.post(f"{path}/resume")["state"] == "queued"
    outcome = Outcome(kind="NothingFits", message="no plan fits")
    running.queue.finish(running.queue.search(number), outcome)
    assert alice.get(path)["error"]["message"] == "no plan fits"


def test_events_are_taken_up_where_they_were_left(
    running: Running, upload: Callable[[Service], str]
) -> None:
    alice = running.user("alice")
    search = running.queue.search(submitted(alice, upload(alice)))
    path = f"/api/searches/{search.id}/events"
    lines = [messages.notice_to_json(Line(text=str(number))) for number in range(4)]
    running.queue.tell(search, lines[:2])
    seen: list[ServerEvent] = []
    reading = threading.Thread(target=lambda: seen.extend(alice.events(path)))
    reading.start()
    while len(running.queue.notices(search.id)) == 2 and len(seen) < 2:
        time.sleep(0.05)
    running.queue.tell(search, lines[2:])
    running.queue.finish(search, None)
    reading.join(20)
    told = [each for each in seen if each.kind == "Line"]
    assert [each.content["text"] for each in told] == ["0", "1", "2", "3"]
    assert seen[-1].kind == "end"
    assert seen[-1].content["state"] == "finished"
    again = _lines(running, alice, path, told[1].id)
    assert [each["text"] for each in again] == ["2", "3"]


def _lines(running: Running, user: Service, path: str, last: str) -> list[dict[str, str]]:
    """Return the lines of a stream after an id, read as a browser does after an interruption."""
    with user._open("GET", path, headers={"Last-Event-ID": last}) as stream:
        text = stream.read().decode()
    events = [each for each in text.split("\n\n") if "event: Line" in each]
    return [json.loads(each.partition("data: ")[2]) for each in events]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no folder": ({"upload": None}, "give either an upload or a folder"),
    "both": ({"folder": "/tmp"}, "give either an upload or a folder"),
    "no upload": ({"upload": "ab12"}, "no upload ab12"),
    "relative folder": ({"upload": None, "folder": "x"}, "absolute path"),
    "parent": ({"script": "../train.py"}, "below the uploaded folder"),
    "absolute": ({"script": "/etc/passwd"}, "below the uploaded folder"),
    "no script": ({"script": []}, "no script is given"),
    "unknown field": ({"scripts": "train.py"}, "scripts: Extra inputs are not permitted"),
    "unknown option": ({"options": {"memroy": 1}}, "did you mean 'memory'"),
    "bad value": ({"options": {"memory": "much"}}, "memory='much'"),
    "deadline": ({"deadline": "soon"}, "'soon' is not a duration"),
    "priority": ({"priority": 1000}, "priority: Input should be less than"),
    "storage": ({"options": {"storage": "/x.db"}}, "storage is the service's own"),
    "address": ({"options": {"address": "auto"}}, "address is the service's own"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_requests(what: str, running: Running, upload: Callable[[Service], str]) -> None:
    changed, why = REFUSED[what]
    alice = running.user("alice")
    with pytest.raises(UsageError, match=why):
        submitted(alice, upload(alice), **changed)
    assert alice.get("/api/searches") == []


def test_refused_without_a_token_and_with_anothers(
    running: Running, upload: Callable[[Service], str]
) -> None:
    alice, bob = running.user("alice"), running.user("bob")
    number = submitted(alice, upload(alice))
    for stranger in (Service(running.url, ""), Service(running.url, "autofit_guessed")):
        with pytest.raises(UsageError, match="no valid token"):
            stranger.get("/api/searches")
    assert bob.get("/api/searches") == []
    path = f"/api/searches/{number}"
    for ask in ("", "/plan", "/report", "/study", "/events"):
        with pytest.raises(UsageError, match=f"no search {number}"):
            list(bob.events(path + ask)) if ask == "/events" else bob.text(path + ask)
    for order in ("/cancel", "/resume"):
        with pytest.raises(UsageError, match=f"no search {number}"):
            bob.post(path + order)
    assert alice.get(path)["state"] == "queued"


def test_a_second_user_is_refused_unless_users_trust_one_another(
    tmp_path: Path,
) -> None:
    with Running.start(tmp_path, trusted=False, obstacle="the service is not root") as running:
        alice = running.user("alice")
        assert alice.get("/api/searches") == []
        bob = running.user("bob")
        for user in (alice, bob):
            with pytest.raises(UsageError, match=r"the service is not root.*--trusted-users"):
                user.get("/api/searches")


def test_an_upload_of_two_gibibytes_is_refused_before_it_is_sent(running: Running) -> None:
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/api/uploads")
    connection.putheader("Content-Length", str(2 << 30))
    connection.putheader("Authorization", f"Bearer {running.user('alice').token}")
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert "larger than the 1.0 MiB" in json.loads(answer.read())["error"]
    connection.close()


def test_an_upload_that_hides_its_size_is_refused(running: Running) -> None:
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=20)
    part = bytes(LIMIT)
    headers = {"Authorization": f"Bearer {running.user('alice').token}"}
    connection.request("POST", "/api/uploads", iter([part, part]), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_an_archive_with_a_parent_folder_is_refused(running: Running) -> None:
    with pytest.raises(UsageError, match="outside the folder"):
        running.user("alice").post("/api/uploads", tar(entry("../evil.py")))


def test_other_paths_are_answered_with_one_line(running: Running) -> None:
    with pytest.raises(UsageError, match=r"Not Found; see /openapi\.json"):
        running.user("alice").get("/nothing")


def test_the_interface_describes_itself(running: Running) -> None:
    document = Service(running.url).get("/openapi.json")
    assert document["openapi"].startswith("3.")
    paths = {path for path in document["paths"] if path.startswith("/api/searches/{number}")}
    names = {path.rpartition("/")[2] for path in paths}
    assert names == {"{number}", "cancel", "resume", "events", "plan", "report", "study"}
    options = document["components"]["schemas"]["SearchRequest"]["properties"]["options"]
    assert "`memory`" in options["description"]
    assert "`storage`" not in options["description"]


def test_health_and_metrics(running: Running, upload: Callable[[Service], str]) -> None:
    for probe in ("/healthz", "/readyz"):
        assert Service(running.url, "").get(probe) == {"status": "ok"}
    alice = running.user("alice")
    before = _metric(alice, "queued")
    submitted(alice, upload(alice))
    assert _metric(alice, "queued") == before + 1
    text = alice.text("/metrics")
    assert 'autofit_trials{verdict="measured"}' in text
    assert "# TYPE autofit_gpu_seconds_total counter" in text
    with pytest.raises(UsageError, match="no valid token"):
        Service(running.url, "").text("/metrics")


def _metric(user: Service, state: str) -> float:
    """Return the number of searches in a state."""
    line = f'autofit_searches{{state="{state}"}} '
    found = next(each for each in user.text("/metrics").splitlines() if each.startswith(line))
    return float(found.removeprefix(line))


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Origin": "http://evil.example"}, "a page of http://evil.example"),
        ({"Host": "evil.example"}, "no tokens"),
    ],
)
def test_a_page_of_another_site_is_refused(
    headers: dict[str, str], why: str, tmp_path: Path
) -> None:
    with Running.start(tmp_path) as running:  # without tokens
        assert Service(running.url).get("/api/searches") == []
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=20)
        connection.request("POST", "/api/searches/1/cancel", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 403
        assert why in json.loads(answer.read())["error"]
        connection.close()


def test_who_asks_too_often_waits(tmp_path: Path) -> None:
    with Running.start(tmp_path, rate=1.0) as running:  # five at once
        alice, bob = running.user("alice"), running.user("bob")
        statuses = [_status(running, str(alice.token)) for _ in range(12)]
        assert statuses[:5] == [(200, None)] * 5
        assert (429, "1") in statuses
        assert _status(running, str(bob.token)) == (200, None)
        began = time.monotonic()
        assert alice.get("/api/searches") == []  # the client waits
        assert time.monotonic() - began < 5.0
        guesses = [_status(running, f"guess{number}")[0] for number in range(12)]
        assert guesses[0] == 401
        assert 429 in guesses


def _status(running: Running, token: str) -> tuple[int, str | None]:
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=20)
    connection.request("GET", "/api/searches", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    connection.close()
    return answer.status, answer.getheader("Retry-After")


def test_the_audit_trail(
    running: Running, upload: Callable[[Service], str], capsys: pytest.CaptureFixture[str]
) -> None:
    alice = running.user("alice")
    name = upload(alice)
    number = submitted(alice, name)
    alice.post(f"/api/searches/{number}/cancel")
    alice.post(f"/api/searches/{number}/resume")
    user = alice.get(f"/api/searches/{number}")["user"]
    assert main(["token", "audit", "--storage", running.store.url, "--user", user]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines] == [f"{user} from 127.0.0.1"] * 4
    assert [line[2:] for line in lines] == [
        ["upload", name],
        *([action, f"search {number}"] for action in ("submit", "cancel", "resume")),
    ]
    with pytest.raises(UsageError):
        Service(running.url, "autofit_guessed").get("/api/searches")
    assert main(["token", "audit", "--storage", running.store.url]) == 0
    assert "unknown from 127.0.0.1  refused" in capsys.readouterr().out


def test_the_gpus_and_their_holders(tmp_path: Path) -> None:
    node = ClusterNode(
        id="1", host="gpu1", address="10.0.0.1", cpus=8, gpus=8, model="H100", here=True
    )
    head = replace(node, host="head", gpus=0)
    with Running.start(tmp_path, machines=(node, head)) as running:
        search = running.queue.submit("bob", Submission(script=("t.py",), upload="aa"), gpus=3)
        assert running.queue.claim(Owner.current(), "runner") is not None
        running.queue.run(search)
        found = running.user("alice").get("/api/gpus")
    assert found["machines"] == [{"host": "gpu1", "gpus": 8, "model": "H100", "loads": []}]
    (holder,) = found["holders"]
    assert (holder["user"], holder["search"], holder["gpus"]) == ("bob", search.id, 3)
