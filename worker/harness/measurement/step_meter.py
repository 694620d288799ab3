"""Measures the steps of a script: their time and memory, and what was compiled in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.plan import Plan
from autofit.worker.harness.measurement.leaks import Graphs
from autofit.worker.harness.measurement.same_batches import SameBatches
from autofit.worker.harness.measurement.tracer import Tracer
from autofit.worker.harness.measurement.window import RefusedAllocations, Step, Window
from autofit.worker.harness.parent.agreement import Figures, Seen
from autofit.worker.harness.patching.observers import Watcher
from autofit.worker.harness.session.rank_agreement import RankAgreement
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.compile_state import CompileClock
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.records.phases import CHECK, CONFIRM, DATA, OBSERVE
from autofit.worker.records.trials import GraphsGrow, Measurement


class StepMeter(Watcher):
    """Measures each step of a trial, and adds it to a window."""

    def __init__(self, session: Session, ranks: RankAgreement) -> None:
        self.ranks = ranks
        self._session, self._meter = session, session.meter
        self.tracer = Tracer(session.seams.weight_views)
        self.compiling = CompileClock()
        self.graphs: Graphs | None = Graphs()
        """``None`` once the script was observed as it is."""
        self.refusals = RefusedAllocations(session.meter)
        self._batches = SameBatches()
        self._began = 0.0
        self._losses: list[torch.Tensor] = []
        self._compiled = 0.0
        """Seconds spent compiling when the last step ended."""
        self._retries = 0
        """Retries of the allocator, up to the last step."""

    def next_batch(self, plain: Callable[[Any], Any], iterator: Any) -> Any:
        """Return the next batch of a loader."""
        with self._session.phases.within(DATA):
            return self._batches.next(plain, iterator)

    def loss(self, value: torch.Tensor) -> None:
        """Store a loss until the step ends: reading it now would synchronize with the device."""
        self._losses.append(value)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Check a plan within this context."""
        with self.refusals.excluded(), self._session.phases.within(CHECK):
            yield

    # --- steps -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step."""
        self._losses = []
        self._session.seams.data_seconds = 0.0
        self._began = time.perf_counter()

    def close(self, window: Window | None) -> None:
        """End the step, and add it to ``window``."""
        self._meter.synchronize()
        seconds = time.perf_counter() - self._began
        self._meter.sample()
        if window is None:
            return
        session = self._session
        losses = [float(loss) for loss in self._losses]
        traced = self.tracer.close_step(losses, session.index)
        if traced and self.tracer.full:
            session.reads.stop()
        if self.graphs is not None and self.tracer.full:
            self.graphs.held.append(self._meter.current())
        compiled, self._compiled = self._compiled, self.compiling.seconds()
        session.phases.compiled(self._compiled)
        own = Seen(
            seconds=seconds,
            wait=session.seams.data_seconds,
            losses=tuple(losses),
            calls=session.step_calls.taken,
            proven=session.roots.proven(),
            compiled=self._compiled > compiled,
            shortage=window.shortage,
        )
        seen = Seen.by_all(self.ranks.agree("an optimizer step", own))
        retries, self._retries = self._retries, self._meter.retries()
        if session.step_calls.learns(seen.calls, session.facts.calls_per_step):
            session.learn(calls_per_step=seen.calls)
        window.shortage = seen.shortage
        if window.shortage is not None:
            return
        step = Step(seen.seconds, seen.wait, sum(seen.losses), self._retries > retries)
        counts = window.add(
            step,
            seen,
            self._meter.peak() if traced else None,
            last_traced=self.tracer.full and self.tracer.undisturbed,
        )
        if not counts:
            if seen.proven:
                self._meter.release()  # the check leaves cached memory
            self._meter.reset()  # peaks of a check and of the first step do not count

    # --- windows ---------------------------------------------------------------------------

    def window(self, plan: Plan, steps: int, *, check: bool) -> Window:
        """Return a window that begins now."""
        self._meter.release()
        self._batches.again(self._session.facts.calls_per_step)
        self._session.phases.enter(OBSERVE if plan.neutral else CONFIRM)
        compiled, refused = self.compiling.seconds(), self.refusals.count()
        return Window(plan, steps, compiled=compiled, refused=refused, check=check)

    def figures(self, window: Window) -> Figures:
        """Return what this rank has measured in ``window``."""
        return window.figures(self._meter.peak(), self.compiling.seconds(), self.refusals.count())

    def measurement(self, window: Window, ranks: tuple[Figures, ...]) -> Measurement:
        """Return what a window has measured; ``ranks``: the figures of all ranks."""
        return window.measurement(ranks, self._session.facts, self.ranks.share)

    def measured(self, window: Window) -> Measurement:
        """Return what a full window has measured, on all ranks; tell whether graphs were left."""
        ranks = self.ranks.agree("a measurement", self.figures(window))
        found = self.measurement(window, ranks)
        if (graphs := self.graphs) is not None:
            lost = "it is not known whether the script keeps graphs"
            growth = beside(lambda: graphs.growth(1, self._session.steps), None, lost)
            if growth is not None:
                self.ranks.tell(GraphsGrow(growth=growth))
            self.graphs = None
        return found
