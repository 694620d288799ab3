"""A service that is root runs each user's scripts under a uid of their own."""

from __future__ import annotations

import http.client
import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from autofit.client import archive
from autofit.client.http import Service
from autofit.exceptions import UsageError
from autofit.service.server import close_store
from autofit.service.users import Users, create_token
from autofit.storage import Store
from tests.service.archives import entry, tar
from tests.service.live import OPTIONS, LiveService
from tests.uids import interpreter, search_path

READS = """\
import sys

for path in sys.argv[2:]:
    try:
        open(path).read()
    except PermissionError:
        continue
    sys.exit(f"{path} was read")
open(sys.argv[1]).read()
"""
SLOW = "import time\n\ntime.sleep(300)\n"


@pytest.mark.quick
def test_every_user_has_a_uid_that_stays(tmp_path: Path) -> None:
    with Store(str(tmp_path / "service.db")) as store:
        users = Users(store, trusted=False)
        assert users.uid("somebody") is None, "without tokens, all is the service's own user's"
        for name in ("alice", "bob"):
            create_token(store, name)
        alice, bob = users.uid("alice"), users.uid("bob")
        assert alice != bob
        assert users.uid("alice") == alice
        assert Users(store, trusted=True).uid("alice") is None
        close_store(store.url)
        assert stat.S_IMODE((tmp_path / "service.db").stat().st_mode) == 0o600


def _submitted(service: Service, folder: Path, *args: str) -> str:
    upload = service.post("/api/uploads", archive.pack(folder))["upload"]
    request = {"script": "train.py", "args": args, "upload": upload, "options": OPTIONS}
    return f"/api/searches/{service.post('/api/searches', request)['id']}"


def _folder_of(uid: int) -> Path:
    """Return the working directory of a process with this uid, once there is one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["uids"]):
            if process.info["uids"] and process.info["uids"].real == uid:
                return Path(f"/proc/{process.pid}/cwd").readlink()
        time.sleep(0.2)
    raise AssertionError("no script runs")


def _two_gibibytes(service: Service) -> str:
    """Offer an upload of 2 GiB; return the answer, which comes before it is sent."""
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/api/uploads")
    connection.putheader("Content-Length", str(2 << 30))
    connection.putheader("Authorization", f"Bearer {service.token}")
    connection.endheaders()
    answer = connection.getresponse().read().decode()
    connection.close()
    return answer


def _answer(ask: Callable[[], Any]) -> str:
    """Return the answer to a request, also if it is refused."""
    try:
        return str(ask())
    except UsageError as error:
        return str(error)


def _refusals(alice: Service, bob: Service, search: str) -> dict[str, tuple[str, str]]:
    """Return what is answered to who does not belong there, and what should be answered."""
    stranger = Service(alice.url, "")
    evil = tar(entry("../evil.py"))
    return {
        "no token": (_answer(lambda: stranger.get(search)), "no valid token"),
        "another's token": (_answer(lambda: bob.get(search)), "there is no search"),
        "../": (_answer(lambda: bob.post("/api/uploads", evil)), "outside the folder"),
        "2 GiB": (_two_gibibytes(bob), "larger than the 100.0 MiB that the service takes"),
    }


@pytest.mark.full
@pytest.mark.timeout(600)
def test_who_does_not_belong_there_is_refused() -> None:
    """A script that reads another user's folder ends this list."""
    python = interpreter()
    if python is None:
        pytest.skip("this is not root, or other users cannot run Python here")
    words = ("--log-format", "json")
    with LiveService(python=python, words=words, PYTHONPATH=search_path()) as live:
        live.root.chmod(0o711)
        (live.root / "t").chmod(0o1777)
        alice = Service(live.url, live.token("alice"))
        live.start()
        bob = Service(live.url, live.token("bob"))
        slow, reads, plain = live.root / "slow", live.root / "reads", live.folder(0)
        for folder, text in ((slow, SLOW), (reads, READS)):
            folder.mkdir()
            (folder / "train.py").write_text(text)
        first = _submitted(alice, slow)
        with Store(live.storage, create=False) as store:
            while alice.get(first)["state"] != "running":
                time.sleep(0.2)
            uid = Users(store, trusted=False).uid("alice")
        assert uid is not None
        for what, (answer, expected) in _refusals(alice, bob, first).items():
            assert expected in answer, what
        others = _folder_of(uid)
        assert stat.S_IMODE(others.stat().st_mode) == 0o700
        assert others.stat().st_uid == uid
        second = _submitted(bob, reads, str(others / "train.py"), live.storage)
        found = bob.get(second)
        while found["ended"] is None:
            time.sleep(0.2)
            found = bob.get(second)
        assert found["state"] == "failed"
        assert "PermissionError" in found["error"]["message"] + found["error"]["traceback"]
        assert str(others / "train.py") in found["error"]["traceback"]
        alice.post(f"{first}/cancel")
        third = _submitted(bob, plain)
        while (found := bob.get(third))["ended"] is None:
            time.sleep(0.2)
        assert found["state"] == "finished", found["error"]
        assert "plan" in bob.text(f"{third}/plan")
        lines = [json.loads(line) for line in (live.root / "log").read_text().splitlines()]
        assert f"the service answers at {live.url}" in [line["message"] for line in lines]
        asked = [line for line in lines if line["message"] == "request" and line["user"] == "bob"]
        assert second in [line["path"] for line in asked]
