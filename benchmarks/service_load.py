"""How long the service takes to answer with a full store and many clients.

    python benchmarks/service_load.py [--trials 10000] [--clients 20] [--seconds 20]

Serves a store of so many trials over HTTP in a process of its own, while clients follow the events
of a running search that sends ten notices a second. Writes ``results/service_load.md``.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from autofit.client import messages
from autofit.client.http import Service
from autofit.facts import Hardware
from autofit.plan import Plan
from autofit.service.app import make_app
from autofit.service.users import Users, create_token
from autofit.storage import Owner, Queue, SearchRecord, Store, StudyKey, Submission
from autofit.tuning.notices import Line
from autofit.worker.records.trials import Measurement, Script, TrialReport, Verdict

RESULTS = Path(__file__).resolve().parent / "results"
GPU = Hardware(device="cuda", name="NVIDIA H200", total_bytes=140 << 30)
EACH = 100
"""Trials of a study."""


def main() -> None:
    """Fill a store, serve it, measure, write the note."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        storage = str(Path(folder, "service.db"))
        with Store(storage) as store:
            queue = Queue(store)
            token = create_token(store, "alice")
            searches = [_searched(store, queue, n) for n in range(options.trials // EACH)]
            running = queue.submit("alice", _submission("running"))
            queue.run(running)
            context = multiprocessing.get_context("spawn")
            receiver, sender = context.Pipe(duplex=False)
            server = context.Process(target=_serve, args=(storage, sender), daemon=True)
            server.start()
            service = Service(f"http://127.0.0.1:{receiver.recv()}", token)
            found, told = _measure(service, queue, running, searches[-1], options)
            server.kill()
    _write(found, told, options)


def _submission(name: str) -> Submission:
    return Submission(script=("train.py",), upload=name, options={"memory": "24GiB"})


def _searched(store: Store, queue: Queue, number: int) -> int:
    """Store a finished search with a study of its own; return its number."""
    script = Script(target=f"train{number}.py", cwd="/project")
    key = StudyKey(
        script=f"/project/train{number}.py",
        digest="",
        gpu=GPU.name,
        gpus=1,
        memory=24 << 30,
        allow="rounding",
    )
    study = store.open_study(key, script=script, hardware=GPU, budget=24 << 30, versions={})
    plans = [Plan.of({"precision": "bf16", "micro_batch": str(n + 1)}) for n in range(EACH)]
    trials = store.add_trials(study, plans, launch=0, owner=Owner.current())
    for n, (trial, plan) in enumerate(zip(trials, plans, strict=True)):
        measurement = Measurement(
            micro_batch=n + 1,
            effective_batch=128,
            step_seconds=(1.0 + n / 100,) * 20,
            peak_allocated=10 << 30,
            peak_reserved=11 << 30,
            peak_device=12 << 30,
            losses=(1.0,) * 20,
        )
        report = TrialReport(
            index=n, plan=plan, best=plan, verdict=Verdict.MEASURED, measurements=(measurement,)
        )
        store.finish(trial, report)
    search = queue.submit("alice", _submission(str(number)))
    queue.belongs_to(search, study.id)
    queue.finish(search, None)
    return search.id


def _serve(storage: str, sender: object) -> None:
    """Serve a store; send the port."""
    import socket

    with Store(storage) as store, socket.create_server(("127.0.0.1", 0)) as port:
        sender.send(port.getsockname()[1])  # type: ignore[attr-defined]
        app = make_app(store, Users(store, trusted=True))
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[port])


def _measure(
    service: Service,
    queue: Queue,
    running: SearchRecord,
    finished: int,
    options: argparse.Namespace,
) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of each request, and those from a notice to each client."""
    over = threading.Event()
    sent: dict[str, float] = {}
    told: list[float] = []

    def follow() -> None:
        for event in service.events(f"/api/searches/{running.id}/events"):
            if event.kind == "Line":
                told.append(time.monotonic() - sent[event.content["text"]])

    def tell() -> None:
        number = 0
        while not over.wait(0.1):
            number += 1
            sent[str(number)] = time.monotonic()
            queue.tell(running, [messages.notice_to_json(Line(text=str(number)))])
        queue.finish(running, None)

    threads = [threading.Thread(target=follow) for _ in range(options.clients)]
    threads.append(threading.Thread(target=tell))
    for thread in threads:
        thread.start()
    path = f"/api/searches/{finished}"
    requests: dict[str, Callable[[], object]] = {
        "list": lambda: service.get("/api/searches"),
        "show": lambda: service.get(path),
        "plan": lambda: service.text(f"{path}/plan"),
        "study": lambda: service.get(f"{path}/study"),
        "metrics": lambda: service.text("/metrics"),
        "page of the queue": lambda: service.text("/"),
        "page of a search": lambda: service.text(f"/searches/{finished}"),
    }
    found: dict[str, list[float]] = {name: [] for name in requests}
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        for name, ask in requests.items():
            began = time.monotonic()
            ask()
            found[name].append(time.monotonic() - began)
    over.set()
    for thread in threads:
        thread.join()
    return found, told


def _p95(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]


def _write(found: dict[str, list[float]], told: list[float], options: argparse.Namespace) -> None:
    lines = [
        "# The service under load",
        "",
        f"`python benchmarks/service_load.py` with {options.trials} stored trials in studies of"
        f" {EACH}, {options.clients} clients that follow a search with ten notices a second, and"
        f" one that asks without a pause. SQLite, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}; clients and service share the cores.",
        "",
        "| request | times | median | p95 |",
        "| --- | --- | --- | --- |",
    ]
    for name, seconds in [*found.items(), ("from a notice to a client", told)]:
        median = statistics.median(seconds)
        lines.append(
            f"| {name} | {len(seconds)} | {1000 * median:.0f} ms | {1000 * _p95(seconds):.0f} ms |"
        )
    text = "\n".join(lines) + "\n"
    (RESULTS / "service_load.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
