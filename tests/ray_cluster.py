"""A Ray cluster of several nodes on this machine, in a process of its own: this file, as a program.

The program prints the address, a raylet's process id and a folder for each line it is told: what
resources a new node has (``CPU=1 GPU=2``), and which GPU is its first (``FIRST=1``). Given an
address and a folder, it is one more node itself. It ends, with all it started, at the end of its
input.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_period_ms": "1000",  # a node that is killed is missed after five of them
    "RAY_worker_niceness": "0",
}


class RayCluster:
    """A Ray cluster on this machine, apart from this process: its nodes come and go."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = ""
        self.folder = Path()
        """Where its nodes keep their files."""
        self.raylets: list[int] = []
        """Process ids, of those killed too."""

    def add(self, resources: str = "CPU=1") -> int:
        """Start a node; return the process id of its raylet."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(resources, file=self._process.stdin, flush=True)
        self.address, raylet, folder = self._process.stdout.readline().split()
        self.folder = Path(folder)
        self.raylets.append(int(raylet))
        return int(raylet)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()


@contextlib.contextmanager
def far(cluster: RayCluster, hidden: Sequence[Path]) -> Iterator[str]:
    """Start a node of another host name that does not see some folders; yield the name."""
    hide = " && ".join(["hostname far", *(f"mount -t tmpfs none '{path}'" for path in hidden)])
    join = f"exec '{sys.executable}' '{__file__}' {cluster.address} {cluster.folder}"
    unshare = ["unshare", "-Urmu", "sh", "-c"]
    if subprocess.run([*unshare, hide], capture_output=True).returncode:
        pytest.skip("this system gives no process a name and mounts of its own")
    process = subprocess.Popen(
        [*unshare, f"{hide} && {join}"],
        stdin=subprocess.PIPE,
        env={**os.environ, "OF_BOTH": "the node's"},
    )
    yield "far"
    process.communicate(timeout=60)


def serve() -> None:
    """Start one node a line."""
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir="/tmp"))  # a socket's path must be short
    os.environ.update(SETTINGS, RAY_TMPDIR=str(folder))
    (folder / "ray").mkdir()
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(shutdown_at_exit=True)
    try:
        for line in sys.stdin:
            words = (word.partition("=") for word in line.split())
            asked = {name: float(count) for name, _, count in words}
            # Ray gives away no more than CUDA would show
            first = int(asked.pop("FIRST", 0))
            cards = range(first, first + int(asked.get("GPU", 0)))
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, cards))
            node = cluster.add_node(
                num_cpus=asked.pop("CPU", 1),
                num_gpus=asked.pop("GPU", 0),
                resources=asked,
                object_store_memory=80 << 20,
                plasma_directory=str(folder),
                include_dashboard=False,
                wait=False,
            )
            (raylet,) = node.all_processes["raylet"]
            print(cluster.address, raylet.process.pid, folder, flush=True)
        cluster.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def join(address: str, folder: str) -> None:
    """Be a node of the cluster at ``address`` until the end of the input."""
    os.environ.update(SETTINGS, RAY_TMPDIR=folder)
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters: Any = RayParams(
        gcs_address=address,
        redis_address=address,
        num_cpus=1,
        num_gpus=0,
        object_store_memory=80 << 20,
        plasma_directory=folder,
        node_manager_port=0,
        min_worker_port=0,
        max_worker_port=0,
    )
    parameters.include_log_monitor = False
    parameters.dashboard_agent_listen_port = None
    node: Any = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)  # it signs off


if __name__ == "__main__":
    join(*sys.argv[1:]) if sys.argv[1:] else serve()
