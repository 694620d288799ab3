"""The HTTP interface of a service on a store, in this process, without Ray."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from autofit.client.http import Service
from autofit.service import boundary
from autofit.service.app import make_app
from autofit.service.users import Users, create_token
from autofit.storage import Queue, Store
from autofit.worker.cluster.nodes import ClusterNode

LIMIT = 1 << 20
"""Bytes of an upload that these services take."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A service that answers."""

    url: str
    store: Store
    queue: Queue

    def user(self, name: str) -> Service:
        """Return the service as a new user sees it, whose name begins with ``name``."""
        return Service(self.url, create_token(self.store, f"{name}-{uuid.uuid4().hex[:8]}"))

    @classmethod
    @contextmanager
    def start(
        cls,
        folder: Path,
        *,
        trusted: bool = True,
        obstacle: str = "",
        rate: float = math.inf,
        machines: tuple[ClusterNode, ...] = (),
        connections: int = 100,
        proxies: tuple[str, ...] = (),
        storage: str = "",
    ) -> Iterator[Running]:
        """Serve a new store in a folder, or the one at the URL ``storage``."""
        with Store(storage or str(folder / "service.db")) as store:
            queue = Queue(store)
            users = Users(store, trusted=trusted, obstacle=obstacle, rate=rate)
            app = make_app(
                store, users, limit=LIMIT, connections=connections, machines=lambda: machines
            )
            settings = boundary.settings(connections, proxies)
            config = uvicorn.Config(app, port=0, log_level="error", **settings)
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, daemon=True)
            thread.start()
            while not server.started:
                thread.join(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield cls(url=f"http://127.0.0.1:{port}", store=store, queue=queue)
            server.should_exit = True
            thread.join(10)
