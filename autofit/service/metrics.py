"""The figures of a service for Prometheus: of the store at each request, and of the requests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from autofit.exceptions import AutofitError
from autofit.service.gpus import Gpus
from autofit.storage import Queue, Store
from autofit.storage.engine import parse, sqlite_file

KIND = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus' text format."""


class ServiceFigures:
    """The figures of one service.

    ``prometheus_client.make_asgi_app`` would collect them in the event loop, where a query of the
    store stops every other request. So a route calls ``text`` in a thread.
    """

    def __init__(self, store: Store, gpus: Gpus, alive: Callable[[], bool]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfStore(store, gpus, alive))
        self._requests = Histogram(
            "autofit_request_seconds",
            "Seconds from a request to the end of its answer; streams of events are left out",
            labelnames=("route", "method", "status"),
            registry=self._registry,
        )

    def seen(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that was answered; ``route``: its path in the OpenAPI document."""
        self._requests.labels(route, method, status).observe(seconds)

    def text(self) -> str:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _OfStore(Collector):
    def __init__(self, store: Store, gpus: Gpus, alive: Callable[[], bool]) -> None:
        self._queue = Queue(store)
        self._gpus = gpus
        self._alive = alive
        file = sqlite_file(parse(store.url))
        self._disks = {"temporary": tempfile.gettempdir()}
        if file is not None:
            self._disks["store"] = str(file.parent)

    def describe(self) -> list[Metric]:
        """Return nothing, so that the store is not asked when the service starts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        found = self._queue.counts()
        free = {name: shutil.disk_usage(folder).free for name, folder in self._disks.items()}
        for name, what, label, values in (
            ("autofit_searches", "Searches of the service", "state", found.searches),
            ("autofit_trials", "Finished trials in the store", "verdict", found.trials),
            ("autofit_out_of_memory", "Trials without memory", "phase", found.out_of_memory),
            ("autofit_disk_free_bytes", "Free bytes", "disk", free),
        ):
            family = GaugeMetricFamily(name, what, labels=[label])
            for value, count in sorted(values.items()):
                family.add_metric([value], count)
            yield family
        waited = (datetime.now(UTC) - found.oldest).total_seconds() if found.oldest else 0.0
        for name, what, figure in (
            ("autofit_queue_age_seconds", "How long the oldest queued search waits", waited),
            ("autofit_ray_up", "Whether Ray answers", float(self._alive())),
            ("autofit_gpus", "GPUs of the cluster", self._capacity()),
            ("autofit_gpus_held", "GPUs of running searches; on the CPU, searches", found.held),
        ):
            yield GaugeMetricFamily(name, what, value=figure)
        used = CounterMetricFamily(
            "autofit_gpu_seconds", "Seconds of GPUs that ended searches had", labels=["user"]
        )
        for user, seconds in sorted(found.gpu_seconds.items()):
            used.add_metric([user], seconds)
        yield used

    def _capacity(self) -> int:
        try:
            return self._gpus.look().total
        except AutofitError:  # Ray has ended
            return 0
