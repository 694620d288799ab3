"""Runs of ``autofit run`` inside the process of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.harness.session.real_run import RealRun
from tests.roots import a_run


class Silent:
    """Takes the reports of a run."""

    rank = 0

    def send(self, event: Any) -> None:
        """Drop it."""


@contextmanager
def running(plan: Plan) -> Iterator[RealRun]:
    """Run the context under ``plan``, as ``autofit run`` does."""
    run = RealRun(a_run(plan), Silent(), meter.for_device("cpu"))  # type: ignore[arg-type]
    run.seams.knows_optimizers = False  # tests need not make one
    run.start()
    try:
        yield run
    finally:
        run.stop()
