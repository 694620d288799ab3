"""How the service answers its users while strangers attack it.

    python benchmarks/service_attack.py [--connections 1200] [--bodies 4] [--seconds 60]

For so long, clients without a token keep slow connections open, and send bodies of 2 GiB. A user
with a token asks for a page meanwhile. Writes ``results/service_attack.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from service_load import RESULTS, p95, serve

from autofit.client.http import Service
from autofit.service.users import create_token
from autofit.storage import Store

BODY = 2 << 30
PATHS = ("/login", "/api/searches", "/api/uploads", "/nothing")
PAUSE = 0.2
"""Seconds between two requests of the user."""


def main() -> None:
    """Serve a store, attack, measure, write the note."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=1200)
    parser.add_argument("--bodies", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        storage = str(Path(folder, "service.db"))
        with Store(storage) as store:
            user = create_token(store, "alice")
        receiver, sender = context.Pipe(duplex=False)
        server = context.Process(target=serve, args=(storage, sender), daemon=True)
        server.start()
        port = receiver.recv()
        attack = context.Process(
            target=_attack, args=(port, options.connections, options.bodies, sender), daemon=True
        )
        attack.start()
        receiver.recv()  # the first connections stand
        service, process = Service(f"http://127.0.0.1:{port}", user), psutil.Process(server.pid)
        seconds, memory, open_files = [], [], []
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            began = time.monotonic()
            service.text("/")
            seconds.append(time.monotonic() - began)
            memory.append(process.memory_info().rss)
            open_files.append(process.num_fds())
            time.sleep(PAUSE)
        attack.kill()
        server.kill()
    _write(seconds, memory, open_files, options)


def _attack(port: int, connections: int, bodies: int, sender: Connection) -> None:
    """Attack the service at a port without end; send ``None`` once the connections were made."""
    made, asked = count(1), count()

    async def slow() -> None:
        """Hold a connection: half of them with an unfinished head, half with a slow body."""
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                if next(made) == connections:
                    sender.send(None)
                number = next(asked)
                head = f"POST {PATHS[number % len(PATHS)]} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                writer.write(f"{head}Content-Length: 100000\r\n".encode())
                if number % 2:
                    writer.write(b"\r\n{")
                while not reader.at_eof():
                    writer.write(b"a" if number % 2 else b"a: b\r\n")
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await reader.read(1000)
                writer.close()

    async def large(path: str) -> None:
        """Send a body of 2 GiB until the service ends the connection, again and again."""
        part = bytes(1 << 20)
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {BODY}\r\n\r\n"
                writer.write(head.encode())
                for _ in range(BODY >> 20):
                    writer.write(part)
                    await writer.drain()
                writer.close()

    async def all_of_them() -> None:
        large_ones = [large(PATHS[number % len(PATHS)]) for number in range(bodies)]
        await asyncio.gather(*(slow() for _ in range(connections)), *large_ones)

    asyncio.run(all_of_them())


def _write(
    seconds: list[float], memory: list[int], open_files: list[int], options: argparse.Namespace
) -> None:
    text = f"""\
# The service under attack

`python benchmarks/service_attack.py`: for {options.seconds:.0f} s, clients without a token hold \
{options.connections} slow connections, which they open again when the service ends them, and send \
{options.bodies} bodies of 2 GiB at a time, again and again. A user with a token asks for the page \
of the queue {1 / PAUSE:.0f} times a second at most. SQLite, {os.cpu_count()} cores, which service \
and clients share with other work: the load was {os.getloadavg()[0]:.0f} processes.

| figure | value |
| --- | --- |
| pages of the user | {len(seconds)} |
| median, p95, slowest | {1000 * statistics.median(seconds):.0f} ms, \
{1000 * p95(seconds):.0f} ms, {1000 * max(seconds):.0f} ms |
| memory of the service at most | {max(memory) / 1e6:.0f} MB |
| open files of the service at most | {max(open_files)} |
"""
    (RESULTS / "service_attack.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
