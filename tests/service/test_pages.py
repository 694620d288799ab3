"""The pages of the service: who may see them, and what a real browser makes of them."""

from __future__ import annotations

import getpass
import html
import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlencode

import pytest

from autofit.client import messages
from autofit.service.pages import PAGE
from autofit.service.users import COOKIE, create_token
from autofit.storage import Outcome, SearchRecord, Submission
from autofit.tuning.notices import Line, Notice, StudyStarted, TrialEnded
from autofit.worker.cluster.nodes import ClusterNode
from autofit.worker.meter import Load
from autofit.worker.records.trials import Script
from tests.report.stored import BF16, GIB, H200, LEAN, add, figures, measured, opened
from tests.service.serving import Running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "<img src=x onerror=alert(1)>.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service without tokens."""
    with Running.start(tmp_path_factory.mktemp("alone")) as running:
        yield running


@pytest.fixture
def search(alone: Running) -> SearchRecord:
    """A finished search of that service, with two measured plans."""
    request = Submission(script=(EVIL,), args=("--lr", "1"), upload="aa")
    search = alone.queue.submit(getpass.getuser(), request)
    study = opened(alone.store)
    reports = [measured(LEAN, figures(10.0, 8.0)), measured(BF16, figures(20.0, 12.0))]
    script = Script(target=EVIL, cwd="/")
    told: list[Notice] = [
        StudyStarted(
            study=study.id,
            script=script,
            hardware=H200,
            devices=1,
            budget=24 * GIB,
            asked=True,
            allow="rounding",
            resumed=0,
        ),
        Line(text="<b>a line</b>"),
    ]
    for number, report in enumerate(reports):
        add(alone.store, study, report)
        told.append(TrialEnded(number=number, slot=0, report=report, best=True))
    alone.queue.tell(search, [messages.notice_to_json(each) for each in told])
    alone.queue.belongs_to(search, study.id)
    alone.queue.finish(search, None)
    return alone.queue.search(search.id)


def asked(
    running: Running, path: str, *, method: str = "GET", body: str = "", **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=20)
    connection.request(method, path, body, headers)
    return connection.getresponse()


@pytest.mark.quick
def test_the_pages_escape_what_users_write(alone: Running, search: SearchRecord) -> None:
    for path in ("/", f"/searches/{search.id}"):
        text = asked(alone, path).read().decode()
        assert "&lt;img src=x" in text
        assert "<img" not in text
        assert 'src="http' not in text, "it needs no other site"


@pytest.mark.quick
def test_a_browser_needs_the_token(running: Running) -> None:
    token = create_token(running.store, "carol")
    answer = asked(running, "/", Accept="text/html")
    assert (answer.status, answer.getheader("Location")) == (303, "/login")
    wrong = asked(running, "/login", method="POST", body=urlencode({"token": "guessed"}))
    assert wrong.status == 401
    right = asked(running, "/login", method="POST", body=urlencode({"token": token}))
    assert right.status == 303
    cookie = right.getheader("Set-Cookie") or ""
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    page = asked(running, "/", Cookie=cookie.partition(";")[0])
    assert page.status == 200
    assert "carol" in page.read().decode()
    listed = asked(running, "/api/searches", Cookie=cookie.partition(";")[0])
    assert listed.read() == b"[]"


@pytest.mark.quick
def test_logout_takes_the_token_out_of_the_browser(running: Running) -> None:
    cookie = f"{COOKIE}={create_token(running.store, 'dora')}"
    assert "Log out" in asked(running, "/", Cookie=cookie).read().decode()
    answer = asked(running, "/logout", method="POST", Cookie=cookie)
    assert (answer.status, answer.getheader("Location")) == (303, "/login")
    assert f'{COOKIE}=""' in (answer.getheader("Set-Cookie") or "")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("path", "code", "why"),
    [
        ("/searches/9999", 404, "there is no search 9999"),
        ("/api/searches/9999/report", 404, "there is no search 9999"),
        ("/nothing", 404, "Not Found"),
        ("/?state=none", 422, "query.state"),
        ("/compare?search=1", 400, "1 searches are chosen: choose two of them"),
    ],
)
def test_a_browser_gets_errors_as_pages(alone: Running, path: str, code: int, why: str) -> None:
    page = asked(alone, path, Accept="text/html,*/*;q=0.8")
    assert (page.status, page.getheader("Content-Type")) == (code, "text/html; charset=utf-8")
    text = page.read().decode()
    assert why in text
    assert 'href="/"' in text
    plain = asked(alone, path)
    assert (plain.status, plain.getheader("Content-Type")) == (code, "application/json")


@pytest.mark.quick
def test_older_searches_are_found(running: Running) -> None:
    cookie = f"{COOKIE}={create_token(running.store, 'erna')}"
    numbers = [
        running.queue.submit("erna", Submission(script=(f"train{n % 2}.py",), upload=f"{n:x}")).id
        for n in range(PAGE + 2)
    ]
    day = running.queue.search(numbers[0]).created

    def listed(path: str) -> list[int]:
        text = asked(running, path, Cookie=cookie).read().decode()
        return [int(each) for each in re.findall(r'<tr id="search-(\d+)"', text)]

    assert listed("/") == numbers[:1:-1]
    first = asked(running, "/?state=queued", Cookie=cookie).read().decode()
    (older,) = re.findall(r'id="older" href="(.*?)"', first)
    assert listed(html.unescape(older)) == numbers[1::-1]
    assert listed("/?script=TRAIN1&state=queued&until=") == numbers[-2::-2]
    assert listed("/?state=failed") == []
    assert listed(f"/?until={day:%Y-%m-%d}") == listed("/")
    assert listed(f"/?until={day - timedelta(days=1):%Y-%m-%d}") == []


@pytest.mark.quick
def test_two_searches_side_by_side(alone: Running, search: SearchRecord) -> None:
    other = alone.queue.submit(search.user, Submission(script=("other.py",), upload="bb"))
    waits = asked(alone, f"/compare?search={search.id}&search={other.id}")
    assert json.loads(waits.read())["error"].startswith("a search that has measured nothing yet")
    alone.queue.belongs_to(other, str(search.study))
    page = asked(alone, f"/compare?search={search.id}&search={other.id}").read().decode()
    names = f"search {other.id} against search {search.id}"
    assert f"{names}: speed ~+0 %, peak +0 %" in page
    assert page.count("20.0 ±0.8") == 4, "beside each other, and among the trials of each"
    alone.queue.cancel(other.id, search.user)


@pytest.mark.quick
def test_a_failed_search_shows_its_traceback(alone: Running) -> None:
    search = alone.queue.submit(getpass.getuser(), Submission(script=("t.py",), upload="cc"))
    outcome = Outcome(kind="ScriptError", message="t.py fails", traceback="line 1\n<b>line 2</b>")
    alone.queue.finish(search, outcome)
    page = asked(alone, f"/searches/{search.id}").read().decode()
    assert ">line 1\n&lt;b&gt;line 2&lt;/b&gt;</pre>" in page


@pytest.mark.quick
def test_the_load_of_the_gpus(tmp_path: Path) -> None:
    loads = (
        Load(card="GPU 0", total=80 * GIB, held=60 * GIB, busy=93),
        Load(card="GPU MIG-1", total=10 * GIB, held=GIB, busy=None),
    )
    node = ClusterNode(id="1", host="gpu1", address="", cpus=8, gpus=2, model="H100", here=True)
    with Running.start(tmp_path, machines=(replace(node, loads=loads),)) as running:
        page = asked(running, "/").read().decode()
        assert "gpu1 GPU 0</span>: 60.0 GiB of 80.0 GiB, 93 % busy<" in page
        assert "gpu1 GPU MIG-1</span>: 1.0 GiB of 10.0 GiB<" in page
        assert running.user("alice").get("/api/gpus")["machines"][0]["loads"][0]["busy"] == 93


@pytest.mark.quick
def test_what_pages_load_needs_no_token(running: Running) -> None:
    running.user("alice")
    page = asked(running, "/login").read().decode()
    files = re.findall(r'(?:href|src)="(/static/.*?)"', page)
    assert len(files) == 3
    for each in files:
        answer = asked(running, each)
        assert answer.status == 200
        assert answer.read()


@pytest.fixture
def browser(tmp_path: Path) -> Callable[..., str]:
    """Return what makes the document of a page, as a browser has it after its scripts have run."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")

    def look(url: str, *more: str) -> str:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}", *more]
        ran = subprocess.run([*command, url], capture_output=True, text=True, timeout=120)
        assert ran.stdout, ran.stderr
        return ran.stdout

    return look


@pytest.mark.full
def test_a_browser_shows_a_search(
    alone: Running, search: SearchRecord, browser: Callable[..., str]
) -> None:
    text = browser(f"{alone.url}/searches/{search.id}")
    rows = re.findall(r"<tr class=\"(.*?)\".*?>(.*?)</tr>", text.partition("<tbody>")[2])
    cells = [re.findall(r"<td.*?>(.*?)</td>", row) for _, row in rows]
    assert [row[0] for row in cells] == ["0", "1"]
    assert [row[2] for row in cells] == ["10.0", "20.0"]
    assert [row[4] for row in cells] == ["measured", "best"]
    assert text.count("<circle") == 2
    assert "hidden" not in re.findall(r"<svg.*?>", text)[0]
    assert "&lt;b&gt;a line&lt;/b&gt;" in text
    assert "budget 24.0 GiB" in text
    assert '<button type="button" data-order="cancel" hidden' in text
