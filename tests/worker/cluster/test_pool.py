"""The pool on a real Ray: what runs in it, what it listens on, and what it leaves behind."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autofit.exceptions import WorkerError
from autofit.plan import Plan
from autofit.worker.cluster.local_ray import _LONGEST_FOLDER, variables
from autofit.worker.cluster.pool import Happening, Pool
from autofit.worker.launch.reaper import SESSION, marked, processes
from autofit.worker.records.trials import (
    Answer,
    Asking,
    LaunchEnded,
    LaunchRequest,
    Learned,
    Script,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

HARNESS = """
import json, os, queue, signal, subprocess, sys, time
from multiprocessing.connection import Connection
from autofit.strategies import Facts
from autofit.worker.launch import lifeline
from autofit.worker.records.trials import *

events = Connection(int(os.environ["AUTOFIT_EVENTS_FD"]), readable=False)
control = Connection(int(os.environ["AUTOFIT_CONTROL_FD"]), writable=False)
request = control.recv().request
answers = queue.SimpleQueue()
lifeline.watch(control.fileno(), answers.put)

def learned(word):
    events.send(Learned(facts=Facts(framework=word)))

def asked():
    events.send(Asking())
    (plan,) = answers.get().plans
    return plan

exec(request.script.target)
"""

Request = Callable[[str], LaunchRequest]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("harness") / "harness.py"
    path.write_text(HARNESS)
    return path


@pytest.fixture(scope="module")
def request_for(harness: Path) -> Request:
    """A request for a child that executes the given lines."""

    def request_for(body: str) -> LaunchRequest:
        script = Script(target=textwrap.dedent(body), cwd=str(harness.parent))
        return LaunchRequest(
            script=script, plans=(Plan(),), device="cpu", budget=1 << 30, timeout=60
        )

    return request_for


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    """The environment of this process before the pool: an earlier Ray may have left its mark."""
    return dict(os.environ)


@pytest.fixture(scope="module")
def pool(harness: Path, before: dict[str, str]) -> Iterator[Pool]:
    """Two slots; entered with a variable that Ray would change in its workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "the user's")
        with Pool(slots=2, harness=harness) as pool:
            pool.open()
            yield pool


def until_free(pool: Pool, slots: int = 2) -> list[Happening]:
    """Everything that happens until so many slots are free."""
    heard: list[Happening] = []
    deadline = time.monotonic() + 60
    while len(pool.free) < slots:
        assert time.monotonic() < deadline, heard
        heard += pool.events(timeout=1)
    return heard


def of_session(pool: Pool) -> set[int]:
    """Every process of the pool: those that carry its mark, and this one."""
    return marked(pool._ray.session, processes()) | {os.getpid()}


def wait_for(path: Path, within: float = 60.0) -> str:
    deadline = time.monotonic() + within
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)
    return path.read_text()


def test_events_stream_from_both_slots_as_they_happen(pool: Pool, request_for: Request) -> None:
    body = "learned('one'); time.sleep(1.5); learned('two'); print('words')"
    for slot in pool.slots:
        pool.submit(slot, request_for(body))
    assert pool.free == []
    with pytest.raises(WorkerError, match="slot 0 is busy"):
        pool.submit(0, request_for(body))
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    kinds: dict[int, list[type]] = {0: [], 1: []}
    while pool.free != [0, 1]:
        for slot, event in pool.events(timeout=30):
            first.setdefault(slot, time.monotonic())
            last[slot] = time.monotonic()
            kinds[slot].append(type(event))
    assert kinds == {slot: [Learned, Learned, LaunchEnded] for slot in pool.slots}
    assert all(last[slot] - first[slot] > 1 for slot in pool.slots)
    assert pool.events(timeout=0) == []


def test_launches_that_ask_are_answered_each_on_its_slot(pool: Pool, request_for: Request) -> None:
    given = {0: Plan.of({"precision": "bf16"}), 1: Plan.of({"checkpointing": "all"})}
    for slot in pool.slots:
        pool.answer(slot, Answer(plans=(Plan(),), timeout=60))  # nobody asks: it is lost
        pool.submit(slot, request_for("learned(str(asked()))"))
    told: dict[int, object] = {}
    while pool.free != [0, 1]:
        for slot, event in pool.events(timeout=30):
            if isinstance(event, Asking):
                pool.answer(slot, Answer(plans=(given[slot],), timeout=60))
            elif isinstance(event, Learned):
                told[slot] = event.facts.framework
    assert told == {slot: str(plan) for slot, plan in given.items()}


def test_the_actors_hold_no_torch(pool: Pool) -> None:
    import ray

    def heavy(slot: object) -> list[str]:
        return [name for name in ("torch", "optuna", "sqlalchemy") if name in sys.modules]

    assert ray.get([actor.__ray_call__.remote(heavy) for actor in pool._actors.values()]) == [
        [],
        [],
    ]


def test_nothing_listens_beyond_loopback(pool: Pool) -> None:
    listening = [
        (psutil.Process(pid).name(), connection.laddr.ip)
        for pid in of_session(pool)
        for connection in psutil.Process(pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 5  # GCS, raylet, agents, workers
    for name, ip in listening:
        address = ipaddress.ip_address(ip)
        plain = getattr(address, "ipv4_mapped", None) or address
        assert plain.is_loopback, f"{name} listens on {ip}"


def test_its_folder_is_the_users_alone(pool: Pool) -> None:
    """Ray opens its own folders to everybody: nobody else gets as far as those."""
    import ray

    folder = pool._ray.folder
    assert folder is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    nodes: Any = ray.nodes  # it has no types
    sockets = [Path(nodes()[0][name]) for name in ("ObjectStoreSocketName", "RayletSocketName")]
    assert all(path.is_relative_to(folder) and path.is_socket() for path in sockets)
    longest = max(len(bytes(path)) - len(bytes(folder.parent)) for path in sockets)
    # Seven digits of a process id, at most, as Linux has them; here there may be fewer.
    assert longest + 7 - len(str(os.getpid())) + _LONGEST_FOLDER <= 107


def test_every_process_of_ray_carries_the_mark(pool: Pool) -> None:
    """But for what watches over them, and what other tests have started."""
    others = ("reaper.py", "postgres")
    for child in psutil.process_iter():
        command = " ".join(child.cmdline()) if child.is_running() else ""
        if str(pool._ray.folder) in command and not any(other in command for other in others):
            assert child.pid in of_session(pool), command


def test_the_child_finds_the_users_environment(
    pool: Pool, before: dict[str, str], request_for: Request, tmp_path: Path
) -> None:
    out = tmp_path / "seen.json"
    body = f"""
        seen = {{"environment": dict(os.environ), "nice": os.nice(0)}}
        seen["blocked"] = list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        json.dump(seen, open({str(out)!r}, "w"))
        """
    pool.submit(0, request_for(body))
    until_free(pool)
    seen = json.loads(out.read_text())
    environment: dict[str, str] = seen["environment"]
    assert "OMP_NUM_THREADS" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "the user's"
    of_ray = {name for name in environment if name.startswith(("RAY_", "SPT_"))}
    assert of_ray <= before.keys()
    assert environment.get("PYTHONBREAKPOINT") == before.get("PYTHONBREAKPOINT")
    assert environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert (seen["nice"], seen["blocked"]) == (os.nice(0), [])
    assert {*variables("", "")} & {*os.environ} == set()


def test_the_exit_of_the_child_is_seen_through_ray(pool: Pool, request_for: Request) -> None:
    pool.submit(0, request_for("os.kill(os.getpid(), signal.SIGSEGV)"))
    pool.submit(1, request_for("sys.exit(3)"))
    reports = {slot: event for slot, event in until_free(pool) if isinstance(event, TrialReport)}
    assert reports[0].reason == "killed by signal 11 (SIGSEGV)"
    assert reports[1].reason == "exited with code 3"


def test_a_daemon_of_the_script_is_ended_too(
    pool: Pool, request_for: Request, tmp_path: Path
) -> None:
    out = tmp_path / "pid"
    body = f"""
        if not os.fork():
            os.setsid()
            if not os.fork():
                open({str(out)!r} + "w", "w").write(str(os.getpid()))
                os.rename({str(out)!r} + "w", {str(out)!r})
                time.sleep(60)
            os._exit(0)
        os.wait()
        while not os.path.exists({str(out)!r}):
            time.sleep(0.01)
        os.abort()
        """
    pool.submit(0, request_for(body))
    until_free(pool)
    assert not psutil.pid_exists(int(out.read_text()))


def test_a_cancelled_launch_is_interrupted(
    pool: Pool, request_for: Request, tmp_path: Path
) -> None:
    out = tmp_path / "pid"
    pool.submit(0, request_for(f"open({str(out)!r}, 'w').write(str(os.getpid())); signal.pause()"))
    wait_for(out)
    pool.cancel(0)
    pool.cancel(1)  # nothing runs there
    (_, report), (_, end) = until_free(pool)
    assert isinstance(report, TrialReport)
    assert report.verdict is Verdict.INTERRUPTED
    assert isinstance(end, LaunchEnded)
    assert not psutil.pid_exists(int(out.read_text()))


def test_a_dead_actor_is_told_and_replaced(pool: Pool, request_for: Request) -> None:
    pool.submit(0, request_for("os.kill(os.getppid(), signal.SIGKILL); signal.pause()"))
    ((slot, error),) = until_free(pool)
    assert slot == 0
    assert isinstance(error, WorkerError)
    assert "slot 0 died" in str(error)
    pool.submit(0, request_for("learned('again')"))
    assert [type(event) for _, event in until_free(pool)] == [Learned, LaunchEnded]


def test_a_folder_that_is_not_there_is_a_worker_error(pool: Pool) -> None:
    script = Script(target="", cwd="/no/such/folder")
    pool.submit(1, LaunchRequest(script=script, plans=(Plan(),), device="cpu", budget=1, timeout=9))
    ((slot, error),) = until_free(pool)
    assert slot == 1
    assert str(error).startswith("slot 1: cannot start")
    assert "\n" not in str(error)


DRIVER = """
import sys
from pathlib import Path
from autofit.plan import Plan
from autofit.worker.cluster.pool import Pool
from autofit.worker.records.trials import LaunchRequest, Script

body = "open({out!r}, 'w').write(str(os.getpid())); signal.pause()"
script = Script(target=body, cwd="/")
request = LaunchRequest(script=script, plans=(Plan(),), device="cpu", budget=1, timeout=60)
with Pool(harness=Path({harness!r})) as pool:
    print(pool._ray.session, pool._ray.folder, flush=True)
    pool.submit(0, request)
    while pool.free != [0]:
        for slot, event in pool.events(timeout=1):
            print(event)
"""


@pytest.mark.parametrize(
    "how",
    [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)],  # quick: test_kills.py
)
def test_nothing_is_left_of_a_driver_that_goes(how: int, harness: Path, tmp_path: Path) -> None:
    out = tmp_path / "pid"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(out=str(out), harness=str(harness))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(out)
    assert driver.stdout is not None
    session, folder = driver.stdout.readline().split()
    ray = [psutil.Process(pid) for pid in marked(session, processes())]
    if how == signal.SIGINT:  # as a terminal does it: to everybody, Ray's processes included
        os.killpg(driver.pid, how)
    else:
        driver.send_signal(how)
    started = time.monotonic()
    _, stderr = driver.communicate(timeout=30)
    while (left := marked(session, processes())) or Path(folder).exists():
        assert time.monotonic() - started < 10, [psutil.Process(pid).cmdline() for pid in left]
        time.sleep(0.05)
    _, alive = psutil.wait_procs(ray, timeout=max(0.0, started + 10 - time.monotonic()))
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert not psutil.pid_exists(int(out.read_text()))
    noise = [line for line in stderr.splitlines() if line and not line.startswith((" ", "Trace"))]
    assert noise == ([] if how == signal.SIGKILL else ["KeyboardInterrupt"])
    assert SESSION not in os.environ


WITHOUT_RAYLET = """
import time
import psutil
from autofit.exceptions import WorkerError
from autofit.plan import Plan
from autofit.worker.cluster.pool import Pool
from autofit.worker.launch.reaper import marked, processes
from autofit.worker.records.trials import LaunchRequest, Script

script = Script(target="sleeps.py", args=(), cwd=".")
request = LaunchRequest(
    script=script, plans=(Plan(),), device="cpu", budget=1 << 30, timeout=300.0
)
with Pool() as pool:
    pool.submit(0, request)
    pool.events(timeout=4)  # the script prints nothing: by then its actor is there
    found = marked(pool._ray.session, processes())
    (raylet,) = (p for p in map(psutil.Process, found) if p.name() == "raylet")
    raylet.kill()
    deadline = time.monotonic() + 80
    try:
        while time.monotonic() < deadline:
            for slot, event in pool.events(timeout=5):
                if isinstance(event, WorkerError):
                    pool.submit(0, request)
    except WorkerError as error:
        print("TOLD", error)
"""


@pytest.mark.full
def test_a_ray_that_has_ended_is_told_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(300)\n")
    (tmp_path / "driver.py").write_text(WITHOUT_RAYLET)
    done = subprocess.run(
        [sys.executable, "driver.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "TOLD Ray has ended on this machine" in done.stdout, done.stdout + done.stderr
