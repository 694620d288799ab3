"""How long the service takes to answer with a full store and many clients.

    python benchmarks/service_load.py [--trials 50000] [--clients 200] [--seconds 600]

One process serves a store of so many trials over HTTP. In a second, clients follow a running
search, which sends ten notices a second. Writes ``results/service_load.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import uvicorn

from autofit.client import messages
from autofit.client.http import Service
from autofit.facts import Hardware
from autofit.plan import Plan
from autofit.service import boundary
from autofit.service.app import make_app
from autofit.service.users import Users, create_token
from autofit.storage import Owner, Queue, SearchRecord, Store, StudyKey, Submission
from autofit.tuning.notices import Line
from autofit.worker.records.trials import Measurement, Script, TrialReport, Verdict

RESULTS = Path(__file__).resolve().parent / "results"
GPU = Hardware(device="cuda", name="NVIDIA H200", total_bytes=140 << 30)
EACH = 100
"""Trials of a study."""
PAUSE = 0.1
"""Seconds between two notices, and between two rounds of requests."""


@dataclass
class Found:
    """What was measured."""

    requests: dict[str, list[float]]
    """The seconds of each request."""
    told: list[float]
    """Seconds from a notice to a client."""
    memory: list[int]
    """Bytes that the service held after each round of requests."""
    cores: float
    """Processor seconds of the service in a second."""


def main() -> None:
    """Fill a store, serve it, measure, write the note."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
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
            server = context.Process(target=serve, args=(storage, sender), daemon=True)
            server.start()
            port = receiver.recv()
            followers = context.Process(
                target=_follow, args=(port, token, running.id, options.clients, sender)
            )
            followers.start()
            service = Service(f"http://127.0.0.1:{port}", token)
            process = psutil.Process(server.pid)
            found = _measure(service, process, queue, running, searches[-1], options.seconds)
            found.told = receiver.recv()
            followers.join()
            server.kill()
    _write(found, options)


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


def serve(storage: str, sender: Connection) -> None:
    """Serve a store; send the port."""
    import socket

    with Store(storage) as store, socket.create_server(("127.0.0.1", 0)) as port:
        sender.send(port.getsockname()[1])
        app = make_app(store, Users(store, trusted=True))
        settings = boundary.settings(boundary.CONNECTIONS, ())
        boundary.Server(uvicorn.Config(app, log_level="error", **settings)).run(sockets=[port])


def _follow(port: int, token: str, number: int, clients: int, sender: Connection) -> None:
    """Follow a search to its end; send the seconds from each notice to each client."""
    told: list[float] = []
    head = f"GET /api/searches/{number}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += f"Authorization: Bearer {token}\r\nConnection: close\r\n\r\n"

    async def follow() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode())
        async for line in reader:
            if line.startswith(b'data: {"text"'):
                content = json.loads(line.removeprefix(b"data: "))
                told.append(time.monotonic() - float(content["text"]))
        writer.close()

    async def follow_all() -> None:
        await asyncio.gather(*(follow() for _ in range(clients)))

    asyncio.run(follow_all())
    sender.send(told)


def _measure(
    service: Service,
    process: psutil.Process,
    queue: Queue,
    running: SearchRecord,
    finished: int,
    seconds: float,
) -> Found:
    """Ask the service, whose process is ``process``, while notices of ``running`` are stored."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(PAUSE):
            queue.tell(running, [messages.notice_to_json(Line(text=str(time.monotonic())))])
        queue.finish(running, None)

    telling = threading.Thread(target=tell)
    telling.start()
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
    found = Found({name: [] for name in requests}, [], [], 0.0)
    start, used = time.monotonic(), sum(process.cpu_times()[:2])
    while time.monotonic() - start < seconds:
        for name, ask in requests.items():
            began = time.monotonic()
            ask()
            found.requests[name].append(time.monotonic() - began)
        found.memory.append(process.memory_info().rss)
        time.sleep(PAUSE)
    found.cores = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - start)
    over.set()
    telling.join()
    return found


def p95(seconds: list[float]) -> float:
    """Return the 95th percentile."""
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]


def _write(found: Found, options: argparse.Namespace) -> None:
    a_tenth = max(1, len(found.memory) // 10)
    first, last = (
        statistics.median(each) for each in (found.memory[:a_tenth], found.memory[-a_tenth:])
    )
    lines = [
        "# The service under load",
        "",
        f"`python benchmarks/service_load.py` with {options.trials} stored trials in studies of"
        f" {EACH}, {options.clients} clients that follow a search with ten notices a second, and"
        f" one that asks, for {options.seconds:.0f} s. SQLite, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}; clients and service share the cores, with a load of"
        f" {os.getloadavg()[2]:.0f} processes, most of other work.",
        "",
        f"The service took {found.cores:.2f} cores. Its memory was {first / 1e6:.0f} MB in the"
        f" first tenth of that time, {last / 1e6:.0f} MB in the last, and"
        f" {max(found.memory) / 1e6:.0f} MB at most.",
        "",
        "| request | times | median | p95 |",
        "| --- | --- | --- | --- |",
    ]
    for name, seconds in [*found.requests.items(), ("from a notice to a client", found.told)]:
        median = statistics.median(seconds)
        lines.append(
            f"| {name} | {len(seconds)} | {1000 * median:.0f} ms | {1000 * p95(seconds):.0f} ms |"
        )
    text = "\n".join(lines) + "\n"
    (RESULTS / "service_load.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
