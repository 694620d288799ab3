"""The pages in a real Chromium: submit, watch, read the report, take an export; narrow and dark."""

from __future__ import annotations

import getpass
import io
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.client import messages
from autofit.storage import Owner, SearchRecord, Submission
from autofit.tuning.notices import Line, NewOutput, Notice, StudyStarted, TrialEnded
from autofit.worker.cluster.nodes import ClusterNode
from autofit.worker.records.trials import Script
from tests.report.stored import BF16, FACTS, GIB, H200, LEAN, add, figures, measured, opened
from tests.service.browser import PROGRAM, Browser
from tests.service.serving import Running

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed"),
]

ME = getpass.getuser()
NODE = ClusterNode(id="1", host="gpu1", address="10.0.0.1", cpus=8, gpus=8, model="H100", here=True)
LONG = "a_script_whose_name_is_longer_than_a_narrow_screen_is_wide.py"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service without tokens, on a cluster with eight GPUs."""
    with Running.start(tmp_path_factory.mktemp("pages"), machines=(NODE,)) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An archive with a script, as somebody makes it with tar."""
    file = tmp_path / "project.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        entry = tarfile.TarInfo("train.py")
        entry.size = len(b"import torch\n")
        archive.addfile(entry, io.BytesIO(b"import torch\n"))
    return file


def claimed(service: Running) -> SearchRecord:
    """Run the next search, as an actor does."""
    search = service.queue.claim(Owner.current(), uuid.uuid4().hex)
    assert search is not None
    service.queue.run(search)
    return search


def measure(service: Running, search: SearchRecord) -> list[Notice]:
    """Measure two plans of a search and store them; return what the search tells."""
    study = opened(service.store)
    service.store.set_facts(study, FACTS)
    service.queue.belongs_to(search, study.id)
    told: list[Notice] = [
        StudyStarted(
            study=study.id,
            script=Script(target="train.py", cwd="/"),
            hardware=H200,
            devices=1,
            budget=24 * GIB,
            asked=True,
            allow="rounding",
            resumed=0,
        ),
        Line(text="a line"),
    ]
    for number, report in enumerate(
        [measured(LEAN, figures(10.0, 8.0)), measured(BF16, figures(20.0, 12.0))]
    ):
        add(service.store, study, report)
        told.append(TrialEnded(number=number, slot=0, report=report, best=True))
    return told


def test_submit_watch_report_export(service: Running, folder: Path, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(service.url)
        browser.write("#submit [name=script]", "missing/../../train.py")
        browser.choose("[name=archive]", folder)
        browser.click("#submit button")
        problem = browser.wait("document.querySelector('#submit .warn').textContent")
        assert "give its path below the uploaded folder" in problem
        browser.run("document.querySelector('#submit').reset()")
        browser.choose("[name=archive]", folder)
        browser.write("#submit [name=script]", "train.py")
        browser.write("[name=args]", "--epochs 3")
        browser.write("[name=memory]", "24GiB")
        browser.write("[name=deadline]", "2h")
        browser.write("[name=priority]", "5")
        browser.click("#submit button")
        browser.wait("location.pathname.startsWith('/searches/')")
        browser.wait("document.getElementById('state')?.textContent.startsWith('queued')")
        search = claimed(service)
        assert (search.submission.args, search.priority) == (("--epochs", "3"), 5)
        assert search.deadline is not None
        browser.wait("document.getElementById('state').textContent === 'running'")
        for notice in measure(service, search):
            service.queue.tell(search, [messages.notice_to_json(notice)])
        browser.wait("document.querySelectorAll('#trials tbody tr').length === 2")
        browser.wait("document.querySelectorAll('#plot circle').length === 2")
        assert browser.run("document.querySelector('tr.best td').textContent") == "1"
        service.queue.finish(search, None)
        browser.wait("document.getElementById('state').textContent === 'finished'")
        export = "fetch(document.querySelector('[download=\"plan.toml\"]').href)"
        browser.run(f"{export}.then((answer) => answer.text()).then((text) => window.plan = text)")
        assert browser.wait("window.plan").startswith("samples_per_second = 20.0")
        browser.click("#report")
        browser.wait("location.pathname.endsWith('/report')")
        browser.wait("document.querySelectorAll('table tr').length > 2")


def test_who_holds_gpus_and_who_waits(service: Running, tmp_path: Path) -> None:
    queue = service.queue
    queue.submit("bob", Submission(script=("train.py",), upload="b1"), gpus=6)
    running = claimed(service)
    waiting = queue.submit(ME, Submission(script=("train.py",), upload="b2"), gpus=4)
    starting = queue.claim(Owner.current(), uuid.uuid4().hex)
    assert starting is not None
    queue.wait(starting, "4 GPUs (H100)")
    with Browser(tmp_path / "profile") as browser:
        browser.open(service.url)
        text = browser.run("document.getElementById('live').innerText")
        assert "6 of 8 are held: gpu1 has 8 x H100." in text
        assert f"bob: 6 GPUs for search {running.id}, for " in text
        assert f"{ME}: search {waiting.id} waits for 4 GPUs (H100)" in text
        queue.finish(running, None)
        queue.finish(waiting, None)
        browser.wait("document.body.innerText.includes('No search waits.')")  # without a reload


def test_by_keyboard_alone(service: Running, folder: Path, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(service.url)
        browser.tab_to("[name=archive]")
        browser.choose("[name=archive]", folder)  # the system's own dialog
        browser.press("Tab", "train.py", "Tab", "--epochs 3")
        browser.tab_to("#submit button")
        browser.press("Enter")
        browser.wait("location.pathname.startsWith('/searches/')")
        browser.tab_to("[data-order=cancel]")
        browser.press("Enter")
        browser.wait("document.getElementById('state').textContent === 'cancelled'")
        assert browser.run("document.activeElement.id") == "state", "its button has gone"
        browser.tab_to("[data-order=resume]")
        browser.press("Enter")
        browser.wait("document.getElementById('state')?.textContent.startsWith('queued')")
        search = claimed(service)
        told = [*measure(service, search), NewOutput(slot=0, text="loss 3.2\nloss 2.9")]
        service.queue.tell(search, [messages.notice_to_json(notice) for notice in told])
        browser.wait("document.getElementById('output-0')?.textContent.endsWith('loss 2.9')")
        assert "20.0 samples/s in 12.0 GiB" in browser.run("document.body.innerText")
        browser.tab_to("#report")
        browser.press("Enter")
        browser.wait("location.pathname.endsWith('/report')")
        browser.wait("document.querySelectorAll('table tr').length > 2")
        assert browser.console == []
    service.queue.finish(search, None)


def test_a_refresh_keeps_the_focus_and_what_is_marked(service: Running, tmp_path: Path) -> None:
    first = service.queue.submit(ME, Submission(script=("a.py",), upload=uuid.uuid4().hex))
    with Browser(tmp_path / "profile") as browser:
        browser.open(service.url)
        row = f"#search-{first.id}"
        browser.tab_to(f"{row} input")
        browser.press("Space", "Tab")
        browser.run("window.kept = document.activeElement, 0")
        second = service.queue.submit(ME, Submission(script=("b.py",), upload=uuid.uuid4().hex))
        service.queue.cancel(first.id, ME)
        browser.wait(f"document.querySelector('{row} .state').textContent === 'cancelled'")
        order = "[...document.querySelectorAll('#searches tbody tr')].map((row) => row.id)"
        assert browser.run(order)[:2] == [f"search-{second.id}", f"search-{first.id}"]
        assert browser.run("document.activeElement === kept && kept.matches('.name')")
        assert browser.run(f"document.querySelector('{row} input').checked")
    service.queue.cancel(second.id, ME)


@pytest.mark.parametrize("dark", [False, True])
def test_narrow_and_dark(service: Running, tmp_path: Path, dark: bool) -> None:
    queue = service.queue
    words = Submission(script=(LONG,), args=("--output", "x" * 60), upload=uuid.uuid4().hex)
    queue.submit(ME, words, priority=50)
    search = claimed(service)
    queue.tell(search, [messages.notice_to_json(each) for each in measure(service, search)])
    queue.submit(ME, Submission(script=(LONG,), upload=uuid.uuid4().hex))
    with Browser(tmp_path / "profile", width=400, dark=dark) as browser:
        for path in ("/", f"/searches/{search.id}", "/login"):
            browser.open(service.url + path)
            if "searches" in path:
                browser.wait("document.querySelectorAll('#trials tbody tr').length === 2")
            wide = browser.run("[document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1] == 400, path
            bright = browser.run(
                "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
            )
            assert (max(bright) < 64) == dark, path
            assert browser.console == [], path
            browser.picture(tmp_path / f"{path.strip('/').replace('/', '-') or 'index'}.png")
    queue.finish(search, None)
