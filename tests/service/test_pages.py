"""The pages of the service: who may see them, and what a real browser makes of them."""

from __future__ import annotations

import http.client
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from autofit.client import messages
from autofit.service.users import create_token
from autofit.storage import SearchRecord, Submission
from autofit.tuning.notices import Line, Notice, StudyStarted, TrialEnded
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
    import getpass

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
