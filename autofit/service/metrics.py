"""The figures of a service for Prometheus, read from the store at each request."""

from __future__ import annotations

from collections.abc import Iterator

from autofit.storage import Queue

KIND = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus' text format."""


def metrics(queue: Queue) -> str:
    """Return all figures in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    class Figures(Collector):
        def collect(self) -> Iterator[Metric]:
            found = queue.counts()
            for name, what, label, values in (
                ("autofit_searches", "Searches of the service", "state", found.searches),
                ("autofit_trials", "Finished trials in the store", "verdict", found.trials),
                ("autofit_out_of_memory", "Trials without memory", "phase", found.out_of_memory),
            ):
                family = GaugeMetricFamily(name, what, labels=[label])
                for value, count in sorted(values.items()):
                    family.add_metric([value], count)
                yield family
            used = CounterMetricFamily(
                "autofit_gpu_seconds", "Seconds of GPUs that ended searches had", labels=["user"]
            )
            for user, seconds in sorted(found.gpu_seconds.items()):
                used.add_metric([user], seconds)
            yield used

    registry = CollectorRegistry()
    registry.register(Figures())
    return generate_latest(registry).decode()
